"""From what a script passes to a call on an exchange: the asynchronous half of every collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod.handles import Call, Calls
from hybridpar.comm.horovod.process_sets import ProcessSet
from hybridpar.comm.horovod.reduce_op import ReduceOp

_SUMS = (ReduceOp.AVERAGE, ReduceOp.SUM)


def reduction(average: bool | None, op: int | None) -> ReduceOp:
    """Horovod's two ways to say it; Average where nothing is said.

    Raises:
        ValueError: both are given, or there is no such op.
        NotImplementedError: Adasum.
    """
    if average is not None and op is not None:
        raise ValueError("expected op or average, got both; average is Horovod's older way to say it")
    if average is not None:
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if op not in list(ReduceOp):
        raise ValueError(f"op: expected hvd.Average, Sum, Min, Max or Product, got {op!r}")
    if op == ReduceOp.ADASUM:
        raise NotImplementedError(
            "op: expected hvd.Average, Sum, Min, Max or Product, got Adasum, which this face does not have; use "
            "hvd.Average, and scale the learning rate by hvd.size() as for Horovod's Average"
        )
    return ReduceOp(op)


def sums_only(call: str, op: int | None) -> ReduceOp:
    """Raises ValueError for an op other than Average and Sum."""
    found = reduction(None, op)
    if found not in _SUMS:
        raise ValueError(f"{call}: expected op hvd.Average or hvd.Sum, got {found.name.capitalize()}")
    return found


def all_reduce(
    tensor: Tensor, name: str, op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet, *, in_place: bool
) -> Call:
    """Under a whole name."""
    exchange = process_set.exchange
    _check(name, tensor)
    output = tensor.detach() if in_place else copied(tensor)
    if in_place and tensor.is_inference():
        output, given = copied(tensor), tensor
        return Call(exchange, exchange.all_reduce(name, output, op, *factors), lambda result: given.copy_(result))
    operation = exchange.all_reduce(name, output, op, *factors)
    return Call(exchange, operation, (lambda result: tensor) if in_place else None)


def all_reduce_all(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool,
) -> Calls:
    """Each under its place in the list."""
    base = process_set.exchange.named("grouped_allreduce", name)
    tensors = checked_list("grouped_allreduce", tensors)
    names = numbered(base, len(tensors))
    return Calls(
        [
            all_reduce(one, of, op, factors, process_set, in_place=in_place)
            for one, of in zip(tensors, names, strict=True)
        ]
    )


def all_gather(tensor: Tensor, name: str, process_set: ProcessSet) -> Call:
    """Gives what was gathered, and the rows of each rank."""
    exchange = process_set.exchange
    _check(name, tensor)
    return Call(exchange, exchange.all_gather(name, copied(tensor)))


def broadcast(tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet, *, in_place: bool) -> Call:
    """From a rank of the job."""
    exchange = process_set.exchange
    _check(name, tensor)
    root = process_set.place_of(root_rank)
    output = tensor.detach() if in_place else copied(tensor)
    if in_place and tensor.is_inference():
        output, given = copied(tensor), tensor
        return Call(exchange, exchange.broadcast(name, output, root), lambda result: given.copy_(result))
    operation = exchange.broadcast(name, output, root)
    return Call(exchange, operation, (lambda result: tensor) if in_place else None)


def all_to_all(tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet) -> Call:
    """Gives what was received, and how many rows of each rank, as a tensor like ``splits``."""
    exchange = process_set.exchange
    _check(name, tensor)
    counts = None if splits is None else [int(count) for count in splits]
    dtype, device = (splits.dtype, splits.device) if isinstance(splits, Tensor) else (torch.int32, torch.device("cpu"))
    operation = exchange.all_to_all(name, copied(tensor), counts)
    return Call(exchange, operation, lambda pair: (pair[0], torch.tensor(pair[1], dtype=dtype, device=device)))


def reduce_scatter(
    tensor: Tensor, name: str, op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet
) -> Call:
    """This rank's share of the rows of the sum."""
    exchange = process_set.exchange
    _check(name, tensor)
    return Call(exchange, exchange.reduce_scatter(name, copied(tensor), op, *factors))


def copied(tensor: Tensor) -> Tensor:
    """What may be written to on another thread, and which the caller does not hold."""
    with torch.inference_mode(False):
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def numbered(base: str, count: int) -> list[str]:
    """Names of the members of a group."""
    return [f"{base}.{place + 1}of{count}" for place in range(count)]


def checked_list(call: str, tensors: Any) -> list[Tensor]:
    """Raises TypeError for a tensor in place of a list, ValueError for nothing in it."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"{call}: expected a list of tensors, got a tensor; put it into a list")
    found = list(tensors)
    if not found:
        raise ValueError(f"{call}: expected at least one tensor, got an empty list")
    return found


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; use torch.tensor(value)")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor, got {tensor.layout}; use hvd.sparse_allreduce_async, or to_dense()"
        )
