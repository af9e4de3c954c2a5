"""Routes fulfil the lane contract, whatever hosts the ranks are on; their shares follow the speed of their lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.lanes.routes as module
from hybridpar.comm.lanes.compose import Ways, compose
from hybridpar.comm.lanes.lane import AloneLane, Lane, Op
from hybridpar.comm.lanes.routes import HierarchicalLane, StripedLane
from tests.comm.lanes.lane_contract import CHECKS, PROMPTLY, Check
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
        reduce, gather, cast, swap = lane.all_reduce, lane.all_gather, lane.broadcast, lane.all_to_all

        def took(size: int) -> None:
            self._seconds.value = max(size / self.bytes_per_second[number] + self.waited[lane.rank], 1e-9)

        def all_reduce(tensor: Tensor, op: Op) -> None:
            reduce(tensor, op)
            took(tensor.nbytes)

        def all_gather(outputs: Sequence[Tensor], tensor: Tensor) -> None:
            gather(outputs, tensor)
            took(sum(output.nbytes for output in outputs))

        def broadcast(tensor: Tensor, root: int) -> None:
            cast(tensor, root)
            # The root has handed its data to the system, and is done.
            took(0 if lane.rank == root else tensor.nbytes)

        def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
            swap(outputs, inputs)
            took(sum(tensor.nbytes for tensor in (*outputs, *inputs)))

        lane.all_reduce, lane.all_gather, lane.broadcast = all_reduce, all_gather, broadcast  # type: ignore[method-assign]
        lane.all_to_all = all_to_all  # type: ignore[method-assign]
        return lane

    def striped(self, group: hp.Group) -> StripedLane:
        return StripedLane([self.link(group.new_lane(), number) for number in range(2)])


def test_shares_follow_the_speeds_and_follow_them_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(speeds: tuple[float, float]) -> list[list[float]]:
        network = Network(monkeypatch, 40e6, 10e6)

        def work(group: hp.Group) -> list[float]:
            lane = network.striped(group)
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
        lane = network.striped(group)
        for _ in range(33):
            lane.all_reduce(torch.ones(100_000), "max")
        return lane.shares

    assert run_threads(2, work)[0][0] == pytest.approx(2 / 3, abs=0.02)


def test_a_lane_that_fell_to_nothing_is_seen_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, 40e6, 10e6)

    def work(group: hp.Group) -> list[float]:
        lane = network.striped(group)
        found = []
        for speed in (10e6, 100.0, 10e6):
            group.barrier()
            network.bytes_per_second[1] = speed
            group.barrier()
            for _ in range(64):
                lane.all_reduce(torch.ones(250_000), "max")
            found.append(lane.shares[1])
        return found

    assert run_threads(2, work)[0] == pytest.approx([0.2, 0.01, 0.2], abs=0.02)


def test_broadcasts_say_nothing_of_the_speed_of_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, 40e6, 10e6)

    def work(group: hp.Group) -> list[list[float]]:
        lane = network.striped(group)
        for _ in range(40):
            lane.broadcast(torch.ones(250_000), 0)
        found = [lane.shares]
        for _ in range(40):
            lane.broadcast(torch.ones(250_000), 0)
            lane.all_reduce(torch.ones(250_000), "max")
        return [*found, lane.shares]

    at_first, at_last = run_threads(2, work)[0]
    assert at_first == [0.5, 0.5]
    assert at_last == pytest.approx([0.8, 0.2], abs=0.02)


def test_a_speed_is_that_of_the_bytes_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few elements are not what the shares say: they begin at multiples of 64."""
    monkeypatch.setattr(module, "_STRIPED_BYTES", 64)
    network = Network(monkeypatch, 40e6, 10e6)

    def work(group: hp.Group) -> list[float]:
        lane = network.striped(group)
        for _ in range(80):
            lane.all_gather([torch.empty(300), torch.empty(300)], torch.ones(300))
        return lane.shares

    assert run_threads(2, work)[0] == pytest.approx([0.8, 0.2], abs=0.005)


