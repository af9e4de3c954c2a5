"""Clocks of several hosts, compared over the collectives of a group.

# Note [clock bounds]
No rank leaves a barrier before every rank has entered it. So if rank i of one host enters at e_i and rank j of another
leaves at x_j, each by its own clock, the offset o that turns j's clock into i's obeys e_i <= x_j + o; and the other way
round, e_j + o <= x_i. Every barrier and every pair of ranks bounds o from both sides; the tightest bounds of several
barriers hold together, and half their distance is the error. The bound is tight where the other side entered last, so
the hosts take turns in being late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from hybridpar.comm.group import Group
from hybridpar.topology import host_identity

Stamps = Sequence[tuple[int, int]]

_ROUNDS = 12
_LATE_SECONDS = 0.002


def clock_identity() -> str:
    """Text that is equal for two processes exactly if ``time.monotonic_ns`` is one clock for both."""
    namespace = Path("/proc/self/ns/time")
    return f"{host_identity()} {namespace.stat().st_ino if namespace.exists() else 'none'}"


def clock_offset(group: Group, now: Callable[[], int], clock: str) -> tuple[int, int]:
    """Collective: nanoseconds to add to this rank's clock to get that of rank 0, and how far that may be off.

    Note [clock bounds]. Both are 0 where rank 0 has the same clock. The error is a bound at the time of the call;
    before it, clocks that run at different speeds (usually by less than 1 in 10,000) were further apart.

    Args:
        now: reads the clock, in nanoseconds.
        clock: text that is equal for ranks that share a clock.
    """
    clocks: list[str] = group.all_gather_json(clock)
    order = list(dict.fromkeys(clocks))
    if len(order) == 1:
        return 0, 0
    group.barrier()
    stamps = []
    for round_number in range(_ROUNDS):
        if order[round_number % len(order)] == clock:
            time.sleep(_LATE_SECONDS)
        entered = now()
        group.barrier()
        stamps.append((entered, now()))
    everyone: list[list[tuple[int, int]]] = group.all_gather_json(stamps)
    if clock == clocks[0]:
        return 0, 0
    theirs = [stamps for stamps, name in zip(everyone, clocks, strict=True) if name == clocks[0]]
    ours = [stamps for stamps, name in zip(everyone, clocks, strict=True) if name == clock]
    return offset_bounds(theirs, ours)


def offset_bounds(theirs: Sequence[Stamps], ours: Sequence[Stamps]) -> tuple[int, int]:
    """Nanoseconds to add to our clock to get theirs, and how far that may be off. Note [clock bounds].

    Args:
        theirs, ours: for each rank of either host, when it entered and left each barrier, by its own clock.
    """
    pairs = [pair for first, second in product(theirs, ours) for pair in zip(first, second, strict=True)]
    lower = max(their_entry - our_exit for (their_entry, _), (_, our_exit) in pairs)
    upper = min(their_exit - our_entry for (_, their_exit), (our_entry, _) in pairs)
    return (lower + upper) // 2, abs(upper - lower + 1) // 2
