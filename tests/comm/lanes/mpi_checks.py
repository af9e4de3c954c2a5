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
import numpy as np
import pytest
import torch

import hybridpar.comm.lanes.mpi_lane as module
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.mpi_lane import MpiLane
from hybridpar.comm.lanes.values import gather_json
from hybridpar.comm.lanes.watch import Watch
from hybridpar.topology import detect
from tests.comm.lanes.lane_contract import CHECKS, abort_ends_a_wait_and_all_later_calls

Check = Callable[[Any], None]
Report = dict[str, Any]


def _world(timeout: float, watch: Any = None) -> MpiLane:
    """Ranks are called by ten times their number, to tell them from places in the lane."""
    from hybridpar.comm.lanes.mpi_library import load

    world = load().MPI.COMM_WORLD
    return MpiLane(world, timeout, [10 * rank for rank in range(world.Get_size())], watch)


def _normal(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(count, dtype=np.float32)).to(dtype)


def _rounded_once(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    total = np.zeros(count, dtype=np.float32)
    for rank in range(size):
        total += _normal(rank, count, dtype).float().numpy()
    return torch.from_numpy(total).to(dtype)


def half_sums_are_float32_sums_rounded_once(lane: Lane) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for count in (1, 2, 7, 1000, 10_007, module.PIECE_BYTES + 5):
            expected = _rounded_once(lane.size, count, dtype)
            tensor = _normal(lane.rank, count, dtype)
            lane.all_reduce(tensor, "sum")
            assert torch.equal(tensor, expected), (dtype, count)
            output = torch.empty(count if lane.rank == 1 else 3, dtype=dtype)
            inputs = [_normal(lane.rank, count if rank == 1 else 3, dtype) for rank in range(lane.size)]
            lane.reduce_scatter(output, inputs)
            assert torch.equal(output, expected if lane.rank == 1 else _rounded_once(lane.size, 3, dtype))


def large_tensors_are_whole(lane: Lane) -> None:
    count = 3 * module.PIECE_BYTES // 4 + 11  # several pieces, and a rest
    numbers = torch.arange(count, dtype=torch.float32)
    tensor = numbers * (lane.rank + 1)
    lane.all_reduce(tensor, "sum")
    factor = lane.size * (lane.size + 1) / 2
    assert torch.equal(tensor, numbers * factor)
    sizes = [count + 100 * rank for rank in range(lane.size)]
    output = torch.empty(sizes[lane.rank])
    lane.reduce_scatter(output, [torch.arange(size, dtype=torch.float32) * (lane.rank + 1) for size in sizes])
    assert torch.equal(output, torch.arange(sizes[lane.rank], dtype=torch.float32) * factor)


def what_is_too_much_for_one_call_goes_in_parts(lane: Lane) -> None:
    limit, module.MOST_BYTES = module.MOST_BYTES, 1000
    try:
        sizes = [700 + 300 * rank for rank in range(lane.size)]
        gathered = torch.zeros(sum(sizes))
        lane.all_gather(gathered.split(sizes), torch.full((sizes[lane.rank],), float(lane.rank)))
        expected = torch.cat([torch.full((size,), float(rank)) for rank, size in enumerate(sizes)])
        assert torch.equal(gathered, expected)
        tensor = torch.arange(777) * (lane.rank + 1)
        lane.broadcast(tensor, 2)
        assert torch.equal(tensor, torch.arange(777) * 3)
        # One more and one less than what goes at a time, too; and pairs that need more messages than others.
        sizes = [[0, 999, 5001], [1000, 10, 1001], [2000, 1, 0]]
        outputs = [torch.zeros(sizes[sender][lane.rank], dtype=torch.uint8) for sender in range(lane.size)]
        lane.all_to_all(outputs, [_bytes_for(lane.rank, to, count) for to, count in enumerate(sizes[lane.rank])])
        for sender, output in enumerate(outputs):
            assert torch.equal(output, _bytes_for(sender, lane.rank, sizes[sender][lane.rank])), sender
    finally:
        module.MOST_BYTES = limit


def _bytes_for(sender: int, receiver: int, count: int) -> torch.Tensor:
    return ((torch.arange(count) * 7 + sender * 3 + receiver) % 251).to(torch.uint8)


def every_dtype_is_gathered_and_broadcast(lane: Lane) -> None:
    for dtype in (torch.complex64, torch.bool, torch.int32, torch.float16, torch.float8_e5m2):
        mine = torch.tensor([lane.rank, 1]).to(dtype)
        outputs = [torch.zeros(2, dtype=dtype) for _ in range(lane.size)]
        lane.all_gather(outputs, mine)
        for rank, output in enumerate(outputs):
            assert torch.equal(output, torch.tensor([rank, 1]).to(dtype)), (dtype, rank)
        lane.broadcast(mine, 1)
        assert torch.equal(mine, torch.tensor([1, 1]).to(dtype)), dtype


def whole_numbers_and_booleans_are_reduced(lane: Lane) -> None:
    for dtype in (torch.int32, torch.int16, torch.int8):
        for op, expected in (("sum", sum(range(lane.size))), ("max", lane.size - 1), ("min", 0)):
            tensor = torch.tensor([lane.rank, -lane.rank], dtype=dtype)
            lane.all_reduce(tensor, op)  # type: ignore[arg-type]
            assert tensor[0] == expected, (dtype, op)
    for op, expected in (("sum", [True, True, False]), ("max", [True, True, False]), ("min", [True, False, False])):
        flags = torch.tensor([True, lane.rank == 1, False])
        lane.all_reduce(flags, op)  # type: ignore[arg-type]
        assert flags.tolist() == expected, op
        part = torch.empty(1, dtype=torch.bool)
        lane.reduce_scatter(part, torch.tensor([True, lane.rank == 1, False]).split(1))
        assert part.item() == [True, True, False][lane.rank]


def nan_reaches_every_rank(lane: Lane) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for op in ("sum", "max", "min"):
            tensor = torch.tensor([float("nan") if lane.rank == 1 else 1.0, 2.0], dtype=dtype)
            lane.all_reduce(tensor, op)  # type: ignore[arg-type]
            assert tensor.isnan().tolist() == [True, False], (dtype, op)


def parts_of_one_tensor_may_be_both_input_and_output(lane: Lane) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gathered = torch.zeros(3 * lane.size, dtype=dtype)
        outputs = gathered.split(3)
        outputs[lane.rank].fill_(lane.rank + 1)
        lane.all_gather(outputs, outputs[lane.rank])
        assert gathered.tolist() == [float(rank + 1) for rank in range(lane.size) for _ in range(3)]
        whole = torch.full((3 * lane.size,), float(lane.rank + 1), dtype=dtype)
        inputs = whole.split(3)
        lane.reduce_scatter(inputs[lane.rank], inputs)
        others = [rank for rank in range(lane.size) if rank != lane.rank]
        assert inputs[lane.rank].tolist() == [lane.size * (lane.size + 1) / 2] * 3
        assert all(inputs[rank].tolist() == [lane.rank + 1.0] * 3 for rank in others)


def some_ranks_split_off_a_lane_of_their_own(lane: Lane) -> None:
    assert lane.ranks == (0, 10, 20)
    if lane.rank != 1:
        ends = lane.split([2, 0])
        assert (ends.rank, ends.size, ends.ranks) == ({2: 0, 0: 1}[lane.rank], 2, (20, 0))
        tensor = torch.tensor([float(lane.rank)])
        ends.broadcast(tensor, 0)
        assert tensor.item() == 2.0
        alone = ends.split([ends.rank])
        alone.all_reduce(tensor, "sum")
        assert tensor.item() == 2.0 and alone.ranks == (10 * lane.rank,)
    # Overlapping ones, which the ranks in the middle make one after the other.
    for pair in ([0, 1], [1, 2], [0, 1]):
        if lane.rank in pair:
            some = lane.split(pair)
            tensor = torch.ones(5)
            some.all_reduce(tensor, "sum")
            assert tensor.tolist() == [2.0] * 5
            some.close()


def lanes_work_side_by_side_on_threads(lane: Lane) -> None:
    wrong: list[str] = []

    def work(part: Lane, factor: float) -> None:
        try:
            for round_ in range(30):
                tensor = torch.full((5000,), factor * round_, dtype=torch.bfloat16 if round_ % 2 else torch.float32)
                part.all_reduce(tensor, "sum")
                assert tensor.unique().tolist() == [factor * round_ * part.size]
        except Exception:
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(lane.clone(), factor)) for factor in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def late_ranks_are_waited_for(lane: Lane) -> None:
    for late, seconds in ((0, 0.05), (1, 1.5)):
        if lane.rank == late:
            time.sleep(seconds)
        tensor = torch.ones(4, dtype=torch.bfloat16)
        lane.all_reduce(tensor, "sum")
        assert tensor.tolist() == [lane.size] * 4


