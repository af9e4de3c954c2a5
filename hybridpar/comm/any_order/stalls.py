"""Stalls: says which ranks wait for which tensor, and for whom; gives up when it takes too long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybridpar.comm.any_order.outstanding import Outstanding
from hybridpar.comm.any_order.readiness import name_ranks
from hybridpar.comm.any_order.submission import Submission

_LOG = logging.getLogger(__name__)
_NAMED = 10


class Asks(Protocol):
    """What is needed of ``lanes.watch.Watch``: another way to the other ranks than the lane that blocks."""

    def set_status(self, key: str, status: Callable[[], Any] | None) -> None: ...

    def ask(self, ranks: Sequence[int]) -> Mapping[int, Any]: ...


class Inquiry:
    """What the other ranks say of one engine.

    Args:
        watch: None where the ranks have no other way to each other.
        key: of the engine, the same on all ranks.
        ranks: numbers of all members in the job.
        rank: number of this one.
    """

    def __init__(self, watch: Asks | None, key: str, ranks: Sequence[int], rank: int) -> None:
        self._watch, self._key = watch, key
        self.rank, self.others = rank, [other for other in ranks if other != rank]

    def publish(self, status: Callable[[], Any] | None) -> None:
        """Let others know ``status``; None when the engine has ended."""
        if self._watch is not None:
            self._watch.set_status(self._key, status)

    def ask(self) -> dict[int, Any]:
        """The status of each other rank: None where it does not answer, {} where it has no such engine any more."""
        if self._watch is None:
            return dict.fromkeys(self.others)
        try:
            answers = self._watch.ask(self.others)
        except RuntimeError:  # the interpreter is going down, and has no threads for asking any more
            return dict.fromkeys(self.others)
        return {
            rank: None if (answer := answers.get(rank)) is None else answer.get(self._key, {}) for rank in self.others
        }

    def reasons(self) -> str:
        """What others say of why they ended, to be put behind what a lane says."""
        answers = self.ask() if self._watch is not None else {}
        closed = closers(answers)
        said = [
            f"rank {rank}: {answer['failed']}" for rank, answer in answers.items() if answer and answer.get("gave_up")
        ]
        return "".join(f"; {text}" for text in ([closed] if closed else []) + said)


def closers(answers: Mapping[int, Any]) -> str:
    """Who closed the engine, as text; empty if nobody did."""
    closed = [rank for rank, answer in answers.items() if answer == {}]
    return f"{name_ranks(closed)} closed the engine" if closed else ""


class StallWatch:
    """Warns of what waits for longer than ``stall_seconds``, again after twice as long, and so on.

    The lowest rank that waits warns; the others say the same at level INFO.

    Args:
        give_up: called with the reason when a tensor has waited for ``timeout`` seconds, or for a rank that has closed.
    """

    def __init__(
        self,
        outstanding: Outstanding,
        inquiry: Inquiry,
        stall_seconds: float,
        timeout: float,
        give_up: Callable[[str], None],
    ) -> None:
        self._outstanding, self._inquiry, self._give_up = outstanding, inquiry, give_up
        self._stall_seconds, self._timeout = stall_seconds, timeout
        # Which submission, by tensor and time, and not the submission itself: that would stay alive.
        self._warned: tuple[tuple[int, float] | None, float] = (None, 0.0)

    def run(self) -> None:
        """Until the engine ends."""
        while (stalled := self._outstanding.await_stall(self._limit)) is not None:
            self._look_at(stalled)
            del stalled  # it must not live on through the next wait

    def _limit(self, oldest: Submission) -> float:
        warned, seconds = self._warned
        limit = 2 * seconds if (oldest.index, oldest.since) == warned else self._stall_seconds
        return limit if oldest.patient else min(limit, self._timeout)

    def _look_at(self, stalled: Sequence[tuple[Submission, float]]) -> None:
        answers = self._inquiry.ask()
        oldest, seconds = stalled[0]
        self._warned = (oldest.index, oldest.since), seconds
        # Asking took its time.
        waiting = [
            (one, Stall(self._outstanding.names[one.index], one.index, waited, answers, self._inquiry.rank))
            for one, waited in stalled
            if waited >= min(self._stall_seconds, self._timeout) / 2 and self._outstanding.waits(one)
        ]
        if not waiting:
            return
        stalls = [stall for one, stall in waiting if not one.patient]
        if failed := {rank: answer["failed"] for rank, answer in answers.items() if answer and "failed" in answer}:
            self._give_up("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        elif closed := closers(answers):
            self._give_up(f"{closed}; {waiting[0][1]}")
        elif stalls and stalls[0].seconds >= self._timeout:
            self._give_up(f"time-out of {self._timeout:g} s; {stalls[0]}")
        elif stalls := [stall for stall in stalls if stall.missing or stall.silent]:
            level = logging.WARNING if stalls[0].first == self._inquiry.rank else logging.INFO
            for stall in stalls[:_NAMED]:
                _LOG.log(level, "%s", stall)
            if len(stalls) > _NAMED:
                _LOG.log(level, "%d more tensors wait", len(stalls) - _NAMED)


class Stall:
    """One tensor that waits: ranks that submitted it, ranks that did not (``missing``), ranks that say nothing."""

    def __init__(self, name: str, index: int, seconds: float, answers: Mapping[int, Any], rank: int) -> None:
        self._name, self.seconds = name, seconds
        self.silent = sorted(other for other, answer in answers.items() if answer is None)
        # What this rank still waits for has arrived nowhere: a rank that does not wait for it has not submitted it.
        waiting = {other: index in answer.get("waiting", ()) for other, answer in answers.items() if answer is not None}
        self.missing = sorted(other for other, waits in waiting.items() if not waits)
        self.having = sorted([rank, *(other for other, waits in waiting.items() if waits)])
        self.first = self.having[0]

    def __str__(self) -> str:
        waited = f"{self.seconds:.0f}" if self.seconds >= 2 else f"{self.seconds:.1f}"
        text = f"{self._name}: submitted by {name_ranks(self.having)}; waited for {waited} s"
        if self.missing:
            text += f"; not by {name_ranks(self.missing)}"
        if self.silent:
            text += f"; no answer from {name_ranks(self.silent)}"
        return text
