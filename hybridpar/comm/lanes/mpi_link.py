"""A communicator of MPI (mpi4py) whose waits are bounded, and what it does when one of them fails.

# Note [bounded waits in MPI]
A blocking call of MPI cannot time out, so everything is started without blocking and then tested until it is done,
which is also what makes it progress. The test loop spins, then offers its core to others, then sleeps a little between
tests. It ends at the time-out, when the process of another rank has ended, or when another rank says that it has given
up. The two calls that block, making a communicator and freeing one, come only after all members have met.

# Note [given-up memory]
What was started cannot be taken back: after a failed wait MPI may still write to its tensors. They are kept for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.attendance import Attendance, Observer
from hybridpar.comm.lanes.lane import describe
from hybridpar.comm.lanes.mpi_library import load

# Tests before the first look at the clock; then the seconds after which a wait yields no more but sleeps, briefly at
# first, so that a network is not kept waiting for a rank that must pass its data on.
_SPINS = 100
_YIELDS_FOR, _DOZES_FOR = 0.001, 1.0
_DOZE, _SLEEP = 50e-6, 1e-3
# When a wait looks for messages of ranks that have given up, and for ranks that have ended.
_FIRST_PROBE, _FIRST_LOOK = 0.01, 1.0
# Tags of messages from rank to rank; meetings have those from _MEET on.
DATA, _GIVEN_UP, _CLOSE, _MEET = 0, 1, 2, 3
_TAGS = 32768  # all that MPI promises
# What a rank that gives up says, in bytes, and how long it makes sure in seconds that it has gone out.
_MOST_TEXT, _TELLS_FOR = 1024, 0.2
# Pieces of work that are on their way at once, as measured.
_DEPTH = 2

_LOG = logging.getLogger(__name__)
Requests = list[Any]
Work = Generator[Requests, None, None]
"""Starts something, yields what must be finished before it goes on, and so on."""
_roots: Counter[tuple[int, ...]] = Counter()


class _GaveUpError(Exception):
    """Why a wait ended; ``final`` where there is no more to be found out."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.reason, self.final = reason, final