def nothing_may_be_sent(lane: Lane) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        empty = torch.empty(0, 3, dtype=dtype)
        lane.all_reduce(empty, "sum")
        lane.all_gather([torch.empty(0, dtype=dtype) for _ in range(lane.size)], empty)
        lane.reduce_scatter(empty, [empty] * lane.size)
        lane.broadcast(empty, 1)
        scalar = torch.tensor(1.0, dtype=dtype)
        lane.all_reduce(scalar, "sum")
        assert scalar.item() == lane.size


def autograd_notices_the_change(lane: Lane) -> None:
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    product = weight * saved
    lane.all_reduce(saved, "sum")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def what_it_cannot_take_is_refused_before_anything_is_sent(lane: Lane) -> None:
    with pytest.raises(TypeError, match=r"expected one of float32.*, got complex64\[2\]; cast it"):
        lane.all_reduce(torch.zeros(2, dtype=torch.complex64), "sum")
    with pytest.raises(TypeError, match="expected a CPU tensor, got one on meta"):
        lane.broadcast(torch.zeros(2, device="meta"), 0)
    with pytest.raises(TypeError, match="all_to_all through MPI: expected a CPU tensor, got one on meta"):
        lane.all_to_all([torch.zeros(2)] * lane.size, [torch.zeros(2, device="meta")] * lane.size)
    with pytest.raises(ValueError, match="ranks: expected 3 numbers"):
        MpiLane(lane._comm, 1.0, [0, 1])  # type: ignore[attr-defined]
    lane.barrier()


def a_closed_lane_is_of_no_use(lane: Lane) -> None:
    clone = lane.clone()
    clone.close()
    clone.close()
    with pytest.raises(CommunicationError, match=r"rank [0-9]+: barrier of nothing failed: .*it is closed"):
        clone.barrier()


ORDINARY: tuple[Check, ...] = (
    *(check for check in CHECKS if check is not abort_ends_a_wait_and_all_later_calls),  # MPI is left then
    half_sums_are_float32_sums_rounded_once,
    large_tensors_are_whole,
    what_is_too_much_for_one_call_goes_in_parts,
    every_dtype_is_gathered_and_broadcast,
    whole_numbers_and_booleans_are_reduced,
    nan_reaches_every_rank,
    parts_of_one_tensor_may_be_both_input_and_output,
    some_ranks_split_off_a_lane_of_their_own,
    lanes_work_side_by_side_on_threads,
    late_ranks_are_waited_for,
    nothing_may_be_sent,
    autograd_notices_the_change,
    what_it_cannot_take_is_refused_before_anything_is_sent,
    a_closed_lane_is_of_no_use,
)


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
