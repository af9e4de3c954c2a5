"""Attendance: how many calls of a lane each rank has begun, and so whom to name when a call fails."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from hybridpar.comm.watch import Status


class Observer(Protocol):
    """What is used of ``Watch``. Ranks are numbers in the job."""

    def set_status(self, key: str, status: Status | None) -> None: ...
    def ask(self, ranks: Sequence[int]) -> dict[int, Any]: ...
    def gone(self, ranks: Sequence[int]) -> dict[int, str]: ...
    def ended(self, ranks: Sequence[int]) -> dict[int, str]: ...


class Attendance:
    """Of one lane.

    Args:
        watch: None where nobody can be asked.
        key: a name of the lane that all its ranks, and no other lane, have.
        ranks: numbers of the members in the job.
    """

    def __init__(self, watch: Observer | None, key: str, ranks: Sequence[int]) -> None:
        self._watch, self._key, self._ranks = watch, key, tuple(ranks)
        self._calls = calls = [0]
        if watch is not None:
            watch.set_status(key, lambda: calls[0])  # not self, which would keep it alive
            self._finalizer = weakref.finalize(self, watch.set_status, key, None)
            self._finalizer.atexit = False

    def begin(self) -> None:
        """This rank has begun a call."""
        self._calls[0] += 1

    def ended(self) -> str:
        """Which members' processes have ended, as text; empty if none has, or none is known to have.

        A process that merely stands still is not counted: it may be busy.
        """
        return "" if self._watch is None else "; ".join(self._watch.ended(self._ranks).values())

    def blame(self, said: str) -> str:
        """``said``, which is what the library says, with the ranks that are to blame."""
        if self._watch is None:
            return said
        if gone := self._watch.gone(self._ranks):
            return f"{'; '.join(gone.values())} ({said})"
        behind = [rank for rank, answer in self._watch.ask(self._ranks).items() if answer and self._is_behind(answer)]
        if not behind:
            return said
        return f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))} did not come to this call ({said})"

    def close(self) -> None:
        """The lane is no longer in use."""
        if self._watch is not None:
            self._finalizer()

    def _is_behind(self, answer: dict[str, Any]) -> bool:
        return self._key in answer and int(answer[self._key]) < self._calls[0]
