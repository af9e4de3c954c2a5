"""Differentiable collectives. The adjoint of a gather is a sum-scatter, and the other way round.

The convention is: every rank computes the same scalar loss, or its own summand of it, and gradients are summed over
ranks. So a rank's gradient is the derivative of the global loss with respect to what that rank put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.all_gather(tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.group, ctx.sizes), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, sizes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.reduce_scatter(tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.sizes), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, group: Group) -> Tensor:
        kept = torch.where(mask, values, 0)
        sums = [kept.sum(dtype=torch.float64), mask.sum(dtype=torch.float64)]
        totals = group.all_reduce(torch.stack(sums))
        count = totals[1].clamp(min=1)
        ctx.save_for_backward(mask, count)
        ctx.dtype = values.dtype
        return (totals[0] / count).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mask, count = ctx.saved_tensors
        return (mask * (grads[0] / count)).to(ctx.dtype), None, None


def all_gather(tensor: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """``Group.all_gather`` with the gradient reduce-scattered (summed) back. [rows, ...] -> [sum of sizes, ...]."""
    result: Tensor = _AllGather.apply(tensor, group, sizes)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter(tensor: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """``Group.reduce_scatter`` with the gradient gathered back. [sum of sizes, ...] -> [rows, ...]."""
    result: Tensor = _ReduceScatter.apply(tensor, group, sizes)  # type: ignore[no-untyped-call]
    return result


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, out of place; the gradient is the sum of the ranks' gradients.

    That is the derivative when every rank goes on to compute a summand of its own. Where all ranks compute the same
    scalar from the result, each of them backpropagates a full copy: divide by ``group.size`` there.
    """
    result: Tensor = _AllReduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def global_mean(values: Tensor, mask: Tensor | None = None, *, group: Group) -> Tensor:
    """Mean of the values of all ranks, for losses that follow "sum everywhere, divide once".

    Args:
        values: any shape, may differ between ranks, may be empty.
        mask: bool, the shape of ``values``: which values count. None means all.
        group: the ranks.

    Returns:
        A scalar, the same on every rank (0 where nothing counts). Its gradient with respect to this rank's values
        is mask / global count, so gradients that are SUMMED over ranks are those of the global mean.

    Raises:
        ValueError: mask and values differ in shape, or mask is not bool.
    """
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"expected a bool mask of shape {list(values.shape)}, got {mask.dtype} of {list(mask.shape)}; "
            "compare with the ignored value, for example labels != -1"
        )
    result: Tensor = _GlobalMean.apply(values, mask, group)  # type: ignore[no-untyped-call]
    return result
