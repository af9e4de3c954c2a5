"""torch's own DistributedDataParallel on its default process group, as a peer: as it comes, and with its bf16 hook.

Nothing of hybridpar is used. Gradients are averaged.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """float32 gradients in buckets of 25 MiB, which is the default. Options are DistributedDataParallel's."""
    # The parameters are equal already; sending them takes long on a slow link, and is not what is measured.
    return DistributedDataParallel(module, init_sync=False, **options)


def ddp_bf16(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Gradients travel, and are summed, in bfloat16."""
    wrapped = ddp(module, **options)
    wrapped.register_comm_hook(None, _bf16)
    return wrapped


# Under its own name DDP admits the hook with NCCL only; it is the same computation on gloo. No annotations: DDP checks
# them, and expects classes.
def _bf16(group, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.bf16_compress_hook(group, bucket)
