"""The usual model-parallel head, as a peer: rows cut by class, all local logits in memory, autograd throughout.

Each rank normalises all its rows, forms the full [B, n] block of logits, and takes the softmax with two all-reduces
of [B]; PyTorch differentiates, and an ordinary optimizer steps on the dense [n, D] gradient. Plain torch.distributed;
nothing of hybridpar is used. The margin is ArcFace with its true gradient.

Shapes: b local batch, B global batch, D embedding size, n rows of this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def arcface(cosine: Tensor, margin: float) -> Tensor:
    """cos(theta + margin) while theta + margin <= pi, then c - margin * sin(margin); Deng et al. 2019."""
    sine = (1 - cosine * cosine).clamp(min=1e-8).sqrt()
    moved = cosine * math.cos(margin) - sine * math.sin(margin)
    return torch.where(cosine > -math.cos(margin), moved, cosine - margin * math.sin(margin))


class GatherFeatures(torch.autograd.Function):
    """[b, D] of every rank to [B, D]; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.batch = len(features)
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0].contiguous()
        dist.all_reduce(whole)
        return whole[dist.get_rank() * ctx.batch :][: ctx.batch]


class ShardedCrossEntropy(torch.autograd.Function):
    """This rank's logits [B, n], which it overwrites, and the places of the targets among them, to the global mean."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, samples: Tensor, columns: Tensor) -> Tensor:
        maximum = logits.amax(dim=1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        target = torch.zeros_like(maximum)
        target[samples] = logits[samples, columns] - maximum[samples]
        probabilities = logits.sub_(maximum[:, None]).exp_()
        total = probabilities.sum(dim=1)
        dist.all_reduce(total)
        dist.all_reduce(target)
        ctx.save_for_backward(probabilities.div_(total[:, None]), samples, columns)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient, samples, columns = ctx.saved_tensors
        gradient[samples, columns] -= 1
        return gradient.mul_(grads[0] / len(gradient)), None, None


class DenseLogitsHead(nn.Module):
    """Features [b, D] and labels int64 [b] to the mean loss of the global batch, which every rank gets.

    Args:
        rows: [n, D], the rows of this rank.
        first: the class of row 0; rows follow in class order.
        rate: share of the rows that takes part in a step, the rows of the batch's classes always: a random number for
            each row, and the largest of them. The gradient is that of all rows nevertheless.
    """

    def __init__(
        self, rows: Tensor, first: int, *, scale: float = 64.0, margin: float = 0.5, rate: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows)
        self.first, self.scale, self.margin, self.rate = first, scale, margin, rate

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        gathered: Tensor = GatherFeatures.apply(F.normalize(features))  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, labels)
        own = torch.cat(parts) - self.first
        samples = torch.nonzero((own >= 0) & (own < len(self.weight))).flatten()
        columns = own[samples]
        weight: Tensor = self.weight
        if self.rate < 1:
            drawn = self._drawn(columns)
            weight, columns = weight[drawn], torch.searchsorted(drawn, columns)
        cosines = gathered @ F.normalize(weight).T
        cosines[samples, columns] = arcface(cosines[samples, columns], self.margin)
        loss: Tensor = ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            cosines.mul_(self.scale), samples, columns
        )
        return loss

    def _drawn(self, positives: Tensor) -> Tensor:
        """Rows that take part, ascending."""
        chances = torch.rand(len(self.weight))
        chances[positives] = 2.0
        count = max(len(positives.unique()), int(self.rate * len(self.weight)))
        return chances.topk(count).indices.sort().values
