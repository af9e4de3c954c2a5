"""Horovod's collectives that move values and add nothing: allgather, broadcast, alltoall. Any dtype.

Names, process sets and errors are as in ``hybridpar.comm.horovod.collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridpar.comm.horovod import asked
from hybridpar.comm.horovod.autograd import AllGather, AllToAll, Broadcast
from hybridpar.comm.horovod.handles import HANDLES, Calls
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """[rows, ...] -> [sum of the ranks' rows, ...]; rows may differ between ranks, and may be 0. Gradients pass.

    Raises:
        CommunicationError: other dimensions or dtypes differ, a rank has a tensor without dimensions or has joined, or
            was lost or late.
        ValueError: the name is in flight; not initialised.
        TypeError: not a dense tensor.
    """
    whole = process_set.exchange.named("allgather", name)
    result: Tensor = AllGather.apply(tensor, whole, process_set)  # type: ignore[no-untyped-call]
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As ``allgather``, without gradients. Returns a handle for ``poll`` and ``synchronize``."""
    whole = process_set.exchange.named("allgather", name)
    return HANDLES.add(asked.all_gather(tensor, whole, process_set).first())


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """``allgather`` of each tensor of a list; ranks' lists match by place."""
    tensors = asked.checked_list("grouped_allgather", tensors)
    base = process_set.exchange.named("grouped_allgather", name)
    names = asked.numbered(base, len(tensors))
    return [AllGather.apply(one, of, process_set) for one, of in zip(tensors, names, strict=True)]  # type: ignore[no-untyped-call]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As ``grouped_allgather``, without gradients. Returns one handle for all."""
    tensors = asked.checked_list("grouped_allgather", tensors)
    names = asked.numbered(process_set.exchange.named("grouped_allgather", name), len(tensors))
    pairs = zip(tensors, names, strict=True)
    return HANDLES.add(Calls([asked.all_gather(one, of, process_set).first() for one, of in pairs]))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of ``root_rank``, as a new tensor on all ranks. Gradients pass.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        root_rank: a rank of the job, also with a process set, of which it is one.

    Raises:
        CommunicationError: shapes, dtypes or roots differ, a rank has joined, or was lost or late.
        ValueError: root_rank is not in the process set; the name is in flight; not initialised.
        TypeError: not a dense tensor.
    """
    whole = process_set.exchange.named("broadcast", name)
    result: Tensor = Broadcast.apply(tensor, root_rank, whole, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As ``broadcast``, without gradients. Returns a handle."""
    whole = process_set.exchange.named("broadcast", name)
    return HANDLES.add(asked.broadcast(tensor, root_rank, whole, process_set, in_place=False))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As ``broadcast_async``, into the tensor itself: leave it alone until it is synchronized."""
    whole = process_set.exchange.named("broadcast", name)
    return HANDLES.add(asked.broadcast(tensor, root_rank, whole, process_set, in_place=True))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As ``broadcast``, into the tensor itself, without gradients."""
    result: Tensor = HANDLES.result(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Each rank deals out its rows to all ranks. Gradients pass.

    Every rank receives what all ranks send, and keeps its part: the cost is that of ``allgather``.

    Args:
        tensor: [rows, ...]; rows may differ between ranks.
        splits: how many rows go to each rank, in rank order; None shares them out evenly.

    Returns:
        What the ranks sent to this one, in rank order. With ``splits`` given, also how many rows each of them sent, as
        a tensor of the dtype of ``splits`` (int32 where that is a list).

    Raises:
        CommunicationError: other dimensions or dtypes differ; splits do not add up to the rows; a rank has joined, or
            was lost or late.
        ValueError: the name is in flight; not initialised.
        TypeError: not a dense tensor.
    """
    whole = process_set.exchange.named("alltoall", name)
    received, counts = AllToAll.apply(tensor, splits, whole, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, counts)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``alltoall``, without gradients. Returns a handle, which gives both results, with and without splits."""
    whole = process_set.exchange.named("alltoall", name)
    return HANDLES.add(asked.all_to_all(tensor, splits, whole, process_set))
