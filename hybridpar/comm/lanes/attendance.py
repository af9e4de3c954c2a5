"""Attendance: how many calls of a lane each rank has begun, and so whom to name when a call fails."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hybridpar.comm.lanes.watch import Found, Status


class Observer(Protocol):
    """What is used of ``Watch``. Ranks are numbers in the job."""

    def set_status(self, key: str, status: Status | None) -> None: ...
    def survey(self, ranks: Sequence[int]) -> Mapping[int, Found]: ...


class Attendance:
    """Of one lane.

    Args:
        watch: None where nobody can be asked.
        key: a name of the lane that all its ranks, and no other lane, have.
        ranks: numbers of the members in the job.
    """

    def __init__(self, watch: Observer | None, key: str, ranks: Sequence[int]) -> None:
        self._watch, self._key, self._ranks = watch, key, tuple(ranks)
        self._state = state = {"calls": 0, "gave_up": ""}
        if watch is not None:
            watch.set_status(key, lambda: state)  # not self, which would keep it alive
            self._finalizer = weakref.finalize(self, watch.set_status, key, None)
            self._finalizer.atexit = False

    def begin(self) -> None:
        """This rank has begun a call."""
        self._state["calls"] += 1  # type: ignore[operator]

    def give_up(self, why: str) -> None:
        """This rank will not make another call. Whoever asks from now on is told why."""
        self._state["gave_up"] = self._state["gave_up"] or why or "it cannot go on"
        if self._watch is not None:
            self._finalizer.detach()

    def lost(self) -> str:
        """Which members have ended or given up, as text; empty if none has, or none is known to have.

        A process that merely stands still is not counted: it may be busy.
        """
        return "" if self._watch is None else self._lost(self._watch.survey(self._ranks))

    def blame(self, said: str) -> str:
        """``said``, which is what the library says, with the ranks that are to blame."""
        if self._watch is None:
            return said
        found = self._watch.survey(self._ranks)
        reason = self._lost(found) or _joined(each.problem for each in found.values()) or self._behind(found)
        return f"{reason} ({said})" if reason else said

    def close(self) -> None:
        """The lane is no longer in use."""
        if self._watch is not None:
            self._finalizer()

    def _lost(self, found: Mapping[int, Found]) -> str:
        if ended := _joined(each.problem for each in found.values() if each.ended):
            return ended
        states = {rank: self._state_of(each) for rank, each in found.items()}
        return _joined(
            f"rank {rank} gave up: {state['gave_up']}" for rank, state in states.items() if state and state["gave_up"]
        )

    def _behind(self, found: Mapping[int, Found]) -> str:
        """Who has begun fewer calls than this rank, or has not come to the lane yet."""
        late = [
            rank
            for rank, each in found.items()
            if each.answer is not None and (self._state_of(each) or {"calls": 0})["calls"] < self._state["calls"]
        ]
        return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not come to this call" if late else ""

    def _state_of(self, found: Found) -> dict[str, Any] | None:
        return None if found.answer is None else found.answer.get(self._key)


def _joined(texts: Any) -> str:
    return "; ".join(text for text in texts if text)
