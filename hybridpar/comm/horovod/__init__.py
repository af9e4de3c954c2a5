"""Horovod's torch API on a group: what ``import hybridpar.horovod as hvd`` shows."""
