"""What a rank has submitted and not yet got back: shared by the threads that submit, send and watch.

# Note [when to negotiate]
A rank that has nothing to send sleeps, but for one empty negotiation now and then (a pulse), which lets a rank that
waits in a negotiation come out, so that the lane's own time-out tells only of ranks that no longer live. A rank that
has something negotiates at once, and waits there for the others. Ranks that all have something, but nothing in common,
would go round without end: after a negotiation that found nothing a rank waits until more was submitted, or for a
tenth of the time that it has waited already, so that no rank is late by more than that share.
A set that is expected is worth a short wait until it is complete: then it costs one negotiation, not several.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.any_order.clock import Clock
from hybridpar.comm.any_order.queues import Queues
from hybridpar.comm.any_order.readiness import Terms
from hybridpar.comm.any_order.submission import Submission, Told, tell
from hybridpar.comm.errors import CommunicationError

_LINGER_SECONDS = 0.002
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.05
_BETWEEN_LOOKS = 0.05


class Outstanding:
    """A queue of submissions for each tensor.

    Its clock stands still while sums travel: a tensor is not waiting for a rank that is busy with another one.

    Attributes:
        names: of the tensors.
        registered: how many tensors there were after each registration.
        failure: why nothing more can be sent.
        gave_up: whether this rank is the one that gave up, and did not only hear of it.
        aside: where this rank stands aside, see Note [standing aside]: resolves to the rank that did so last.

    Args:
        rank: number of this rank in the job.
        pulse_seconds: how long a rank with nothing to send stays away from negotiations.
    """

    def __init__(self, rank: int, pulse_seconds: float) -> None:
        self.rank = rank
        self.names: list[str] = []
        self.registered: list[int] = []
        self.failure: str | None = None
        self.gave_up = False
        self.aside: Future[int] | None = None
        self._lost: CommunicationError | None = None
        self._pulse_seconds = pulse_seconds
        self._lock = threading.Lock()
        self._work, self._watching = threading.Condition(self._lock), threading.Condition(self._lock)
        self._landing = threading.Condition(self._lock)
        self._waiters = 0  # threads that wait for it
        self._queues = Queues()
        self._heads = self._queues.heads
        self._flying: set[Submission] = set()
        self._settling: set[Submission] = set()  # of which somebody is about to be told
        self._grown = 0
        self._open, self._closed = True, False
        # Of the communication thread: whether it sleeps, or waits for the rest of a set; what has come meanwhile.
        self._sleeps, self._missing, self._news, self._lingered = False, set[int](), False, False
        self._fruitless_since: float | None = None
        self._unwatched = False
        self._clock = Clock()

    # The threads that submit.

    def register(self, names: Sequence[str]) -> range:
        """More tensors; returns their indices."""
        with self._lock:
            first = len(self.names)
            self.names += names
            self.registered.append(len(self.names))
            self._wake()
            return range(first, len(self.names))

    def put_many(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        terms: Sequence[Terms],
        scale: float,
        *,
        patient: bool = False,
        told: Told | None = None,
        notes: Sequence[Any] = (),
    ) -> list[Submission]:
        """All at once. Raises CommunicationError after a failure, RuntimeError after the end."""
        submissions = [
            Submission(index, tensor, own, scale, 0.0, None, told, self.wait_for, note, patient)
            for index, tensor, own, note in zip(indices, tensors, terms, notes or [None] * len(indices), strict=True)
        ]
        if tensors[0].is_cuda:
            for submission in submissions:
                submission.ready = torch.cuda.current_stream(submission.tensor.device).record_event()
        with self._lock:
            if self.failure is not None:
                raise self._error(indices[0], self.failure)
            if not self._open:
                raise RuntimeError(
                    f"submit of {self.names[indices[0]]}: expected an open engine, got one that was closed"
                )
            now = self._clock.now()
            for submission in submissions:
                submission.since = now
                self._put(submission)
        return submissions

    def step_aside(self) -> Future[int]:
        """Raises as ``put``; ValueError if this rank stands aside already."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self.failure is not None:
                raise self._left(self.failure)
            if not self._open:
                raise RuntimeError("step_aside: expected an open engine, got one that was closed")
            if self.aside is not None:
                raise ValueError("step_aside: expected a rank that takes part, got one that stands aside already")
            self.aside = future
            self._work.notify()
        return future

    def submissions(self) -> list[Submission]:
        """All that are outstanding, or of which somebody is still being told."""
        with self._lock:
            return [*self._queues.all(), *self._flying, *self._settling]

    def wait_for(self, submissions: Iterable[Submission]) -> None:
        """Return when all of them are done."""
        with self._lock:
            self._waiters += 1
            try:
                for submission in submissions:
                    while not submission.is_done:
                        self._landing.wait()
            finally:
                self._waiters -= 1

    def first_lost(self) -> CommunicationError | None:
        """What failed first, of all that did since this was last asked."""
        lost, self._lost = self._lost, None
        return lost

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive: after a failure, or when the engine is closed."""
        return self._closed or self.failure is not None

    def drain(self) -> None:
        """Accept nothing more; end once all has arrived, a pulse later at most.

        Takes no lock, for the garbage collector calls this: on any thread, also on one that holds the lock already.
        """
        self._open = False

    def close(self) -> bool:
        """End now; what is outstanding fails. Returns whether something was on its way."""
        with self._lock:
            self._open, self._closed = False, True
            sends = bool(self._flying)
            lost = self._clear()
            aside, self.aside = self.aside, None
            self._work.notify()
            self._watching.notify()
        if aside is not None:
            aside.set_exception(self._left("the engine was closed while this rank stood aside"))
        self._lose(lost, "the engine was closed before the sum had arrived; call wait_all() before close()")
        return sends

    def fail(self, reason: str, *, gave_up: bool) -> bool:
        """Everything outstanding fails, and every later submission. False if there was a failure already."""
        with self._lock:
            if self.ended:
                return False
            self.failure, self.gave_up = reason, gave_up
            lost = self._clear()
            aside, self.aside = self.aside, None
            self._work.notify()
            self._watching.notify()
        if aside is not None:
            aside.set_exception(self._left(reason))
        self._lose(lost, reason)
        return True

    # The communication thread.

    def await_turn(self, expected: frozenset[int]) -> dict[int, Terms] | None:
        """Note [when to negotiate]. Returns what could be sent now, or None at the end."""
        with self._lock:
            if not self._news and self.aside is None:
                self._sleeps = True
                self._work.wait_for(lambda: self._news or self.aside is not None or self._at_end(), self._pause())
                self._sleeps = False
            missing = expected - self._heads.keys()
            if missing and self._heads and not self._lingered and self.aside is None:
                self._lingered, self._missing = True, set(missing)
                self._work.wait_for(lambda: not self._missing or self._at_end(), _LINGER_SECONDS)
                self._missing.clear()
            if self._at_end():
                return None
            self._news = False
            return {index: head.terms for index, head in self._heads.items()}

    def found_nothing(self, *, grown: bool) -> None:
        """The negotiation agreed on no tensor, perhaps on a registration."""
        with self._lock:
            self._grown += grown
            self._news |= grown
            if not self._is_idle() and self._fruitless_since is None:
                self._fruitless_since = time.monotonic()

    def take(
        self, indices: Sequence[int], *, grown: bool, stand_in: Callable[[int], Submission] | None = None
    ) -> list[Submission]:
        """The oldest submission of each of these tensors, in that order: on their way from now on. None at the end.

        Args:
            stand_in: makes one for a tensor that this rank has not submitted; None where it has submitted them all.
        """
        with self._lock:
            if self.ended:
                return []
            self._grown += grown
            taken = [
                stand_in(index) if stand_in and index not in self._heads else self._queues.pop(index)
                for index in indices
            ]
            self._flying.update(taken)
            self._news, self._lingered, self._fruitless_since = bool(self._heads), False, None
            self._clock.stop()
            return taken

    def arrived(self, submissions: Collection[Submission]) -> None:
        """Their sums are in place."""
        found = self._land(submissions)
        tell(found)
        self._settled(found)

    def refuse(self, submissions: Collection[Submission], reason: str) -> None:
        """The ranks agreed not to send them."""
        self._lose(self._land(submissions), reason)

    def travelled(self) -> None:
        """All that was taken has arrived, or was refused."""
        with self._lock:
            self._clock.go()

    def come_back(self, last: int) -> None:
        """The ranks all stood aside, and take part again."""
        with self._lock:
            aside, self.aside = self.aside, None
        if aside is not None:
            aside.set_result(last)

    def end(self) -> None:
        """Nobody communicates any more, and nothing is outstanding."""
        with self._lock:
            self._open, self._closed = False, True
            self._watching.notify()

    # The thread that watches.

    def await_stall(self, limit: Callable[[Submission], float]) -> list[tuple[Submission, float]] | None:
        """Blocks until the submission that has waited longest has done so for ``limit`` of it, in seconds.

        One that may wait for ever counts only where there is no other.

        Returns:
            Each tensor's oldest submission and its seconds, longest first; None at the end.
        """
        with self._lock:
            while not self._at_end():
                if not self._heads:
                    self._unwatched = True
                    self._watching.wait(self._pulse_seconds)  # what drains it wakes nobody
                    continue
                heads = list(self._heads.values())
                heads.sort(key=lambda head: (head.patient, head.since))
                oldest, now = heads[0], self._clock.now()
                rest = limit(oldest) - (now - oldest.since)
                if rest <= 0:
                    return [(head, now - head.since) for head in heads]
                del heads, oldest  # this thread must not keep what arrives meanwhile alive, nor whom its callbacks know
                self._watching.wait(max(rest, _BETWEEN_LOOKS))
            return None

    def waits(self, submission: Submission) -> bool:
        """Whether it is still to be agreed on."""
        with self._lock:
            return self._heads.get(submission.index) is submission

    def status(self) -> dict[str, Any]:
        """What other ranks may know: the tensors that were submitted here and wait for others; nothing at the end."""
        with self._lock:
            if self.failure is not None:
                return {"failed": self.failure, "gave_up": self.gave_up}
            return {} if self._closed else {"waiting": list(self._heads)}

    # With the lock held.

    def _put(self, submission: Submission) -> None:
        if not self._heads:
            self._fruitless_since = None
        if not self._queues.put(submission):
            return
        self._wake(submission.index)
        if self._unwatched:
            self._unwatched = False
            self._watching.notify()

    def _wake(self, index: int = -1) -> None:
        self._news = True
        if self._missing:
            self._missing.discard(index)
            if not self._missing:
                self._work.notify()
        elif self._sleeps:
            self._work.notify()

    def _pause(self) -> float:
        if self._is_idle():
            return self._pulse_seconds
        if self._fruitless_since is None:
            return 0
        return min(max((time.monotonic() - self._fruitless_since) / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE)

    def _is_idle(self) -> bool:
        return not self._heads and self._grown == len(self.registered)

    def _at_end(self) -> bool:
        return self.ended or (not self._open and not self._heads)

    def _clear(self) -> list[Submission]:
        lost = self._queues.clear() + list(self._flying)
        self._flying.clear()
        self._settling.update(lost)
        return lost

    def _left(self, reason: str) -> CommunicationError:
        return CommunicationError(reason, rank=self.rank, operation="step_aside", tensor="nothing")

    def _error(self, index: int, reason: str) -> CommunicationError:
        return CommunicationError(reason, rank=self.rank, operation="all_reduce", tensor=self.names[index])

    # Without the lock: whoever is told may do as it likes.

    def _land(self, submissions: Collection[Submission]) -> list[Submission]:
        """Those that were not lost meanwhile."""
        with self._lock:
            found = [submission for submission in submissions if submission in self._flying]
            self._flying.difference_update(found)
            self._settling.update(found)
            return found

    def _lose(self, submissions: Collection[Submission], reason: str) -> None:
        for submission in submissions:
            error = self._error(submission.index, reason)
            self._lost = self._lost or error
            submission.error = error
            tell([submission])
        self._settled(submissions)

    def _settled(self, submissions: Collection[Submission]) -> None:
        with self._lock:
            self._settling.difference_update(submissions)
            for submission in submissions:
                submission.is_done = True
            if self._waiters:
                self._landing.notify_all()
