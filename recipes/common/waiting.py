"""Long preparations that rank 0 makes while the others wait, however long they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import hybridpar as hp

Result = TypeVar("Result")


def first_rank_prepares(group: hp.Group, work: Callable[[], Result], *, every: float = 1.0) -> None:
    """Collective: do ``work`` on rank 0 while the others wait. No time-out ends it while rank 0 is alive.

    Args:
        group: the ranks.
        work: must not communicate; runs on a thread of its own.
        every: seconds between the messages by which rank 0 says that it is still at work.

    Raises:
        Exception: what ``work`` raised, on every rank.
    """
    problem: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            problem.append(error)

    worker = threading.Thread(target=guarded, name="hybridpar-prepare", daemon=True)
    if group.rank == 0:
        worker.start()
    busy = True
    while busy:
        if group.rank == 0:
            worker.join(every)
        busy = bool(group.broadcast_json(worker.is_alive() if group.rank == 0 else None))

    def finish() -> None:
        if problem:
            raise problem[0]

    hp.together(group, finish)
