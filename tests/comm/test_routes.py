"""Routes fulfil the lane contract, whatever hosts the ranks are on; their shares follow the speed of their lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.routes as module
from hybridpar.comm.compose import Ways, compose
from hybridpar.comm.lanes import Lane, Op
from hybridpar.comm.routes import HierarchicalLane, StripedLane
from tests.comm.lane_contract import CHECKS, Check
from tests.ranks import run_threads

# Ranks of each host, not always neighbours and not always as many.
PLACES = {
    "two hosts of two": "aabb",
    "three hosts of two": "aabbcc",
    "two hosts of three, dealt in turn": "ababab",
    "uneven": "aaabbbbbc",
    "one rank a host": "abc",
    "a host of one": "aab",
}


def _composed(group: hp.Group, places: str, *, shared_memory: bool = False) -> Lane:
    return compose(group._lane, Ways(places[group.rank], 30, shared_memory=shared_memory), "hierarchical")


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_hierarchical_route_fulfils_the_contract(check: Check, places: str, shared_memory: bool) -> None:
    def work(group: hp.Group) -> None:
        lane = _composed(group, places, shared_memory=shared_memory)
        assert isinstance(lane, HierarchicalLane)
        check(lane)
        lane.close()

    run_threads(len(places), work, timeout=30)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_striped_route_fulfils_the_contract(check: Check, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRIPED_BYTES", 64)  # the contract's tensors are small
    monkeypatch.setattr(module, "_ALIGN", 4)

    def work(group: hp.Group) -> None:
        check(StripedLane([group.new_lane() for _ in range(lanes)]))

    run_threads(3, work, timeout=30)


class Network:
    """Links of which only the clock knows: a call on link i takes bytes / speed, and a wait for late ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *bytes_per_second: float) -> None:
        self.bytes_per_second = list(bytes_per_second)
        self.waited = [0.0, 0.0]
        self._seconds = threading.local()
        monkeypatch.setattr(module, "_timed", self._timed)

    def _timed(self, call: Callable[[], None]) -> float:
        call()
        return float(self._seconds.value)

    def link(self, lane: Lane, number: int) -> Lane:
        plain = lane.all_reduce

        def all_reduce(tensor: Tensor, op: Op) -> None:
            plain(tensor, op)
            self._seconds.value = tensor.nbytes / self.bytes_per_second[number] + self.waited[lane.rank]

        lane.all_reduce = all_reduce  # type: ignore[method-assign]
        return lane


def test_shares_follow_the_speeds_and_follow_them_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(speeds: tuple[float, float]) -> list[list[float]]:
        network = Network(monkeypatch, 40e6, 10e6)

        def work(group: hp.Group) -> list[float]:
            lane = StripedLane([network.link(group.new_lane(), number) for number in range(2)])
            for call in range(80):
                group.barrier()
                if group.rank == 0 and call == 40:
                    network.bytes_per_second[:] = speeds
                group.barrier()
                lane.all_reduce(torch.ones(250_000), "max")
            return lane.shares

        return run_threads(2, work)

    for speeds in ((40e6, 10e6), (40e6, 40e6), (5e6, 40e6)):
        first, second = shares(speeds)
        assert first == second, "both ranks have the same shares, bit for bit"
        assert first[0] == pytest.approx(speeds[0] / sum(speeds), abs=0.02)


def test_a_rank_that_comes_late_does_not_count_as_a_slow_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, 20e6, 10e6)
    network.waited[0] = 1.0  # rank 0 always waits for rank 1, on both lanes

    def work(group: hp.Group) -> list[float]:
        lane = StripedLane([network.link(group.new_lane(), number) for number in range(2)])
        for _ in range(33):
            lane.all_reduce(torch.ones(100_000), "max")
        return lane.shares

    assert run_threads(2, work)[0][0] == pytest.approx(2 / 3, abs=0.02)


def test_small_tensors_take_the_fastest_lane_only() -> None:
    def work(group: hp.Group) -> list[int]:
        lanes = [group.new_lane() for _ in range(2)]
        counts = [0, 0]
        for number, lane in enumerate(lanes):
            plain = lane.all_reduce

            def counted(tensor: Tensor, op: Op, number: int = number, plain: Any = plain) -> None:
                counts[number] += 1
                plain(tensor, op)

            lane.all_reduce = counted  # type: ignore[method-assign]
        striped = StripedLane(lanes, [1, 3], adapt=False)
        striped.all_reduce(torch.ones(10), "sum")
        striped.all_reduce(torch.ones(1_000_000), "sum")
        return counts

    assert run_threads(2, work) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("shares", [[1.0], [0.0, 1.0], [1.0, -1.0], [1.0, 1.0, 1.0]])
def test_shares_that_make_no_sense_are_refused(shares: list[float]) -> None:
    lanes = [hp.Group.alone().new_lane() for _ in range(2)]
    with pytest.raises(ValueError, match="shares: expected 2 positive numbers"):
        StripedLane(lanes, shares)


def test_a_route_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="route: expected one of auto, flat, striped, hierarchical, got 'ring'"):
        hp.thread_groups(1)[0].new_lane("ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", ["local", "cross"])
def test_what_fails_in_one_part_ends_the_waits_in_the_other(failing: str) -> None:
    """Rank 0 dies before its local, or its cross-host part. The ranks it never talks to must not wait for ever."""

    def work(group: hp.Group) -> None:
        lane = _composed(group, "aabb")
        assert isinstance(lane, HierarchicalLane)
        if group.rank == 0:
            part: Any = lane._local if failing == "local" else lane._cross
            part.all_reduce = part.reduce_scatter = _die
        lane.all_reduce(torch.ones(1000), "sum")

    started = time.monotonic()
    errors = run_threads(4, work, timeout=20, return_exceptions=True)
    assert time.monotonic() - started < 15
    assert isinstance(errors[0], KeyError)
    assert all(isinstance(error, hp.CommunicationError) for error in errors[1:])


def _die(*_: Any) -> None:
    raise KeyError("this rank fails")


@settings(max_examples=40)
@given(
    places=st.lists(st.sampled_from("abc"), min_size=2, max_size=6),
    count=st.integers(0, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float64]),
    op=st.sampled_from(["sum", "max", "min"]),
    lanes=st.integers(1, 3),
)
def test_any_route_reduces_like_torch(places: list[str], count: int, dtype: torch.dtype, op: Op, lanes: int) -> None:
    inputs = [_values(rank, count, dtype) for rank in range(len(places))]
    stacked = torch.stack([value.double() for value in inputs])
    expected = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]

    def work(group: hp.Group) -> None:
        ways = Ways(places[group.rank], 30, shared_memory=False)
        for route in ("flat", "striped", "hierarchical", "auto"):
            tensor = inputs[group.rank].clone()
            compose(group._lane, ways, route).all_reduce(tensor, op)  # type: ignore[arg-type]
            assert torch.equal(tensor.double(), expected), route
        tensor = inputs[group.rank].clone()
        StripedLane([group.new_lane() for _ in range(lanes)]).all_reduce(tensor, op)
        assert torch.equal(tensor.double(), expected)

    run_threads(len(places), work, timeout=30)


def _values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)