def test_shares_follow_the_speeds_of_large_exchanges_between_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank sends, and so the other's lists are of other sizes. What is small takes the fastest lane, and says
    nothing of its speed: here each call takes a second longer."""
    network = Network(monkeypatch, 40e6, 10e6)

    def exchange(lane: StripedLane, count: int) -> None:
        inputs = torch.arange(float(count)).split([0, count]) if lane.rank == 0 else torch.empty(0).split([0, 0])
        outputs = torch.empty(0).split([0, 0]) if lane.rank == 0 else torch.empty(count).split([count, 0])
        lane.all_to_all(outputs, inputs)
        assert lane.rank == 0 or torch.equal(outputs[0], torch.arange(float(count)))

    def work(group: hp.Group) -> list[list[float]]:
        lane = network.striped(group)
        found = []
        for late, count in ((0.0, 250_000), (1.0, 10)):
            group.barrier()
            network.waited[:] = [late, late]
            group.barrier()
            for _ in range(64):
                exchange(lane, count)
            found.append(lane.shares)
        return found

    ranks = run_threads(2, work)
    assert ranks[0] == ranks[1], "both ranks have the same shares, bit for bit"
    for shares in ranks[0]:
        assert shares == pytest.approx([0.8, 0.2], abs=0.005)


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


def _error_of(call: Callable[[], object]) -> tuple[BaseException | None, float]:
    """What it raised, and the seconds until then. A rank that raised it would end the waits of the other threads."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


def _check_that_all_fail(outcomes: list[tuple[BaseException | None, float]], first: type[BaseException]) -> None:
    errors, seconds = [error for error, _ in outcomes], [taken for _, taken in outcomes]
    assert isinstance(errors[0], first), errors
    assert all(isinstance(error, hp.CommunicationError) for error in errors[1:]), errors
    assert max(seconds) < PROMPTLY, seconds


@pytest.mark.parametrize("call", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("failing", ["local", "cross"])
def test_what_fails_in_one_part_ends_the_waits_in_the_other(failing: str, call: str) -> None:
    """Rank 0 fails before its local, or its cross-host part. The ranks it never talks to must not wait for ever."""

    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lane = _composed(group, "aabb")
        assert isinstance(lane, HierarchicalLane)
        if group.rank == 0:
            part: Any = lane._local if failing == "local" else lane._cross
            part.all_reduce = part.reduce_scatter = part.all_to_all = _die
        parts, room = torch.ones(1000).split(250), torch.ones(1000).split(250)
        calls = {
            "all_reduce": lambda: lane.all_reduce(torch.ones(1000), "sum"),
            "all_to_all": lambda: lane.all_to_all(room, parts),
        }
        outcome = _error_of(calls[call])
        # Those that have all from others may be done; then their next call fails.
        return outcome if outcome[0] is not None or call == "all_reduce" else _error_of(lane.barrier)

    _check_that_all_fail(run_threads(4, work, timeout=20), KeyError)


def test_an_abort_from_outside_ends_the_waits_in_both_parts() -> None:
    """Rank 0 takes no part in the call, and aborts."""

    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lane = _composed(group, "aabb")
        if group.rank == 0:
            time.sleep(0.2)
            lane.abort("a test ends it")
        return _error_of(lambda: lane.all_reduce(torch.ones(1000), "sum"))

    _check_that_all_fail(run_threads(4, work, timeout=20), hp.CommunicationError)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_fails_on_one_stripe_ends_the_waits_on_all(failing: int) -> None:
    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lanes: list[Any] = [group.new_lane() for _ in range(3)]
        if group.rank == 0:
            lanes[failing].all_reduce = _die
        striped = StripedLane(lanes)
        outcome = _error_of(lambda: striped.all_reduce(torch.ones(100_000), "sum"))
        # Rank 0 never was in the call on one lane: no rank may be left in it.
        for lane in lanes:
            assert isinstance(_error_of(lane.barrier)[0], hp.CommunicationError)
        return outcome

    _check_that_all_fail(run_threads(2, work, timeout=20), KeyError)


def test_no_stripe_writes_into_the_tensor_after_the_call() -> None:
    lanes: list[Any] = [AloneLane(), AloneLane()]

    def slow(tensor: Tensor, _: Op) -> None:
        time.sleep(0.2)
        tensor.zero_()

    lanes[0].all_reduce, lanes[1].all_reduce = _die, slow
    tensor = torch.ones(100_000)
    with pytest.raises(KeyError):
        StripedLane(lanes).all_reduce(tensor, "sum")
    before = tensor.clone()
    time.sleep(0.4)
    assert torch.equal(tensor, before)


def _die(*_: Any) -> None:
    raise KeyError("this rank fails")
