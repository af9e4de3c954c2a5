"""Broadcasting many tensors as few."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridpar.comm.buckets import plan_buckets
from hybridpar.comm.group import Group

_LIMIT = 64 << 20


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: Group, root: int = 0) -> None:
    """Collective: overwrite ``tensors`` (equal shapes and dtypes on all ranks) with those of rank ``root``."""
    if group.size == 1:
        return
    for device, members in _by_device(tensors).items():
        counts, dtypes = [t.numel() for t in members], [t.dtype for t in members]
        for bucket in plan_buckets(counts, dtypes, range(len(members)), _LIMIT):
            parts = [members[index].detach() for index in bucket.members]
            if len(parts) == 1 and parts[0].is_contiguous():
                # As large tables are: a copy could be more than there is memory for.
                group.broadcast(parts[0].view(-1), root)
                continue
            flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
            group.broadcast(flat, root)
            for part, value in zip(parts, flat.split(bucket.counts), strict=True):
                part.copy_(value.view(part.shape))


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
