"""The gradient engine: a fixed plan of buckets, how they travel, and how the plan is chosen."""
