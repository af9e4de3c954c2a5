"""Lanes on torch's process groups: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from hybridpar.comm.attendance import Attendance
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes import Lane, Op, describe
from hybridpar.comm.watch import Watch

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job find each other.

    Attributes:
        store: one that all of them reach.
        rank: number of this rank in the job.
        timeout: seconds that one collective may wait for the other ranks.
        watch: knows which ranks are gone.
        nccl: whether CUDA tensors travel over NCCL; over gloo otherwise.
    """

    store: Store
    rank: int
    timeout: float
    watch: Watch
    nccl: bool


class TorchLane(Lane):
    """A lane on communicators of its own, which are made straight from the store.

    Args:
        meeting: where the members find each other.
        ranks: numbers of the members in the job, in lane order; all of them construct the lane together.
        interface: name of the network interface of this host by which gloo travels; None leaves the choice to gloo
            (GLOO_SOCKET_IFNAME, or the one that the host's name stands for).

    Raises:
        CommunicationError: the members could not be reached in time.
        ValueError: there is no such interface.
    """

    _gloo: Any
    _nccl: Any

    def __init__(self, meeting: Meeting, ranks: Sequence[int], interface: str | None = None) -> None:
        self._meeting, self.interface = meeting, interface
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(meeting.rank)
        self._process = os.getpid()
        self._attendance: Attendance | None = None
        self._gloo, self._nccl = None, None
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        with self._named("connect", "nothing"):
            # Members make the same lanes in the same order, so each counts its own and all find the same number.
            number = meeting.store.add(f"hybridpar/{members}/{self.rank}", 1)
            key = f"{members}/{number}"
            self._attendance = Attendance(meeting.watch, key, self.ranks)
            place = PrefixStore(f"hybridpar/{key}", meeting.store)
            self._gloo = new_gloo(place, self.rank, self.size, meeting.timeout, interface)
            if meeting.nccl:
                self._nccl = new_nccl(place, self.rank, self.size, meeting.timeout)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        with self._named("all_reduce", tensor):
            # gloo rounds after every addition. With two ranks there is only one.
            if tensor.dtype in _HALF and tensor.is_cpu and op == "sum" and self.size > 2:
                self._exchange_add_gather(tensor)
                return
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]  # type: ignore[assignment]
            self._backend(tensor).allreduce([tensor], options).wait()

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        # One broadcast a rank: takes uneven sizes, and beats gloo's own all_gather three to one.
        own = outputs[self.rank]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        with self._named("all_gather", tensor):
            backend = self._backend(tensor)
            works = [self._sent(backend, output, root) for root, output in enumerate(outputs) if output.numel()]
            for work in works:
                work.wait()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        with self._named("reduce_scatter", output):
            if output.is_cuda and self._nccl is not None:
                self._nccl.reduce_scatter([output], [list(inputs)], dist.ReduceScatterOptions()).wait()
            else:
                sent = torch.cat([part.reshape(-1) for part in inputs]).cpu()
                self._exchange_and_add(output, sent, [part.numel() for part in inputs])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._named("broadcast", tensor):
            self._sent(self._backend(tensor), tensor, root).wait()

    def barrier(self) -> None:
        with self._named("barrier", "nothing"):
            self._gloo.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()

    def split(self, members: Sequence[int], interface: str | None = None) -> Lane:
        """As every lane's.

        Args:
            members: ranks of this lane.
            interface: as for the constructor; None means this lane's.
        """
        return TorchLane(self._meeting, [self.ranks[member] for member in members], interface or self.interface)

    def close(self) -> None:
        # Without its owner the group closes its connections, which is how the others hear that this rank is done.
        self._gloo = self._nccl = None
        if self._attendance is not None:
            self._attendance.close()

    def _backend(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda and self._nccl is not None else self._gloo

    def _sent(self, backend: Any, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return backend.broadcast([tensor], options)

    def _exchange_add_gather(self, tensor: Tensor) -> None:
        """All-reduce whose sum is rounded once."""
        parts = tensor.view(-1).tensor_split(self.size)
        self._exchange_and_add(parts[self.rank], tensor.view(-1), [part.numel() for part in parts])
        works = [self._sent(self._gloo, part, root) for root, part in enumerate(parts) if part.numel()]
        for work in works:
            work.wait()

    def _exchange_and_add(self, output: Tensor, sent: Tensor, sizes: list[int]) -> None:
        """Every rank sends each other its part, and adds up what arrives in rank order, half types in float32.

        Half the bytes of gloo's own reduce_scatter.
        """
        numel = output.numel()
        received = sent.new_empty(self.size * numel)
        self._gloo.alltoall_base(received, sent, [numel] * self.size, sizes, dist.AllToAllOptions()).wait()
        rows = received.view(self.size, -1)
        total = rows[0].float() if sent.dtype in _HALF and self.size > 2 else rows[0]
        for row in rows[1:]:
            total += row
        output.view(-1).copy_(total)

    @contextmanager
    def _named(self, operation: str, tensor: Tensor | str) -> Iterator[None]:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{operation} in a forked child: expected the process that made the lane; start workers with "
                "multiprocessing's spawn, or fork before hp.init()"
            )
        if operation != "connect" and self._gloo is None:
            raise self._failure("the lane is closed, or failed earlier", operation, tensor)
        if self._attendance is not None:
            self._attendance.begin()
        try:
            yield
        except RuntimeError as error:
            # See Note [who is gone].
            reason = str(error) if self._attendance is None else self._attendance.blame(str(error))
            self.close()
            raise self._failure(reason, operation, tensor) from error

    def _failure(self, reason: str, operation: str, tensor: Tensor | str) -> CommunicationError:
        text = tensor if isinstance(tensor, str) else describe(tensor)
        return CommunicationError(reason, rank=self._meeting.rank, operation=operation, tensor=text)


def new_gloo(store: Store, rank: int, size: int, timeout: float, interface: str | None) -> Any:
    seconds = timedelta(seconds=timeout)
    if interface is None:
        return dist.ProcessGroupGloo(store, rank, size, seconds)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = seconds, 2
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    except RuntimeError as error:
        text = f"interface: expected a network interface of this host, got {interface!r} ({error})"
        raise ValueError(text) from error
    return dist.ProcessGroupGloo(store, rank, size, options)


def new_nccl(store: Store, rank: int, size: int, timeout: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
