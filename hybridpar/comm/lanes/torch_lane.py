"""Lanes on torch's process groups: gloo for CPU tensors, NCCL for CUDA tensors.

# Note [waits in gloo]
gloo cannot be told to stop waiting: a call returns when its peers have come, have closed their connections, or the time
is over; even freeing a group waits for what is pending in it. So waits here are cut into slices. Between them a rank
sees that its lane was aborted, or that the process ends, and now and then asks whether the others still live. What is
pending then stays with gloo: its group is never freed, and its connections end with the process.

# Note [pieces]
Connections side by side do not get equal parts of a network, nor does one get the same in both directions. What all
ranks broadcast at the same time is over when the slowest connection is done, while the others idle. In pieces, of which
gloo has two under way at a time, none gets ahead of the others: between two hosts all-gathers of 2 MB on three lanes
use 91 % of a link of 1 Gbit/s in place of 83 %. But each piece costs time of its own: where nothing but memory is in
the way, gathers in pieces take two to four times as long. So they are for lanes on slow networks only.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.attendance import Attendance
from hybridpar.comm.lanes.lane import Lane, Op, check_reducible, describe, written
from hybridpar.comm.lanes.memory import bytes_of, deal, joined, room_for
from hybridpar.comm.lanes.watch import Watch

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HALF = (torch.bfloat16, torch.float16)
_SLICE = timedelta(milliseconds=100)
# Seconds after which a waiting rank first asks whether the others live; later it asks more and more seldom.
_FIRST_LOOK = 1.0
# Note [pieces]: bytes at least, and how many at most.
_PIECE, _PIECES = 256 << 10, 8


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job find each other.

    Attributes:
        store: one that all of them reach; the thread that makes the meeting uses it, others have connections of
            their own.
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
    _thread: int = field(default_factory=threading.get_ident, compare=False, repr=False)
    _local: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    def store_here(self) -> Store:
        """The store, over a connection that only this thread waits at."""
        if threading.get_ident() == self._thread:
            return self.store
        if not hasattr(self._local, "store"):
            self._local.store = own_connection(self.store)
        return cast("Store", self._local.store)


class TorchLane(Lane):
    """A lane on communicators of its own, which are made straight from the store.

    Args:
        meeting: where the members find each other.
        ranks: numbers of the members in the job, in lane order; all of them construct the lane together.
        interface: name of the network interface of this host by which gloo travels; None leaves the choice to gloo
            (GLOO_SOCKET_IFNAME, or the one that the host's name stands for).
        ordered: CPU sums are taken in rank order, whatever part of a tensor they belong to.
        in_pieces: what is gathered travels so, see Note [pieces].
        origin: name of the lane that this one is split off.

    Raises:
        CommunicationError: the members could not be reached in time.
        RuntimeError: there is no such interface.
    """

    def __init__(
        self,
        meeting: Meeting,
        ranks: Sequence[int],
        interface: str | None = None,
        *,
        ordered: bool = False,
        in_pieces: bool = False,
        origin: str = "",
    ) -> None:
        self._meeting, self.interface, self._ordered, self._in_pieces = meeting, interface, ordered, in_pieces
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(meeting.rank)
        self._process = os.getpid()
        self._gloo: Any = None
        self._nccl: Any = None
        self._aborted: str | None = None
        # How many calls are inside gloo, and whether one was left there.
        self._inside, self._stuck = 0, False
        self._lock = threading.Lock()
        store = meeting.store_here()
        members = hashlib.sha256(f"{origin} {self.ranks}".encode()).hexdigest()[:16]
        try:
            # Members make lanes of the same origin in the same order, so each counts and all find the same number.
            self.key = f"{members}/{store.add(f'hybridpar/{members}/{self.rank}', 1)}"
            place = PrefixStore(f"hybridpar/{self.key}", store)
            self._gloo = new_gloo(place, self.rank, self.size, meeting.timeout, interface)
            if meeting.nccl:
                self._nccl = new_nccl(place, self.rank, self.size, meeting.timeout)
        except RuntimeError as error:
            lost = "; ".join(meeting.watch.gone(self.ranks).values())
            reason = f"{lost} ({error})" if lost else str(error)
            raise self._failure(reason, "connect", "nothing") from error
        self._attendance = Attendance(meeting.watch, self.key, self.ranks)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        check_reducible("all_reduce", tensor)
        with self._call("all_reduce", tensor):
            # gloo rounds half types after every addition, and takes sums in an order that depends on the place. With
            # two ranks there is only one addition.
            rounds_or_orders = tensor.dtype in _HALF or (self._ordered and tensor.is_floating_point())
            if op == "sum" and self.size > 2 and tensor.is_cpu and rounds_or_orders:
                self._exchange_add_gather(tensor)
            else:
                options = dist.AllreduceOptions()
                options.reduceOp = _OPS[op]  # type: ignore[assignment]
                self._await(tensor, [self._backend(tensor).allreduce([tensor], options)])
            written(tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        # One broadcast a rank: takes uneven sizes, and beats gloo's own all_gather three to one.
        own = outputs[self.rank]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        with self._call("all_gather", tensor):
            self._broadcast_each(outputs)
            written(*outputs)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        check_reducible("reduce_scatter", output)
        with self._call("reduce_scatter", output):
            if self._nccl is not None and output.is_cuda:
                works = [self._nccl.reduce_scatter([output], [list(inputs)], dist.ReduceScatterOptions())]
                self._await(output, works)
            else:
                sent = torch.cat([part.reshape(-1) for part in inputs]).cpu()
                self._exchange_and_add(output, sent, [part.numel() for part in inputs])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        received, sent = [bytes_of(output) for output in outputs], [bytes_of(part) for part in inputs]
        with self._call("all_to_all", describe(inputs)):
            if self._nccl is not None and inputs[0].is_cuda:
                self._await(inputs[0], [self._nccl.alltoall(received, sent, dist.AllToAllOptions())])
            else:
                self._exchange(received, sent)
            written(*outputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._call("broadcast", tensor):
            self._await(tensor, [_broadcast(self._backend(tensor), tensor, root)])
            if self.rank != root:
                written(tensor)

    def barrier(self) -> None:
        flag = torch.zeros(1)
        with self._call("barrier", "nothing"):
            self._await(flag, [self._gloo.allreduce([flag], dist.AllreduceOptions())])

    def split(
        self,
        members: Sequence[int],
        interface: str | None = None,
        *,
        ordered: bool | None = None,
        in_pieces: bool | None = None,
    ) -> Lane:
        """As every lane's.

        Args:
            members: ranks of this lane.
            interface, ordered, in_pieces: as for the constructor; None means this lane's.
        """
        return TorchLane(
            self._meeting,
            [self.ranks[member] for member in members],
            interface or self.interface,
            ordered=self._ordered if ordered is None else ordered,
            in_pieces=self._in_pieces if in_pieces is None else in_pieces,
            origin=self.key,
        )

    def close(self) -> None:
        self._let_go("the lane is closed")
        self._attendance.close()

    def abort(self, why: str = "") -> None:
        self._attendance.give_up(why)
        self._let_go(why or "this rank cannot go on")

    def _let_go(self, why: str) -> None:
        """Close the connections, which is how the others hear that this rank is done; see Note [waits in gloo]."""
        with self._lock:
            self._aborted = self._aborted or why
            if self._inside:
                return  # whoever is inside lets go
            gloo, nccl, self._gloo, self._nccl = self._gloo, self._nccl, None, None
            if self._stuck:
                _keep_for_good(gloo)
        if nccl is not None:
            nccl.abort()

    def _backend(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda and self._nccl is not None else self._gloo

    def _broadcast_each(self, tensors: Sequence[Tensor]) -> None:
        """Of each rank its own, all at the same time."""
        sent = [(root, tensor) for root, tensor in enumerate(tensors) if tensor.numel()]
        if not sent:
            return
        backend = self._backend(sent[0][1])
        step = longest = max(tensor.nbytes for _, tensor in sent)
        if self._in_pieces and backend is self._gloo:
            step = max(_PIECE, -(-longest // _PIECES))
        split = [(root, bytes_of(tensor).split(step)) for root, tensor in sent]
        rounds = zip_longest(*([(root, piece) for piece in pieces] for root, pieces in split))
        works = [_broadcast(backend, each[1], each[0]) for row in rounds for each in row if each is not None]
        self._await(sent[0][1], works)

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Bytes to and from each rank, through gloo."""
        room, data = room_for(received), joined(sent)
        there, here = (room.new_empty(room.numel(), device="cpu"), data.cpu()) if room.is_cuda else (room, data)
        sizes = [[part.numel() for part in parts] for parts in (received, sent)]
        self._await(here, [self._gloo.alltoall_base(there, here, *sizes, dist.AllToAllOptions())])
        if there is not room:
            room.copy_(there)
        deal(room, received)

    def _exchange_add_gather(self, tensor: Tensor) -> None:
        """All-reduce whose sum is taken in rank order and rounded once."""
        parts = tensor.view(-1).tensor_split(self.size)
        self._exchange_and_add(parts[self.rank], tensor.view(-1), [part.numel() for part in parts])
        self._broadcast_each(parts)

    def _exchange_and_add(self, output: Tensor, sent: Tensor, sizes: list[int]) -> None:
        """Every rank sends each other its part, and adds up what arrives in rank order, half types in float32.

        Half the bytes of gloo's own reduce_scatter.
        """
        numel = output.numel()
        received = sent.new_empty(self.size * numel)
        work = self._gloo.alltoall_base(received, sent, [numel] * self.size, sizes, dist.AllToAllOptions())
        self._await(sent, [work])
        rows = received.view(self.size, -1)
        total = rows[0].float() if sent.dtype in _HALF and self.size > 2 else rows[0]
        for row in rows[1:]:
            total += row
        output.view(-1).copy_(total)

    def _await(self, tensor: Tensor, works: Sequence[Any]) -> None:
        """Until the works on ``tensor`` are done; on NCCL, until they are ordered before the current stream."""
        if tensor.is_cuda and self._nccl is not None:
            for work in works:
                work.wait()
            return
        started = time.monotonic()
        look = started + _FIRST_LOOK
        try:
            for work in works:
                while not self._is_done(work):
                    now = time.monotonic()
                    if now >= look:
                        if lost := self._attendance.lost():
                            raise _LostError(lost)
                        look = now + (now - started)
        except BaseException:
            self._stuck = self._stuck or not all(work.is_completed() for work in works)
            raise

    def _is_done(self, work: Any) -> bool:
        """Wait for a slice. See Note [waits in gloo]."""
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended just after the slice; otherwise this says what went wrong
                return True
            if self._aborted is not None or _ENDING.is_set():
                raise _LostError(self._aborted or "the process ends") from None
            return False
        return True

    @contextmanager
    def _call(self, operation: str, tensor: Tensor | str) -> Iterator[None]:
        """Around a collective. Errors name it, and end the use of the lane."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{operation} in a forked child: expected the process that made the lane; start workers with "
                "multiprocessing's spawn, or fork before hp.init()"
            )
        with self._lock:
            if self._aborted is not None:
                raise self._failure(self._aborted, operation, tensor)
            self._inside += 1
        self._attendance.begin()
        thread = threading.get_ident()
        _WAITING.add(thread)
        try:
            yield
        except RuntimeError as error:
            reason = str(error) if isinstance(error, _LostError) else self._attendance.blame(str(error))
            self._attendance.give_up(reason)
            self._aborted = self._aborted or reason
            raise self._failure(reason, operation, tensor) from error
        except BaseException as error:
            self._aborted = self._aborted or f"{operation} was left by {type(error).__name__}"
            self._attendance.give_up(self._aborted)
            raise
        finally:
            _WAITING.discard(thread)
            with self._lock:
                self._inside -= 1
            if self._aborted is not None:
                self._let_go(self._aborted)

    def _failure(self, reason: str, operation: str, tensor: Tensor | str) -> CommunicationError:
        text = tensor if isinstance(tensor, str) else describe(tensor)
        return CommunicationError(reason, rank=self._meeting.rank, operation=operation, tensor=text)


class _LostError(RuntimeError):
    """A wait was given up; what is pending stays with gloo."""


def _broadcast(backend: Any, tensor: Tensor, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    # As bytes, which every dtype is made of.
    return backend.broadcast([bytes_of(tensor)], options)


def _keep_for_good(group: Any) -> None:
    """Note [waits in gloo]. Not even the end of the interpreter may free it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_ENDING = threading.Event()
_WAITING: set[int] = set()  # threads inside gloo


@atexit.register
def _end_waits() -> None:
    """A thread that came out of gloo while the interpreter goes would end the process with SIGABRT."""
    _ENDING.set()
    end = time.monotonic() + 2
    while _WAITING - {threading.get_ident()} and time.monotonic() < end:
        time.sleep(0.01)


def new_gloo(store: Store, rank: int, size: int, timeout: float, interface: str | None) -> Any:
    seconds = timedelta(seconds=timeout)
    if interface is None:
        return dist.ProcessGroupGloo(store, rank, size, seconds)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = seconds, 2
    options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def interface_problem(names: Sequence[str]) -> str:
    """What is wrong with the first of these network interfaces that gloo cannot use on this host, or nothing."""
    for name in names:
        try:
            dist.ProcessGroupGloo.create_device(interface=name)
        except RuntimeError as error:
            return f"interface: expected a network interface of this host, got {name!r} ({error})"
    return ""


def own_connection(store: Store) -> Store:
    """The same store over a connection of its own, where it has any: whoever waits at one blocks all who share it."""
    return cast("Store", cast("Any", store).clone())  # torch's stub does not know it


def new_nccl(store: Store, rank: int, size: int, timeout: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
