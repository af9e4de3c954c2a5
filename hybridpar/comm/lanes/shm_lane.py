"""The lane of ranks that share a host: collectives over memory that all have mapped (csrc/shm.cc, shm_buckets.cc)."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import hybridpar.kernels._native as _native
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane, Op, describe, written
from hybridpar.comm.lanes.segments import share
from hybridpar.comm.lanes.values import gather_json
from hybridpar.topology import host_identity

_CODES = {
    torch.float32: _native.FLOAT32,
    torch.float64: _native.FLOAT64,
    torch.bfloat16: _native.BFLOAT16,
    torch.float16: _native.FLOAT16,
    torch.int64: _native.INT64,
    torch.uint8: _native.UINT8,
}
DTYPES = frozenset(_CODES)
_REDUCTIONS: dict[Op, int] = {"sum": 0, "max": 1, "min": 2}
# What is staged at a time stays in the caches, and is long enough to make waits rare. They cost more where ranks change
# places on a core.
_CHUNK_BYTES = 256 << 10
_CROWDED_CHUNK_BYTES = 512 << 10
_PAGE = 4096


class ShmLane(Lane):
    """Shared memory between processes, or threads, of one host; CPU tensors of ``DTYPES`` (``all_to_all``: of any).

    Sums are taken in rank order, half types in float32 and rounded once: every rank gets the same bits, run after run.
    A wait that has lasted for a tenth of a second looks whether the other ranks still live.

    Args:
        parent: a lane of the same ranks, over which they meet. Collective.
        timeout: seconds that one collective may wait for the other ranks.
        chunk_bytes: what a rank stages at a time, a multiple of 128; chosen by ranks and cores if None.

    Raises:
        ValueError: the ranks are on different hosts (on every rank).
        OSError: the host has no shared memory, or not enough (on every rank).
    """

    def __init__(self, parent: Lane, timeout: float, chunk_bytes: int | None = None) -> None:
        self.rank, self.size, self.ranks = parent.rank, parent.size, parent.ranks
        self.timeout, self._parent = timeout, parent
        own = os.getpid()
        members = gather_json(parent, [host_identity(), own, _native.process_start(own), _usable_cores()])
        if len(hosts := {host for host, *_ in members}) > 1:
            raise ValueError(
                f"expected ranks of one host, got {len(hosts)} hosts; use a group for each host, or another lane"
            )
        cores = len({core for *_, usable in members for core in usable})
        if chunk_bytes is None:
            chunk_bytes = _CHUNK_BYTES if self.size <= cores else _CROWDED_CHUNK_BYTES
        self._chunk_bytes = chunk_bytes
        size = _native.communicator_bytes(self.size, chunk_bytes)
        self._memory = share(parent, size)
        columns = [[member[1] for member in members], [member[2] for member in members], list(self.ranks)]
        processes, starts, job_ranks = (np.array(column, dtype=np.int64) for column in columns)
        address = _bytes_of(self._memory).data_ptr()
        self._native = _native.Communicator(
            address, self.rank, processes, starts, job_ranks, chunk_bytes, cores, timeout
        )
        self._allocations = 0
        self._children: weakref.WeakSet[ShmLane] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._origin: ShmLane | None = None  # kept, for abort() goes from it to this lane
        self._owned: Lane | None = None  # the parent, where it was made for this lane alone
        self._aborted, self._why = False, ""
        # At the end of the process, too: a thread inside a call must be out before the interpreter goes.
        self._finalizer = weakref.finalize(self, _leave, self._native, self._memory)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Collective: uninitialised memory of this rank that all ranks can reach: a bucket.

        ``all_reduce`` of a bucket, or of any contiguous part of it that all ranks name alike, copies nothing. Nor does
        ``reduce_scatter`` (``all_gather``) whose inputs (outputs) lie there one behind the other, on all ranks alike.
        It may outlive the lane.

        Raises:
            TypeError: the dtype is not supported, or the device is not the CPU (before anything is sent).
            OSError: there is not enough shared memory (on every rank).
        """
        if dtype not in _CODES or device.type != "cpu":
            raise TypeError(f"expected CPU memory of {_names()}, got {dtype} on {device}; use torch.empty")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        # The odd cache lines keep the parts of different ranks from falling into the same sets of the caches.
        stride = (numel * dtype.itemsize + _PAGE - 1) // _PAGE * _PAGE + 9 * 64
        mapping = share(self, stride * self.size)
        everyone = _bytes_of(mapping)
        self._allocations += 1
        self._native.add_buckets(everyone.data_ptr(), stride, self._allocations)
        # Dropped before the addresses can serve other memory.
        weakref.finalize(mapping, self._native.drop_buckets, everyone.data_ptr()).atexit = False
        begin = self.rank * stride
        return everyone[begin : begin + numel * dtype.itemsize].view(dtype)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        code = _CODES.get(tensor.dtype)
        if code is None or not tensor.is_cpu:
            raise _unsupported("all_reduce", tensor)
        try:
            self._native.all_reduce(tensor.data_ptr(), tensor.numel(), code, _REDUCTIONS[op])
        except RuntimeError as error:
            raise self._failure(error, "all_reduce", tensor) from None
        written(tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        _check(outputs, tensor, "all_gather")
        with_addresses = _addresses(outputs), _bytes_in(outputs), tensor.data_ptr()
        self._call("all_gather", tensor, self._native.all_gather, *with_addresses)
        written(*outputs)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        _check(inputs, output, "reduce_scatter")
        counts = np.array([part.numel() for part in inputs], dtype=np.int64)
        arguments = output.data_ptr(), _addresses(inputs), counts, _CODES[output.dtype]
        self._call("reduce_scatter", output, self._native.reduce_scatter, *arguments)
        written(output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for one in (*outputs, *inputs):
            if not one.is_cpu:
                raise TypeError(
                    f"all_to_all through shared memory: expected CPU tensors, got {describe(one)} on {one.device}; use "
                    "a lane of torch"
                )
            assert one.is_contiguous(), "the lane's contract"
        lists = _addresses(outputs), _bytes_in(outputs), _addresses(inputs), _bytes_in(inputs)
        self._call("all_to_all", inputs, self._native.all_to_all, *lists)
        written(*outputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        _check((), tensor, "broadcast")
        self._call("broadcast", tensor, self._native.broadcast, tensor.data_ptr(), tensor.nbytes, root)
        if self.rank != root:
            written(tensor)

    def barrier(self) -> None:
        self._call("barrier", None, self._native.barrier)

    def split(self, members: Sequence[int]) -> Lane:
        parent = self._parent.split(members)
        try:
            lane = self._child(parent)
        except BaseException:
            parent.close()
            raise
        lane._owned = parent
        return lane

    def clone(self) -> Lane:
        return self._child(self)

    def close(self) -> None:
        self._finalizer()
        if self._owned is not None:
            self._owned.close()

    def abort(self, why: str = "") -> None:
        """Make every present and later call of every rank fail, on this lane and those made of it.

        This rank cannot go on; ``why`` is told to the others.
        """
        with self._lock:
            self._aborted, self._why = True, why
            children = list(self._children)
        self._native.abort(why)
        for child in children:
            child.abort(why)

    def _child(self, parent: Lane) -> ShmLane:
        child = ShmLane(parent, self.timeout, self._chunk_bytes)
        child._origin = self
        with self._lock:
            self._children.add(child)
            aborted, why = self._aborted, self._why
        if aborted:
            child.abort(why)
        return child

    def _call(
        self,
        operation: str,
        tensor: Tensor | Sequence[Tensor] | None,
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        try:
            function(*arguments)
        except RuntimeError as error:
            raise self._failure(error, operation, tensor) from None

    def _failure(
        self, error: RuntimeError, operation: str, tensor: Tensor | Sequence[Tensor] | None
    ) -> CommunicationError:
        text = "nothing" if tensor is None else describe(tensor)
        return CommunicationError(str(error), rank=self.ranks[self.rank], operation=operation, tensor=text)


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _leave(native: _native.Communicator, memory: mmap.mmap) -> None:
    """``memory`` is passed to be kept until the last call is over."""
    native.leave()
    deadline = time.monotonic() + 1
    while native.calls_inside and time.monotonic() < deadline:
        time.sleep(0.001)


def _bytes_of(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _addresses(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _bytes_in(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)


def _check(others: Sequence[Tensor], tensor: Tensor, operation: str) -> None:
    for one in (tensor, *others):
        if one.dtype not in _CODES or not one.is_cpu:
            raise _unsupported(operation, one)
        if one.dtype != tensor.dtype:
            raise TypeError(f"{operation}: expected tensors of one dtype, got {tensor.dtype} and {one.dtype}")
        assert one.is_contiguous(), "the lane's contract"


def _unsupported(operation: str, tensor: Tensor) -> TypeError:
    return TypeError(
        f"{operation} through shared memory: expected a CPU tensor of {_names()}, got {describe(tensor)} on "
        f"{tensor.device}; cast it, or use a lane of torch"
    )


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _CODES)
