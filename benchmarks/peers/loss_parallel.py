"""PyTorch's own way of cutting a classification layer by class, as a peer: DTensor and `loss_parallel`.

The weight is a DTensor cut by rows; features are gathered to all ranks; logits are cut by class; the cross-entropy is
PyTorch's for logits that are cut so. Plain softmax without bias; nothing of hybridpar is used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel


class LossParallelHead(nn.Module):
    """Features [b, D] and labels int64 [b] to the mean loss of the global batch, which every rank gets.

    Args:
        rows: [n, D], the rows of this rank; those of all ranks follow each other in class order.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(DTensor.from_local(rows, self._mesh, [Shard(0)]))
        # For good: the backward pass must run inside, too.
        loss_parallel().__enter__()

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, labels)
        gathered = DTensor.from_local(features, self._mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        loss = F.cross_entropy(F.linear(gathered, self.weight), torch.cat(parts))
        assert isinstance(loss, DTensor)
        return loss.to_local()
