"""Sums of rows: each rank names its own.

# Note [rows travel in program order]
Which rows a rank sends differs from rank to rank and from step to step, so sums of rows cannot be merged as dense ones
are. They have a lane and a thread of their own, and leave in the order in which this rank asked for them: the program
must ask in the same order on every rank. A header with the key goes first, so that ranks that disagree raise, all of
them, and no rows are ever added to those of another key.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import accumulate

import torch
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.worker import Worker

Rows = tuple[Tensor, Tensor]
_END_SECONDS = 5.0


class RowSums:
    """Sums rows over the ranks of a lane, on a thread of its own: Note [rows travel in program order]."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._worker = lane, Worker("hybridpar-rows")
        self._outstanding: set[Future[Rows]] = set()
        self._process = os.getpid()
        atexit.register(_stop_at_exit, weakref.ref(self))

    def submit(self, index: int, names: Sequence[str], indices: Tensor, values: Tensor) -> Future[Rows]:
        synchronize(values)
        future: Future[Rows] = self._worker.submit(_sum_rows, self._lane, index, names, indices, values)
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        return future

    def outstanding(self) -> list[Future[Rows]]:
        """What has been submitted and has not arrived."""
        return list(self._outstanding)

    def close(self) -> None:
        self._worker.close()
        if not self.abort():
            self._lane.close()

    def abort(self) -> bool:
        """Let the thread come out of a call that waits for other ranks. False if it is in none."""
        if os.getpid() != self._process or not (lost := self.outstanding()):
            return False
        self._lane.abort()
        wait(lost, _END_SECONDS)
        return True


def _stop_at_exit(reference: weakref.ref[RowSums]) -> None:
    """A thread that comes out of a library's call while the interpreter goes down would take the process with it."""
    if (sums := reference()) is not None:
        sums.abort()


def synchronize(tensor: Tensor) -> None:
    """On CUDA: what this thread has asked for is done, whichever stream another one goes on with."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _sum_rows(lane: Lane, index: int, names: Sequence[str], indices: Tensor, values: Tensor) -> Rows:
    """Collective, on the thread of rows."""
    try:
        return _exchange_rows(lane, index, names, indices, values)
    except CommunicationError as error:
        if error.tensor == names[index]:
            raise
        # The lane knows of headers and rows, and not of keys.
        raise CommunicationError(error.reason, rank=error.rank, operation="rows", tensor=names[index]) from error


def _exchange_rows(lane: Lane, index: int, names: Sequence[str], indices: Tensor, values: Tensor) -> Rows:
    headers = torch.empty(lane.size, 2, dtype=torch.int64)
    lane.all_gather(headers.unbind(), torch.tensor([index, len(indices)]))
    keys, counts = headers.T.tolist()
    if len(set(keys)) > 1:
        wanted = "; ".join(
            f"{names[key] if key < len(names) else 'a key unknown here'} on rank {rank}"
            for key, rank in zip(keys, lane.ranks, strict=True)
        )
        raise CommunicationError(
            f"the ranks sent rows of different keys: {wanted}. Push sparse values in the same order on every rank",
            rank=lane.ranks[lane.rank],
            operation="rows",
            tensor=names[index],
        )
    everyone = indices.new_empty(sum(counts))
    lane.all_gather(everyone.split(counts), indices)
    rows = values.new_empty((sum(counts), *values.shape[1:]))
    lane.all_gather(rows.split(counts), values.contiguous())
    union, total = _merged(everyone, rows, counts)
    synchronize(total)
    return union, total


def _merged(indices: Tensor, values: Tensor, counts: Sequence[int]) -> Rows:
    """Sum of rows of equal index; runs of ``counts`` have no index twice and are added one after the other."""
    if len(counts) == 1:
        return indices, values
    union, places = torch.unique(indices, sorted=True, return_inverse=True)
    total = values.new_zeros((len(union), *values.shape[1:]))
    for end, count in zip(accumulate(counts), counts, strict=True):
        total.index_add_(0, places[end - count : end], values[end - count : end])
    return union, total


def coalesced(indices: Tensor, values: Tensor) -> Rows:
    """Copies with ascending indices, none of them twice."""
    union, places = torch.unique(indices, sorted=True, return_inverse=True)
    total = values.new_zeros((len(union), *values.shape[1:]))
    return union, total.index_add_(0, places, values)
