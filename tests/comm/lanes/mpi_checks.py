"""What ``test_mpi_lane`` runs under mpirun: ``python -m tests.comm.lanes.mpi_checks FOLDER NAME`` on every rank.

Each rank writes what it saw to FOLDER/<rank>.json: by name of the check, None or what went wrong.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mpi4py
import pytest
import torch

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.mpi_lane import MpiLane
from hybridpar.comm.lanes.values import gather_json
from hybridpar.comm.lanes.watch import Watch
from hybridpar.topology import detect
from tests.comm.lanes.lane_contract import abort_ends_a_wait_and_all_later_calls
from tests.comm.lanes.mpi_ordinary import (
    ORDINARY,
    Check,
    half_sums_are_float32_sums_rounded_once,
    lanes_work_side_by_side_on_threads,
)

Report = dict[str, Any]


def _world(timeout: float, watch: Any = None) -> MpiLane:
    """Ranks are called by ten times their number, to tell them from places in the lane."""
    from hybridpar.comm.lanes.mpi_library import load

    world = load().MPI.COMM_WORLD
    return MpiLane(world, timeout, [10 * rank for rank in range(world.Get_size())], watch)


@contextmanager
def _fails(within: float, *texts: str) -> Iterator[None]:
    """A CommunicationError whose text has all of ``texts``, and that comes in time."""
    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        yield
    took = time.monotonic() - started
    assert took < within, f"{took} s"
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def a_missing_rank_is_named_at_the_timeout(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["missing"]
    if lane.rank != 2:
        with _fails(5.0, f"rank {10 * lane.rank}: all_reduce of bfloat16[2, 3] failed", "rank 20", "after 0.6 s"):
            lane.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16), "sum")
        with _fails(0.1, "barrier of nothing", "of no more use", "rank 20", "after 0.6 s"):
            lane.barrier()
    else:
        time.sleep(1.5)


def a_rank_missing_from_an_all_to_all_is_named_at_the_timeout(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["missing pairs"]
    if lane.rank != 2:
        with _fails(5.0, f"rank {10 * lane.rank}: all_to_all of bool[9] in 3 parts failed", "rank 20", "after 0.6 s"):
            parts = [torch.ones(3, dtype=torch.bool) for _ in range(2 * lane.size)]
            lane.all_to_all(parts[: lane.size], parts[lane.size :])
    else:
        time.sleep(1.5)


def an_abort_ends_the_waits_of_others_at_once(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["aborted"]
    clone = lane.clone()
    lane.barrier()
    if lane.rank == 1:
        time.sleep(0.3)
        lane.abort("no more data")
        for one in (lane, clone):
            with _fails(0.1, "rank 10: barrier", "this rank gave up: no more data"):
                one.barrier()
        return
    for one in (lane, clone):
        with _fails(3.0, "broadcast of float32[3]", "rank 10 gave up: no more data"):
            one.broadcast(torch.ones(3), 1)
    with _fails(0.1, "rank 10 gave up: no more data"):
        lane.split([lane.rank])


def an_abort_ends_the_wait_of_another_thread(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["threads"]
    if lane.rank == 0:
        threading.Timer(0.2, lane.abort).start()
        with _fails(2.0, "this rank gave up"):
            lane.barrier()


def who_comes_late_to_a_meeting_is_not_left_alone_in_it(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["meeting"]
    if lane.rank == 2:
        time.sleep(1.5)
    with _fails(4.0, "split of nothing", "rank"):
        lane.split([2, 1, 0])


def closing_alone_ends_at_the_timeout(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["closing"]
    if lane.rank != 2:
        time.sleep(1.5)
    with _fails(4.0, "close of nothing", "rank"):
        lane.close()
    lane.close()  # it is left as it is


def a_fork_is_refused(lanes: dict[str, MpiLane]) -> None:
    lane = lanes["forked"]
    lane._link._process = os.getppid()
    with pytest.raises(RuntimeError, match="barrier in a forked child"):
        lane.barrier()


def _after_a_barrier(world: Lane, check: Check) -> Check:
    @functools.wraps(check)
    def both(subject: Any) -> None:
        world.barrier()
        check(subject)

    return both


FAILURES: tuple[Check, ...] = (
    a_missing_rank_is_named_at_the_timeout,
    a_rank_missing_from_an_all_to_all_is_named_at_the_timeout,
    an_abort_ends_the_waits_of_others_at_once,
    an_abort_ends_the_wait_of_another_thread,
    who_comes_late_to_a_meeting_is_not_left_alone_in_it,
    closing_alone_ends_at_the_timeout,
    a_fork_is_refused,
)


def _run(checks: Sequence[Check], subject: Any) -> Report:
    report: Report = {}
    for check in checks:
        try:
            check(subject)
            report[check.__name__] = None
        except Exception:
            report[check.__name__] = traceback.format_exc()
    return report


def ordinary(report: Callable[[Report], None]) -> None:
    """All that must work; then the process ends as usual, MPI finalized."""
    seen: Report = {}
    atexit.register(lambda: report(seen | {"finalized": mpi4py.MPI.Is_finalized()}))  # after the lane's own
    lane = _world(30.0)
    seen |= {"library": mpi4py.MPI.Get_library_version()} | _run(ORDINARY, lane)


def failures(report: Callable[[Report], None]) -> None:
    """All that must fail in time; then the process ends with a status of its choice."""
    world = _world(30.0)
    watch = Watch(10 * world.rank, world.ranks, lambda value: gather_json(world, value))
    short = {name: _world(0.6, watch).clone() for name in ("missing", "missing pairs", "meeting", "closing", "forked")}
    long = {name: _world(30.0, watch).clone() for name in ("aborted", "threads")}
    seen = _run([_after_a_barrier(world, check) for check in FAILURES], short | long)
    report(seen | _run([abort_ends_a_wait_and_all_later_calls], _world(30.0, watch)))
    sys.exit(7)


def lost(report: Callable[[Report], None]) -> None:
    """Rank 2 is killed while the others wait, once with a watch and once without; then rank 1 ends by an exception."""
    world = _world(30.0)
    watch = Watch(10 * world.rank, world.ranks, lambda value: gather_json(world, value))
    watched, alone = _world(30.0, watch).clone(), _world(1.0).clone()
    if world.rank == 2:
        report({})
        os.kill(os.getpid(), signal.SIGKILL)
    pair = world.split([0, 1])

    def a_killed_rank_is_named_at_once_by_the_watch(_: object) -> None:
        with _fails(6.0, "all_gather of float32[1000]", "rank 20 (process"):
            watched.all_gather([torch.empty(1000) for _ in range(3)], torch.ones(1000))

    def a_killed_rank_ends_the_wait_at_the_timeout(_: object) -> None:
        with _fails(3.0, "reduce_scatter of float32[2]", "not done after 1 s"):
            alone.reduce_scatter(torch.ones(2), [torch.ones(2)] * 3)

    def an_exception_that_ends_a_rank_is_told_to_those_who_wait(_: object) -> None:
        with _fails(10.0, "rank 10 gave up: it ended with KeyError: 'no such thing'"):
            pair.all_reduce(torch.ones(1000), "sum")

    seen = _run([a_killed_rank_is_named_at_once_by_the_watch, a_killed_rank_ends_the_wait_at_the_timeout], None)
    if world.rank == 1:
        report(seen)
        raise KeyError("no such thing")
    report(seen | _run([an_exception_that_ends_a_rank_is_told_to_those_who_wait], None))


def serialized(report: Callable[[Report], None]) -> None:
    """MPI takes calls from one thread at a time; mpi4py finalizes, since it was imported before."""
    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    lane = _world(1.0)
    seen = _run([lanes_work_side_by_side_on_threads, half_sums_are_float32_sums_rounded_once], lane)
    clone = lane.clone()
    if lane.rank == 0:  # a failure, after which MPI_Finalize would hang
        with _fails(3.0, "after 1 s"):
            clone.barrier()
    else:
        time.sleep(1.5)
    report(seen | {"level": MPI.Query_thread() == MPI.THREAD_SERIALIZED})


RUNS = {run.__name__: run for run in (ordinary, failures, lost, serialized)}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)

    def report(seen: Report) -> None:
        place = folder / f"{detect().rank}.json"
        draft = place.with_suffix(".draft")
        draft.write_text(json.dumps(seen))
        draft.rename(place)

    RUNS[name](report)


if __name__ == "__main__":
    main()
