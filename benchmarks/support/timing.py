"""Times of single calls."""

from __future__ import annotations

import time
from collections.abc import Callable

MIB = 1 << 20


def repeats_of(size: int) -> int:
    """Calls on a tensor of ``size`` bytes that give a median, in seconds rather than minutes."""
    return max(5, min(1000, (256 * MIB) // size))


def timed(work: Callable[[], object], ready: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call of ``work`` on this rank, each after ``ready``, and after one that is not counted."""
    taken = []
    for repeat in range(repeats + 1):
        ready()
        start = time.perf_counter()
        work()
        if repeat:
            taken.append(time.perf_counter() - start)
    return taken
