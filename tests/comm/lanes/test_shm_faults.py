"""Shared memory when something goes wrong: ranks that die, differ, fork or do not come, and files left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridpar as hp
import hybridpar.kernels._native as _native
from hybridpar.comm.lanes.host_lane import HostLane
from hybridpar.comm.lanes.lane import AloneLane, Lane
from hybridpar.comm.lanes.segments import remove_stale, share
from hybridpar.comm.lanes.shm_lane import ShmLane
from tests.ranks import free_port, run_shared_threads, run_threads


def _segments(makers: list[int]) -> list[str]:
    """Left by those processes; others may be at work on the same machine."""
    names = [path.name for path in Path("/dev/shm").glob("hybridpar-*")]
    return [name for name in names if int(name.split("-")[3]) in makers]


def _work_until_someone_dies(rank: int, size: int, port: int, kind: str, answers: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    group = hp.init(timeout=60)
    value = torch.ones(300_000)
    lane = group._lane
    assert isinstance(lane, HostLane)
    bucket = lane.allocate(300_000, torch.float32, value.device).fill_(0)
    answers.send(os.getpid())
    try:
        while True:
            if kind == "clone":
                lane._shared.clone().close()
            group.all_reduce(bucket if kind == "bucket" else value)
            group.all_gather(value[: 10 * rank], [10 * other for other in range(size)])
            lane.all_to_all(value.split(100_000), torch.ones(300_000).split(100_000))
    except hp.CommunicationError as error:
        answers.send((time.time(), str(error)))
    os._exit(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "victim"), [("ordinary", 1), ("bucket", 0), ("clone", 2)])
def test_survivors_of_a_killed_rank_name_it_and_no_segment_stays(kind: str, victim: int, seed: int) -> None:
    size = 3
    # Forks of a server that has imported everything and has no ranks: six times as fast as new interpreters.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybridpar", __name__])
    port, pipes = free_port(), [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_work_until_someone_dies, args=(rank, size, port, kind, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()

    def answer(rank: int) -> Any:
        assert pipes[rank][0].poll(60), f"rank {rank} says nothing"
        return pipes[rank][0].recv()

    try:
        ids = [answer(rank) for rank in range(size)]
        time.sleep(random.Random(seed).uniform(0, 0.5))  # noqa: S311
        os.kill(ids[victim], signal.SIGKILL)
        killed = time.time()
        survivors = [answer(rank) for rank in range(size) if rank != victim]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for when, text in survivors:
        # A survivor that found it on another lane may have ended before this one looked.
        assert f"rank {victim} (process {ids[victim]})" in text and "is gone" in text
        assert when - killed < 10  # of a time-out of 60 s
    assert _segments(ids) == []


def test_a_stale_segment_is_removed_and_that_of_a_live_process_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as live:
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            start = _native.process_start(dead.pid)
            dead.wait()
        assert _native.process_start(dead.pid) == 0
        space = Path("/proc/self/ns/pid").stat().st_ino
        user, token = os.getuid(), "0123456789abcdef"
        live_start = _native.process_start(live.pid)
        stale = [
            tmp_path / f"hybridpar-{user}-{space}-{dead.pid}-{start}-{token}",
            # The number of the dead process is in use again.
            tmp_path / f"hybridpar-{user}-{space}-{live.pid}-{live_start - 1}-{token}",
        ]
        others = [
            tmp_path / f"hybridpar-{user}-{space}-{live.pid}-{live_start}-{token}",
            tmp_path / f"hybridpar-{user + 1}-{space}-{dead.pid}-{start}-{token}",
            tmp_path / f"hybridpar-{user}-{space + 1}-{dead.pid}-{start}-{token}",
            tmp_path / "hybridpar-notes",
        ]
        for path in stale + others:
            path.touch()
        assert sorted(remove_stale(tmp_path)) == sorted(stale)
        assert sorted(tmp_path.iterdir()) == sorted(others)
        live.communicate(b"\n")


def test_a_killed_child_that_nobody_has_waited_for_counts_as_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert _native.process_start(child.pid) > 0
        child.kill()
        deadline = time.monotonic() + 10
        while _native.process_start(child.pid) != 0:
            assert time.monotonic() < deadline


def test_a_new_segment_clears_away_what_a_killed_start_left() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    space = Path("/proc/self/ns/pid").stat().st_ino
    left = Path(f"/dev/shm/hybridpar-{os.getuid()}-{space}-{dead.pid}-1-0123456789abcdef")
    left.touch()
    try:
        run_shared_threads(2, lambda lane: lane.barrier())
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_segment_that_one_rank_cannot_map_fails_on_all_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hybridpar.comm.lanes import segments

    taken, original = [], segments._map

    def once(path: Path, size: int) -> Any:
        taken.append(path)
        if len(taken) == 2:
            raise OSError("no more mappings")
        return original(path, size)

    monkeypatch.setattr(segments, "_map", once)

    def work(group: hp.Group) -> None:
        with pytest.raises(OSError, match=r"rank \d: no more mappings"):
            share(group._lane, 4096, tmp_path)

    run_threads(3, work)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_file_system_cannot_give_is_refused_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    def work(group: hp.Group) -> None:
        with pytest.raises(OSError, match=r"expected 4,096 free bytes .* \(No space left on device\)"):
            share(group._lane, 4096, tmp_path)

    run_threads(2, work)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_for_shared_memory_every_rank_says_so(tmp_path: Path) -> None:
    def work(group: hp.Group) -> None:
        with pytest.raises(OSError, match="got no such folder"):
            share(group._lane, 4096, tmp_path / "missing")

    run_threads(2, work)


def test_ranks_that_do_different_things_are_told_what() -> None:
    def work(lane: Lane) -> None:
        lane.barrier()
        lane.all_reduce(torch.ones(3 + lane.rank), "sum")

    errors = run_shared_threads(2, work, return_exceptions=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, hp.CommunicationError)
        assert f"all_reduce (sum) of {3 + rank} float32 here" in str(error)
        assert f"all_reduce (sum) of {4 - rank} float32 on rank {1 - rank} (process {os.getpid()});" in str(error)


def _scatter(lane: Lane, bucket: torch.Tensor, sizes: list[int]) -> None:
    parts = bucket.split(sizes)
    lane.reduce_scatter(parts[lane.rank], parts)


def _gather(lane: Lane, bucket: torch.Tensor, sizes: list[int]) -> None:
    parts = bucket.split(sizes)
    lane.all_gather(parts, parts[lane.rank])


@pytest.mark.parametrize(("collective", "call"), [("reduce_scatter", _scatter), ("all_gather", _gather)])
@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ("ordinary memory", ["in a shared bucket here", " on rank 1"]),
        ("another place", ["in a shared bucket on rank 1", ", at another place;"]),
        ("other sizes", ["in a shared bucket on rank 1", ", in parts of other sizes;"]),
        ("other small sizes", ["in a shared bucket on rank 1", ", in parts of other sizes;"]),
    ],
)
def test_ranks_that_mean_different_parts_all_raise(collective: str, call: Any, odd: str, expected: list[str]) -> None:
    half = 10 if "small" in odd else 10_000

    def work(lane: Lane) -> None:
        bucket = lane.allocate(2 * half + 1, torch.float32, torch.device("cpu"))
        sizes = [half, 0, half]
        if lane.rank == 1 and odd == "ordinary memory":
            bucket = torch.zeros(2 * half + 1)
        if lane.rank == 1 and "sizes" in odd:
            sizes = [half - 1, 1, half]
        shift = lane.rank == 1 and odd == "another place"
        call(lane, bucket[shift : shift + 2 * half], sizes)

    errors = run_shared_threads(3, work, return_exceptions=True)
    for error in errors:
        assert isinstance(error, hp.CommunicationError) and error.operation == collective
        assert "the ranks do different things" in str(error)
    for text in expected:
        assert text in str(errors[0])


def test_senders_and_receivers_that_mean_different_sizes_all_raise() -> None:
    """What rank 2 sends to rank 0 is not what rank 0 expects; rank 1 has no part in it."""

    def work(lane: Lane) -> None:
        outputs = [torch.zeros(5, dtype=torch.bool) for _ in range(lane.size)]
        inputs = [torch.ones(5 + (lane.rank == 2 and to == 0), dtype=torch.bool) for to in range(lane.size)]
        lane.all_to_all(outputs, inputs)

    errors = run_shared_threads(3, work, timeout=20, return_exceptions=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, hp.CommunicationError)
        assert (error.rank, error.operation) == (rank, "all_to_all")
        assert f"rank 2 (process {os.getpid()}) sends 6 bytes to rank 0 " in str(error), error
        assert "which expects 5; give the output of one the size of the input of the other" in str(error)


@pytest.mark.parametrize("wrong", ["inputs", "outputs"])
def test_an_all_to_all_without_a_tensor_for_each_rank_is_refused(wrong: str) -> None:
    lane = ShmLane(AloneLane(), 10)
    one, two = [torch.ones(1)], [torch.ones(1)] * 2
    with pytest.raises(ValueError, match="expected one input and one output for each of 1 ranks"):
        lane.all_to_all(*((one, two) if wrong == "inputs" else (two, one)))
    with pytest.raises(TypeError, match=r"expected CPU tensors, got float32\[1\] on meta"):
        lane.all_to_all(one, [torch.ones(1, device="meta")])


def test_errors_call_ranks_by_their_number_in_the_whole_job() -> None:
    def work(group: hp.Group, kind: str) -> str:
        group._lane.ranks = (4, 5, 9)
        lane = ShmLane(group._lane, 0.3)
        clone = lane.clone()
        assert clone.ranks == (4, 5, 9)
        if group.rank == 1 and kind == "late":
            time.sleep(1)
        if group.rank == 1 and kind == "closed":
            clone.close()
        if group.rank == 1 and kind == "aborted":
            lane.abort("rank 77 is gone ✂" + 400 * "✂")
        root = group.rank if kind == "different" else 0
        with pytest.raises(hp.CommunicationError) as caught:
            clone.broadcast(torch.ones(2), root)
        assert caught.value.rank == (4, 5, 9)[group.rank]
        return str(caught.value)

    def texts(kind: str) -> list[str]:
        return run_threads(3, work, kind)

    for kind, expected in [
        ("late", "rank 5 (process {}) did not come within 0.3 s"),
        ("closed", "rank 5 (process {}) has closed its lane"),
        ("aborted", "another rank left: rank 5 (process {}) cannot go on: rank 77 is gone ✂✂✂"),
    ]:
        assert all(expected.format(os.getpid()) in text for text in texts(kind)[::2]), kind
    text = texts("different")[2]
    assert "of 8 bytes from rank 9 (process" in text and "of 8 bytes from rank 4 (process" in text


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over() -> None:
    def work(lane: Lane) -> str:
        if lane.rank == 2:
            time.sleep(1.5)
            return ""
        with pytest.raises(hp.CommunicationError, match=r"rank 2 \(process \d+\) did not come within 0.3 s") as caught:
            lane.all_reduce(torch.ones(2), "sum")
        with pytest.raises(hp.CommunicationError, match="did not come"):
            lane.barrier()
        return f"{caught.value.rank} {caught.value.operation} {caught.value.tensor}"

    def own_timeout(group: hp.Group) -> str:
        return work(ShmLane(group._lane, 0.3))

    assert run_threads(3, own_timeout) == ["0 all_reduce float32[2]", "1 all_reduce float32[2]", ""]


def test_thread_ranks_raise_at_once_when_one_of_them_fails() -> None:
    def work(lane: Lane) -> None:
        clone = lane.clone()
        if lane.rank == 1:
            raise KeyError("this rank fails")
        (clone if lane.rank == 0 else lane).all_reduce(torch.ones(3), "sum")

    started = time.monotonic()
    errors = run_shared_threads(3, work, return_exceptions=True)
    assert time.monotonic() - started < 10
    assert isinstance(errors[1], KeyError)
    for rank in (0, 2):
        assert isinstance(errors[rank], hp.CommunicationError)
        assert "rank 1" in str(errors[rank])


def test_a_rank_that_has_closed_its_lane_is_named() -> None:
    def work(lane: Lane) -> str:
        lane.barrier()
        if lane.rank == 0:
            return ""
        with pytest.raises(hp.CommunicationError) as caught:
            lane.barrier()
        return str(caught.value)

    assert "rank 0" in (text := run_shared_threads(2, work)[1]) and "has closed its lane" in text


def test_a_forked_child_is_refused_and_its_end_does_no_harm() -> None:
    def work(lane: Lane) -> int:
        lane.barrier()
        status = 0
        if lane.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    lane.barrier()
                except hp.CommunicationError as error:
                    lane.close()
                    os._exit(17 if "is a fork of the rank" in str(error) else 1)
                os._exit(2)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lane.barrier()
        return status

    assert run_shared_threads(2, work)[0] == 17
