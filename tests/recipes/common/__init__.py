"""Tests of what the recipes share."""