class Link:
    """One communicator, of one rank.

    Attributes:
        comm: of mpi4py.
        mpi: the module ``mpi4py.MPI``.
        lock: held during every call of MPI.
        ranks: number of each member in the job.
        others: the other members, the next one first.

    Args:
        comm: used by nobody else.
        timeout: seconds that a wait may last.
        ranks: number of each member in the job.
        watch: knows which ranks are gone.
        key: a name of the link that all its ranks, and no other link, have. None: ``comm`` was made elsewhere, and is
            not freed.
    """

    def __init__(
        self, comm: Any, timeout: float, ranks: Sequence[int], watch: Observer | None, key: str | None = None
    ) -> None:
        self._library = load()
        self.mpi, self.lock = self._library.MPI, self._library.lock
        self.comm, self.ranks = comm, tuple(ranks)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        if len(self.ranks) != self.size:
            raise ValueError(f"ranks: expected {self.size} numbers, one for each member of comm, got {self.ranks}")
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._timeout, self._watch, self._made = timeout, watch, key is not None
        if key is None:
            _roots[self.ranks] += 1
            key = f"mpi {self.ranks} {_roots[self.ranks]}"
        self._key, self._attendance = key, Attendance(watch, key, self.ranks)
        self._splits: Counter[tuple[int, ...]] = Counter()
        self._children: weakref.WeakSet[Link] = weakref.WeakSet()
        self._unusable: str | None = None
        self._process = os.getpid()
        self._library.open.add(self)

    @contextmanager
    def call(self, operation: str, tensor: Tensor | Sequence[Tensor] | None = None) -> Iterator[None]:
        """Around a collective. Errors name it, and end the use of the link: the ranks are out of step."""
        self._check(operation, tensor)
        self._attendance.begin()
        thread = threading.get_ident()
        self._library.inside.add(thread)
        try:
            yield
        except (_GaveUpError, self.mpi.Exception) as error:
            if isinstance(error, _GaveUpError) and error.final:
                reason = told = str(error)
            else:
                reason = self._attendance.blame(str(error))
                told = f"rank {self.ranks[self.rank]} gave up: {reason}"
            self._give_up(reason, told)
            # Its frames hold the tensors. See Note [given-up memory].
            self._library.keep(error)
            raise self._failure(reason, operation, tensor) from error
        except BaseException as error:
            self._library.keep(error)
            reason = f"{operation} was left by {type(error).__name__}"
            self._give_up(reason, f"rank {self.ranks[self.rank]}: {reason}")
            raise
        finally:
            self._library.inside.discard(thread)

    def drive(self, works: Iterable[Work]) -> None:
        """Do pieces of work, a few at once. The order in which they start things is the same on all ranks."""
        begun: deque[tuple[Work, Requests]] = deque()
        try:
            for work in works:
                begun.append((work, next(work)))
                if len(begun) == _DEPTH:
                    self._finish(*begun[0])
                    begun.popleft()
            while begun:
                self._finish(*begun[0])
                begun.popleft()
        except BaseException:
            self._library.keep(begun)
            raise

    def wait(self, requests: Requests) -> None:
        """Until all are done. See Note [bounded waits in MPI]."""
        for _ in range(_SPINS):
            if self._done(requests):
                return
        started = time.monotonic()
        probe, look = started + _FIRST_PROBE, started + _FIRST_LOOK
        while not self._done(requests):
            now = time.monotonic()
            self._check_wait(now - started)
            if now >= probe:
                if (heard := self._heard()) is not None:
                    raise _GaveUpError(heard, final=True)
                probe = now + _FIRST_PROBE
            if now >= look:
                if ended := self._attendance.lost():
                    # One of them may have ended only because it had given up, and have said why.
                    raise _GaveUpError(self._heard(_SPINS) or ended, final=True)
                now = time.monotonic()
                look = now + (now - started)  # more and more seldom
            if now - started < _YIELDS_FOR:
                os.sched_yield()
            else:
                time.sleep(_DOZE if now - started < _DOZES_FOR else _SLEEP)

    def split(self, members: Sequence[int]) -> Link:
        """Collective over the members, of which this rank is one: a link of them, in this order."""
        chosen = tuple(members)
        self._splits[chosen] += 1
        key = f"{self._key} {chosen} {self._splits[chosen]}"
        # A rank may be asked to two links that are being made at the same time; this keeps their messages apart.
        tag = _MEET + zlib.crc32(key.encode()) % (_TAGS - _MEET)
        with self.call("split"):
            self._meet(chosen, tag)
            with self.lock:
                everyone = self.comm.Get_group()
                part = everyone.Incl(chosen)
                comm = self.comm.Create_group(part, tag)
                part.Free()
                everyone.Free()
        link = Link(comm, self._timeout, [self.ranks[member] for member in chosen], self._watch, key)
        self._children.add(link)
        if self._unusable is not None:  # another thread has aborted meanwhile
            link.abort(self._unusable)
        return link

    def close(self) -> None:
        """Collective for links that ``split`` made: the members meet and free it. One that has failed is left alone."""
        if self._unusable is None and self._made:
            with self.call("close"):
                self._meet(range(self.size), _CLOSE)
                with self.lock:
                    self.comm.Free()
        self._unusable = self._unusable or "it is closed"
        self._attendance.close()
        self._library.open.discard(self)

    def abort(self, why: str = "") -> None:
        """Make present and later calls fail, here and on what was split off, and tell those who wait.

        Args:
            why: for the others.
        """
        said = f"gave up: {why}" if why else "gave up"
        self._give_up(f"this rank {said}", f"rank {self.ranks[self.rank]} {said}")
        for child in list(self._children):
            child.abort(why)

    def listen(self) -> None:
        """Be of no more use if another rank has given up. Not while a call is running."""
        if self._unusable is None and (heard := self._heard(_SPINS)) is not None:
            self._give_up(heard, heard)

    def _check(self, operation: str, tensor: Tensor | Sequence[Tensor] | None) -> None:
        self._library.check_thread()
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{operation} in a forked child: expected the process that made the lane; start workers with "
                "multiprocessing's spawn, or fork before hp.init()"
            )
        if self._unusable is not None:
            raise self._failure(f"the lane is of no more use: {self._unusable}", operation, tensor)

    def _failure(self, reason: str, operation: str, tensor: Tensor | Sequence[Tensor] | None) -> CommunicationError:
        text = "nothing" if tensor is None else describe(tensor)
        return CommunicationError(reason, rank=self.ranks[self.rank], operation=operation, tensor=text)

    def _finish(self, work: Work, requests: Requests) -> None:
        self.wait(requests)
        for following in work:
            self.wait(following)

    def _done(self, requests: Requests) -> bool:
        with self.lock:
            return bool(self.mpi.Request.Testall(requests))

    def _check_wait(self, waited: float) -> None:
        if self._unusable is not None:
            raise _GaveUpError(self._unusable, final=True)
        if self._library.ending:
            raise _GaveUpError("the process is ending", final=True)
        if waited > self._timeout:
            raise _GaveUpError(f"not done after {self._timeout:g} s", final=False)

    def _meet(self, members: Sequence[int], tag: int) -> None:
        """Return when all members have called, and know it. Unlike a barrier, it is not mixed up with a collective.

        Twice, because one that has waited in vain has been seen by those who come late.
        """
        for _ in range(2):
            requests = []
            with self.lock:
                for member in members:
                    if member != self.rank:
                        requests.append(self.comm.Irecv([bytearray(), self.mpi.BYTE], member, tag))
                        requests.append(self.comm.Isend([b"", self.mpi.BYTE], member, tag))
            self.wait(requests)

    def _give_up(self, reason: str, told: str) -> None:
        """The link is of no more use, because of ``reason``; those who wait hear what is to be ``told``."""
        if self._unusable is not None:
            return
        self._unusable = reason
        self._attendance.give_up(reason)
        self._library.lose(told)
        try:
            self._tell(told.encode()[:_MOST_TEXT])
        except (self.mpi.Exception, RuntimeError) as error:
            _LOG.info("the other ranks could not be told that %s: %s", told, error)

    def _tell(self, text: bytes) -> None:
        self._library.check_thread()
        with self.lock:
            requests = [self.comm.Isend([text, self.mpi.BYTE], other, _GIVEN_UP) for other in self.others]
        self._library.keep(requests)
        deadline = time.monotonic() + _TELLS_FOR
        while not self._done(requests) and time.monotonic() < deadline:
            time.sleep(_DOZE)

    def _heard(self, looks: int = 1) -> str | None:
        """What a rank that has given up says. A message that has come may take MPI more than one look to find."""
        status = self.mpi.Status()
        for _ in range(looks):
            with self.lock:
                message = self.comm.Improbe(self.mpi.ANY_SOURCE, _GIVEN_UP, status)
                if message is not None:
                    text = bytearray(status.Get_count(self.mpi.BYTE))
                    message.Recv([text, self.mpi.BYTE])
                    return text.decode(errors="replace")
        return None
