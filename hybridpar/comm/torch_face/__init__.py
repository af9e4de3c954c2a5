"""torch.distributed on hybridpar's lanes."""
