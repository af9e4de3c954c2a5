"""A clock that can be stopped."""

from __future__ import annotations

import time


class Clock:
    """Seconds, but for those in which it was stopped."""

    def __init__(self) -> None:
        self._stopped_since: float | None = None
        self._stopped_seconds = 0.0

    def stop(self) -> None:
        self._stopped_since = time.monotonic()

    def go(self) -> None:
        """Has no effect on a clock that goes."""
        if self._stopped_since is not None:
            self._stopped_seconds += time.monotonic() - self._stopped_since
        self._stopped_since = None

    def now(self) -> float:
        now = time.monotonic() if self._stopped_since is None else self._stopped_since
        return now - self._stopped_seconds
