"""Shared memory: the lane contract on threads and processes, its door, buckets, and lanes side by side."""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.lanes import host_lane
from hybridpar.comm.lanes.compose import Route
from hybridpar.comm.lanes.host_lane import HostLane, with_shared_memory
from hybridpar.comm.lanes.lane import AloneLane, Lane
from hybridpar.comm.lanes.shm_lane import ShmLane
from hybridpar.comm.lanes.torch_lane import TorchLane
from tests.comm.lanes.lane_contract import CHECKS, Check, LaneContract
from tests.ranks import run_processes, run_shared_threads, run_threads

CPU = torch.device("cpu")


def segments() -> list[Path]:
    """What this process has left, or one that is gone. Tests that run at the same time have some for a moment."""
    found = [(path, path.name.split("-")[3]) for path in Path("/dev/shm").glob("hybridpar-*")]
    return [path for path, maker in found if int(maker) == os.getpid() or not Path("/proc", maker).exists()]


def _verdict(check: Check, lane: Lane) -> str | None:
    try:
        check(lane)
    except Exception:
        return traceback.format_exc()
    return None


class TestShmLaneOnThreads(LaneContract):
    sizes = (1, 2, 3, 4, 5)

    def verdict(self, check: Check, size: int) -> str | None:
        verdicts = run_shared_threads(size, functools.partial(_verdict, check), timeout=20)
        return next((text for text in verdicts if text), None)


def _both_ways_are_used(lane: Lane) -> None:
    assert isinstance(lane, HostLane) and isinstance(lane.clone(), HostLane)
    tensor = torch.ones(3, dtype=torch.int32)  # which only gloo takes
    lane.all_reduce(tensor, "sum")
    assert tensor.tolist() == [lane.size] * 3


def _every_check(group: hp.Group) -> dict[str, str | None]:
    lane = group.new_lane()
    return {"lanes": _verdict(_both_ways_are_used, lane)} | {check.__name__: _verdict(check, lane) for check in CHECKS}


@functools.cache
def _process_verdicts(size: int) -> list[dict[str, str | None]]:
    return run_processes(size, _every_check)


class TestShmLaneOnProcesses(LaneContract):
    sizes = (3,)

    def verdict(self, check: Check, size: int) -> str | None:
        return next((found[check.__name__] for found in _process_verdicts(size) if found[check.__name__]), None)


def test_processes_of_one_host_get_shared_memory() -> None:
    assert all(found["lanes"] is None for found in _process_verdicts(3))
    assert segments() == []


def test_ranks_on_different_hosts_stay_on_their_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter("ab")
    monkeypatch.setattr("hybridpar.comm.lanes.shm_lane.host_identity", lambda: next(hosts))
    assert run_threads(2, lambda group: with_shared_memory(group._lane, 10) is group._lane) == [True, True]


def test_other_dtypes_and_devices_are_refused() -> None:
    lane = ShmLane(AloneLane(), 10)
    with pytest.raises(TypeError, match=r"expected a CPU tensor of float32.* got int32\[3\]"):
        lane.all_reduce(torch.ones(3, dtype=torch.int32), "sum")
    with pytest.raises(TypeError, match="on meta"):
        lane.broadcast(torch.empty(3, device="meta"), 0)
    with pytest.raises(TypeError, match="one dtype"):
        lane.all_gather([torch.ones(3)], torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="use torch"):
        lane.allocate(3, torch.int32, CPU)
    lane.close()
    with pytest.raises(hp.CommunicationError, match="closed"):
        lane.barrier()


def test_autograd_sees_that_a_saved_value_was_overwritten() -> None:
    lane = ShmLane(AloneLane(), 10)
    weight = torch.ones(3, requires_grad=True)
    value = torch.full((3,), 2.0)
    product = (weight * value).sum()
    lane.all_reduce(value, "sum")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def _sums_in_buckets(lane: Lane) -> None:
    first, second = lane.allocate(50_000, torch.float32, CPU), lane.allocate(7, torch.bfloat16, CPU)
    for turn in range(3):
        first.copy_(torch.arange(50_000.0) * (lane.rank + 1))
        second.fill_(lane.rank + turn)
        lane.all_reduce(second, "sum")
        lane.all_reduce(first[100:40_000], "sum")
        lane.all_reduce(first[:3], "max")
        total = lane.size * (lane.size + 1) / 2
        expected = torch.arange(50_000.0) * (lane.rank + 1)
        expected[100:40_000] = torch.arange(100.0, 40_000) * total
        expected[:3] = torch.arange(3.0) * lane.size
        assert torch.equal(first, expected)
        assert second.tolist() == [lane.size * (lane.size - 1) / 2 + turn * lane.size] * 7
    assert lane.allocate(0, torch.float32, CPU).numel() == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buckets_and_parts_of_them_hold_the_sum_in_place(size: int) -> None:
    run_shared_threads(size, _sums_in_buckets, timeout=20)


def _scatters_and_gathers_in_a_bucket(lane: Lane, sizes: list[int], dtype: torch.dtype) -> None:
    bucket = lane.allocate(5 + sum(sizes), dtype, CPU)[5:]
    parts = bucket.split(sizes)
    places = torch.arange(float(sum(sizes))) % 50
    for turn in range(20):
        bucket.copy_(places + lane.rank + turn)
        lane.reduce_scatter(parts[lane.rank], parts)
        parts[lane.rank].mul_(2)  # what others do between hosts
        lane.all_gather(parts, parts[lane.rank])
        total = lane.size * (places + turn) + lane.size * (lane.size - 1) / 2
        assert torch.equal(bucket, (2 * total).to(dtype)), (turn, sizes)


