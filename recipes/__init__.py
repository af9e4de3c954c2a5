"""Training recipes built on hybridpar."""
