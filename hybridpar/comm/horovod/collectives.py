"""Horovod's reductions, by the names and arguments that scripts use.

Every call takes ``name``: calls of all ranks by the same name belong together, in whatever order a rank makes them.
Calls without one belong together by kind and number, so ranks must make those in the same order. ``process_set`` says
which ranks take part. A call whose tensors, ops or factors differ between the ranks raises CommunicationError on all
of them, and so does one that a rank does not make in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod import asked
from hybridpar.comm.horovod.autograd import AllReduce, ReduceScatter
from hybridpar.comm.horovod.compression import Compression, check_compression
from hybridpar.comm.horovod.context import current
from hybridpar.comm.horovod.handles import HANDLES, Calls
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set
from hybridpar.comm.horovod.reduce_op import ReduceOp


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average (or ``op``) of the ranks' tensors, as a new tensor. Gradients pass through Average and Sum.

    Args:
        tensor: any shape, the same on all ranks; float32, float64, float16, bfloat16, int64, int32, int8 or uint8.
        average: Horovod's older way to say Average (True) or Sum (False).
        compression: the dtype on the way.
        op: Average, Sum, Min, Max or Product. Averages of whole numbers are rounded towards zero.
        prescale_factor, postscale_factor: of the values before and after.

    Raises:
        ValueError: op and average are both given or unknown; the name is in flight; not initialised.
        TypeError: not a dense tensor of these dtypes.
        NotImplementedError: Adasum.
        CommunicationError: the ranks ask for different things, or one was lost or late.
    """
    sent, context = check_compression(compression).compress(tensor)
    factors = float(prescale_factor), float(postscale_factor)
    reduced = AllReduce.apply(name, asked.reduction(average, op), factors, process_set, False, sent)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(reduced, context)
    return result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``allreduce``, without gradients. Returns a handle for ``poll`` and ``synchronize``."""
    factors, reduction = (float(prescale_factor), float(postscale_factor)), asked.reduction(average, op)
    whole = process_set.exchange.named("allreduce", name)
    return HANDLES.add(asked.all_reduce(tensor, whole, reduction, factors, process_set, in_place=False))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``allreduce_async``, into the tensor itself: leave it alone until it is synchronized."""
    factors, reduction = (float(prescale_factor), float(postscale_factor)), asked.reduction(average, op)
    whole = process_set.exchange.named("allreduce", name)
    return HANDLES.add(asked.all_reduce(tensor, whole, reduction, factors, process_set, in_place=True))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As ``allreduce``, into the tensor itself, without gradients."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = HANDLES.result(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allreduce`` of each tensor of a list; ranks' lists match by place."""
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in asked.checked_list("grouped_allreduce", tensors)]
    factors, reduction = (float(prescale_factor), float(postscale_factor)), asked.reduction(average, op)
    sent = [tensor for tensor, _ in pairs]
    reduced = AllReduce.apply(name, reduction, factors, process_set, True, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``grouped_allreduce``, without gradients. Returns one handle for all."""
    factors, reduction = (float(prescale_factor), float(postscale_factor)), asked.reduction(average, op)
    return HANDLES.add(asked.all_reduce_all(tensors, name, reduction, factors, process_set, in_place=False))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``grouped_allreduce_async``, into the tensors themselves."""
    factors, reduction = (float(prescale_factor), float(postscale_factor)), asked.reduction(average, op)
    return HANDLES.add(asked.all_reduce_all(tensors, name, reduction, factors, process_set, in_place=True))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As ``grouped_allreduce``, into the tensors themselves, without gradients."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Tensor] = HANDLES.result(handle)
    return result


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """The average or sum of sparse COO tensors [...]. Returns a function that waits for it.

    Raises:
        TypeError: not a sparse COO tensor.
        ValueError: op is neither Average nor Sum.
    """
    reduction = asked.sums_only("sparse_allreduce_async", op)
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"sparse_allreduce_async: expected a sparse COO tensor, got {tensor.layout}; use allreduce")
    base = process_set.exchange.named("sparse_allreduce", name)
    coalesced = tensor.detach().coalesce()
    indices = asked.all_gather(coalesced.indices().t(), f"{base}.indices", process_set)
    values = asked.all_gather(coalesced.values(), f"{base}.values", process_set)
    size = process_set.exchange.size

    def wait() -> Tensor:
        (places, _), (found, _) = Calls([indices, values]).result()
        total = torch.sparse_coo_tensor(places.t(), found, tensor.shape).coalesce()
        return total / size if reduction is ReduceOp.AVERAGE else total

    return wait


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The average (or sum) of the ranks' tensors [rows, ...], of which each rank gets its share of the rows.

    Where the rows do not divide evenly the first ranks get one more. Gradients pass through.

    Raises:
        ValueError: op is neither Average nor Sum; the name is in flight; not initialised.
        TypeError: not a dense tensor of a dtype that ``allreduce`` takes.
        CommunicationError: as ``allreduce``; or the tensors have no dimension.
    """
    sent, context = check_compression(compression).compress(tensor)
    reduction, factors = asked.sums_only("reducescatter", op), (float(prescale_factor), float(postscale_factor))
    whole = process_set.exchange.named("reducescatter", name)
    reduced = ReduceScatter.apply(sent, whole, reduction, factors, process_set)  # type: ignore[no-untyped-call]
    result: Tensor = compression.decompress(reduced, context)
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As ``reducescatter``, without gradients. Returns a handle."""
    reduction, factors = asked.sums_only("reducescatter", op), (float(prescale_factor), float(postscale_factor))
    whole = process_set.exchange.named("reducescatter", name)
    return HANDLES.add(asked.reduce_scatter(tensor, whole, reduction, factors, process_set))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of each tensor of a list; ranks' lists match by place."""
    tensors = asked.checked_list("grouped_reducescatter", tensors)
    base = process_set.exchange.named("grouped_reducescatter", name)
    return [
        reducescatter(one, of, compression, op, process_set, prescale_factor, postscale_factor)
        for one, of in zip(tensors, asked.numbered(base, len(tensors)), strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As ``grouped_reducescatter``, without gradients. Returns one handle for all."""
    reduction, factors = asked.sums_only("reducescatter", op), (float(prescale_factor), float(postscale_factor))
    tensors = asked.checked_list("grouped_reducescatter", tensors)
    names = asked.numbered(process_set.exchange.named("grouped_reducescatter", name), len(tensors))
    pairs = zip(tensors, names, strict=True)
    return HANDLES.add(Calls([asked.reduce_scatter(one, of, reduction, factors, process_set) for one, of in pairs]))


def join(device: int = -1) -> int:
    """This rank has no more data: go along with the others' reductions until all ranks have called this.

    Until then this rank's values change no result: zeros in sums and averages, which are still divided by the number
    of all ranks. Other collectives are refused, on the ranks that ask, while a rank has joined.

    Args:
        device: for Horovod's sake; values are made where the others' tensors are.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        CommunicationError: a rank was lost.
    """
    return current().exchange.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks that have not joined have called."""
    exchange = process_set.exchange
    exchange.finished(exchange.barrier(exchange.named("barrier", None)))
