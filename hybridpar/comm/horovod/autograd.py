"""Collectives that gradients pass through, with Horovod's adjoints.

# Note [Horovod's gradients]
Horovod takes the loss to be the average of the ranks' losses. So the gradient of a gather or broadcast is the average
of the ranks' gradients, that of an average their average, and that of a sum their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod import asked
from hybridpar.comm.horovod.process_sets import ProcessSet
from hybridpar.comm.horovod.reduce_op import ReduceOp


class AllReduce(torch.autograd.Function):
    """The reduction of each tensor over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        grouped: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.arguments = op, factors, process_set, grouped
        if grouped:
            return tuple(asked.all_reduce_all(tensors, name, op, factors, process_set, in_place=False).result())
        whole = process_set.exchange.named("allreduce", name)
        return asked.all_reduce(tensors[0], whole, op, factors, process_set, in_place=False).result()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, factors, process_set, grouped = ctx.arguments
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(f"allreduce: gradients pass through Average and Sum, not through {op.name.capitalize()}")
        result = AllReduce.apply(None, op, factors, process_set, grouped, *grads)  # type: ignore[no-untyped-call]
        return (None,) * 5 + (result if grouped else (result,))


class AllGather(torch.autograd.Function):
    """[rows, ...] -> [sum of rows, ...]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        gathered: Tensor
        gathered, rows = asked.all_gather(tensor, name, process_set).result()
        rank = process_set.exchange.rank
        ctx.process_set, ctx.start, ctx.rows = process_set, sum(rows[:rank]), rows[rank]
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        average = _averaged(grads[0], ctx.process_set)
        return average.narrow(0, ctx.start, ctx.rows), None, None


class Broadcast(torch.autograd.Function):
    """The tensor of the root on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Tensor:
        ctx.process_set = process_set
        ctx.is_root = process_set.place_of(root_rank) == process_set.exchange.rank
        result: Tensor = asked.broadcast(tensor, root_rank, name, process_set, in_place=False).result()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        average = _averaged(grads[0], ctx.process_set)
        return (average if ctx.is_root else torch.zeros_like(average)), None, None, None


class AllToAll(torch.autograd.Function):
    """[sum of splits, ...] -> what was received, and how many rows of each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
        received, counts = asked.all_to_all(tensor, splits, name, process_set).result()
        ctx.process_set, ctx.counts = process_set, counts.tolist()
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        name = ctx.process_set.exchange.named("alltoall", None)
        back, _ = AllToAll.apply(grads[0], ctx.counts, name, ctx.process_set)  # type: ignore[no-untyped-call]
        return back, None, None, None


class ReduceScatter(torch.autograd.Function):
    """[rows, ...] -> this rank's share of the rows of the sum."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str, op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet
    ) -> Tensor:
        ctx.process_set, ctx.factor = process_set, factors[0] * factors[1]
        if op is ReduceOp.SUM:  # Note [Horovod's gradients]
            ctx.factor *= process_set.exchange.size
        result: Tensor = asked.reduce_scatter(tensor, name, op, factors, process_set).result()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        name = ctx.process_set.exchange.named("allgather", None)
        gathered = AllGather.apply(grads[0] * ctx.factor, name, ctx.process_set)  # type: ignore[no-untyped-call]
        return gathered, None, None, None, None


def _averaged(grad: Tensor, process_set: ProcessSet) -> Tensor:
    arguments = None, ReduceOp.AVERAGE, (1.0, 1.0), process_set, False, grad
    result: Tensor = AllReduce.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