@pytest.mark.parametrize("sizes", [[9000] * 4, [20_000, 7], [0, 11_111, 0, 9001], [0, 0, 30_000], [3, 0, 5], [0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_scattered_and_gathered_in_place_whoever_carries_parts(
    sizes: list[int], dtype: torch.dtype
) -> None:
    run_shared_threads(len(sizes), _scatters_and_gathers_in_a_bucket, sizes, dtype, timeout=20)


def test_a_bucket_serves_on_when_others_are_gone_and_outlives_its_lane() -> None:
    def work(lane: Lane) -> torch.Tensor:
        for _ in range(20):
            lane.all_reduce(lane.allocate(5000, torch.float32, CPU).fill_(1), "sum")
        kept = lane.allocate(5000, torch.float32, CPU).fill_(lane.rank)
        lane.all_reduce(kept, "sum")
        # What takes the place of a bucket that was freed is ordinary memory again.
        for _ in range(20):
            other = torch.ones(5000)
            lane.all_reduce(other, "sum")
            assert other.eq(lane.size).all()
        return kept

    for kept in run_shared_threads(3, work, timeout=20):
        assert kept.eq(3).all()
    assert segments() == []


def test_the_engine_packs_into_shared_memory() -> None:
    def work(lane: Lane) -> None:
        taken: list[int] = []

        class Watched(ShmLane):
            def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
                taken.append(numel)
                return super().allocate(numel, dtype, device)

        class WatchedGroup(hp.Group):
            def new_lane(self, route: Route = "auto", compress_exponents: bool = False) -> Lane:
                return Watched(lane, 20)

        engine = Engine(WatchedGroup(lane, hp.Group.alone().topology), plan=Plan(bucket_bytes=4000))
        tensors = [torch.full((size,), float(lane.rank + index)) for index, size in enumerate((900, 90, 2000))]
        engine.register(["a", "b", "c"], tensors)
        assert taken == [992, 2001]  # a flag for each tensor
        for _ in range(2):
            for index, tensor in enumerate(tensors):
                engine.submit(index, tensor.fill_(lane.rank + index))
            engine.flush()
            assert [tensor.unique().tolist() for tensor in tensors] == [[3.0], [6.0], [9.0]]
        engine.close()

    run_shared_threads(3, work, timeout=20)


def test_two_lanes_serve_two_threads_at_once() -> None:
    def work(lane: Lane) -> None:
        lanes = [lane, lane.clone()]
        errors: list[BaseException] = []

        def loop(number: int) -> None:
            try:
                for turn in range(100):
                    value = torch.full((number * 3000 + turn,), float(lane.rank + number))
                    lanes[number].all_reduce(value, "sum")
                    assert value.eq(lane.size * (lane.size - 1) / 2 + lane.size * number).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []

    run_shared_threads(3, work, timeout=30)


@pytest.fixture
def _fresh_log() -> Iterator[None]:
    host_lane._LOGGED.clear()
    yield
    host_lane._LOGGED.clear()


@pytest.mark.usefixtures("_fresh_log")
def test_without_enough_shared_memory_ranks_stay_on_their_lane_and_say_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hybridpar.comm.lanes.segments.free_bytes", lambda folder: 1000)

    def refused(group: hp.Group) -> None:
        with pytest.raises(OSError, match=r"expected [\d,]+ free bytes in /dev/shm, got 1,000; enlarge it"):
            ShmLane(group._lane, 10)

    run_threads(3, refused)
    assert run_threads(2, lambda group: with_shared_memory(group._lane, 10) is group._lane) == [True, True]
    assert run_threads(2, lambda group: with_shared_memory(group._lane, 10) is group._lane) == [True, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "expected" in caplog.text and "/dev/shm" in caplog.text


@pytest.mark.usefixtures("_fresh_log")
def test_a_bucket_that_does_not_fit_fails_on_every_rank_and_the_lane_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: hp.Group) -> None:
        lane = ShmLane(group._lane, 10)
        with pytest.raises(OSError, match="enlarge it"):
            lane.allocate(1 << 42, torch.float32, CPU)
        ones = torch.ones(4)
        both = HostLane(lane, group._lane)
        lane.all_reduce(ones, "sum")
        assert ones.tolist() == [group.size] * 4
        assert isinstance(both.clone(), HostLane)

    run_threads(3, work)
    assert segments() == []


def test_an_automatic_bucket_that_does_not_fit_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: hp.Group) -> None:
        lane = HostLane(ShmLane(group._lane, 10), group._lane)
        group.barrier()
        monkeypatch.setattr("hybridpar.comm.lanes.segments.free_bytes", lambda folder: 0)
        group.barrier()
        bucket = lane.allocate(100_000, torch.float32, CPU).fill_(1)
        lane.all_reduce(bucket, "sum")
        assert bucket.eq(group.size).all()

    host_lane._LOGGED.clear()
    run_threads(2, work)
    assert "slower way" in caplog.text


def test_a_signal_interrupts_a_wait() -> None:
    """The main thread is rank 0 and waits for a rank that does not come."""
    groups = hp.thread_groups(2)
    lanes: dict[int, Lane] = {}
    other = threading.Thread(target=lambda: lanes.update({1: ShmLane(groups[1]._lane, 60)}))
    other.start()
    lane = ShmLane(groups[0]._lane, 60)
    other.join()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lane.barrier()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(hp.CommunicationError, match=r"rank 0 \(process \d+\) cannot go on: interrupted"):
        lanes[1].barrier()


def test_torch_lanes_give_ordinary_memory() -> None:
    assert TorchLane.allocate(AloneLane(), 3, torch.int32, CPU).shape == (3,)  # type: ignore[arg-type]
