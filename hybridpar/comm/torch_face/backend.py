"""Makes "hybridpar" known to torch.distributed, which is all that importing this module does."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridpar.comm.torch_face.process_group import HybridProcessGroup, ProcessGroupOptions


def _create(given: Any, options: Any) -> HybridProcessGroup:
    """What torch calls for ``init_process_group`` and ``new_group``."""
    if options is not None and not isinstance(options, ProcessGroupOptions):
        raise TypeError(f"pg_options: expected hybridpar.ProcessGroupOptions or None, got {type(options).__name__}")
    if options is None:
        world = dist.group.WORLD
        options = world.hybridpar_options if isinstance(world, HybridProcessGroup) else ProcessGroupOptions()
    _serve_monitored_barrier()
    ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    timeout = given.timeout if isinstance(given.timeout, timedelta) else timedelta(seconds=given.timeout)
    return HybridProcessGroup(given.store, given.group_rank, ranks, timeout, options)


@functools.cache
def _serve_monitored_barrier() -> None:
    """torch's own function refuses every backend whose name is not gloo."""
    refusing = dist.monitored_barrier

    @functools.wraps(refusing)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours = group or dist.group.WORLD
        if isinstance(ours, HybridProcessGroup):
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            refusing(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


dist.Backend.register_backend("hybridpar", _create, extended_api=True, devices=["cpu", "cuda"])
