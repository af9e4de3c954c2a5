"""Checkpoints that load on any number of ranks and under any partition rule."""

from hybridpar.checkpoint.door import Checkpoint, load, newest, save

__all__ = ["Checkpoint", "load", "newest", "save"]
