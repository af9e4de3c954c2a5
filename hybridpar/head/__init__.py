"""The sharded classification head."""
