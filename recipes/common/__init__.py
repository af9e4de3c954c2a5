"""What the recipes share: the loop of a run, its options, its record, its plots."""
