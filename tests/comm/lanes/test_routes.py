"""Routes fulfil the lane contract, whatever hosts the ranks are on; their shares follow the speed of their lanes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.lanes.routes as module
from hybridpar.comm.lanes.compose import Ways, compose
from hybridpar.comm.lanes.lane import AloneLane, Lane, Op
from hybridpar.comm.lanes.routes import HierarchicalLane, StripedLane
from tests.comm.lanes.lane_contract import CHECKS, COMBINE, PROMPTLY, Check
from tests.ranks import run_processes, run_threads

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


@pytest.mark.parametrize("failing", ["local", "cross"])
def test_what_fails_in_one_part_of_an_all_to_all_ends_the_waits_in_the_other(failing: str) -> None:
    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lane = _composed(group, "aabb")
        assert isinstance(lane, HierarchicalLane)
        if group.rank == 0:
            part: Any = lane._local if failing == "local" else lane._cross
            part.all_to_all = _die
        parts = torch.ones(4).split(1)
        return _error_of(lambda: lane.all_to_all([torch.zeros(1) for _ in parts], parts))

    _check_that_all_fail(run_threads(4, work, timeout=20), KeyError)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_ranks_of_two_hosts_that_mean_different_sizes_all_raise(shared_memory: bool) -> None:
    """Rank 3 of one host expects of rank 0 of the other what it does not send."""

    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lane = _composed(group, "aabb", shared_memory=shared_memory)
        outputs = [torch.zeros(7 if (group.rank, other) == (3, 0) else 5) for other in range(4)]
        outcome = _error_of(lambda: lane.all_to_all(outputs, torch.ones(20).split(5)))
        # Those of the other host may have been done.
        return outcome if outcome[0] is not None else _error_of(lane.barrier)

    _check_that_all_fail(run_threads(4, work, timeout=20), hp.CommunicationError)


def test_hosts_exchange_each_byte_once_and_a_message_a_carrier() -> None:
    """Of 3 hosts with 2 ranks: what is sent across is what ranks send to other hosts, and sizes."""
    counts = [[(sender * 7 + receiver * 3) % 11 for receiver in range(6)] for sender in range(6)]

    def work(group: hp.Group) -> list[list[int]]:
        lane = _composed(group, "aabbcc")
        assert isinstance(lane, HierarchicalLane) and lane._cross is not None
        sent, plain = [], lane._cross.all_to_all

        def counted(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
            sent.append([part.nbytes for part in inputs])
            plain(outputs, inputs)

        lane._cross.all_to_all = counted  # type: ignore[method-assign]
        inputs = [torch.ones(count, dtype=torch.uint8) for count in counts[group.rank]]
        lane.all_to_all([torch.empty(row[group.rank], dtype=torch.uint8) for row in counts], inputs)
        return sent

    for rank, (sizes, data) in enumerate(run_threads(6, work, timeout=30)):
        here = rank // 2
        assert sizes == [0 if host == here else 16 for host in range(3)]
        assert data == [0 if host == here else sum(counts[rank][2 * host : 2 * host + 2]) for host in range(3)]


@pytest.mark.parametrize("failing", ["local", "cross"])
def test_what_fails_in_one_part_ends_the_waits_in_the_other(failing: str) -> None:
    """Rank 0 fails before its local, or its cross-host part. The ranks it never talks to must not wait for ever."""

    def work(group: hp.Group) -> tuple[BaseException | None, float]:
        lane = _composed(group, "aabb")
        assert isinstance(lane, HierarchicalLane)
        if group.rank == 0:
            part: Any = lane._local if failing == "local" else lane._cross
            part.all_reduce = part.reduce_scatter = _die
        return _error_of(lambda: lane.all_reduce(torch.ones(1000), "sum"))

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


@settings(max_examples=60)
@given(
    places=st.lists(st.sampled_from("abc"), min_size=2, max_size=6),
    sizes=st.lists(st.sampled_from([0, 1, 3, 50, 200]), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float64]),
    op=st.sampled_from(["sum", "max", "min"]),
    shares=st.lists(st.sampled_from([0.1, 1, 3]), min_size=1, max_size=3),
    shared_memory=st.booleans(),
)
def test_any_route_works_like_torch(
    places: list[str], sizes: list[int], dtype: torch.dtype, op: Op, shares: list[float], shared_memory: bool
) -> None:
    size = len(places)
    inputs = [_values(rank, sum(sizes[:size]), dtype) for rank in range(size)]
    expected = COMBINE[op](torch.stack(inputs).double()) if inputs[0].numel() else inputs[0].double()
    total = torch.stack(inputs).double().sum(0).split(sizes[:size])
    # What rank r sends to each: the same sizes, dealt from another place on.
    splits = [sizes[:size][rank:] + sizes[:size][:rank] for rank in range(size)]
    striped: list[bool] = []

    def check(lane: Lane, rank: int) -> None:
        tensor = inputs[rank].clone()
        lane.all_reduce(tensor, op)
        assert torch.equal(tensor.double(), expected)
        parts = inputs[rank].clone().split(sizes[:size])
        lane.reduce_scatter(parts[rank], parts)
        assert torch.equal(parts[rank].double(), total[rank])
        gathered = torch.full_like(inputs[rank], 77)
        lane.all_gather(gathered.split(sizes[:size]), inputs[rank].split(sizes[:size])[rank])
        assert torch.equal(gathered, torch.cat([inputs[other].split(sizes[:size])[other] for other in range(size)]))
        received = torch.full((sum(split[rank] for split in splits),), 77, dtype=dtype)
        lane.all_to_all(received.split([split[rank] for split in splits]), inputs[rank].split(splits[rank]))
        expected_parts = [inputs[other].split(splits[other])[rank] for other in range(size)]
        assert torch.equal(received, torch.cat(expected_parts))
        tensor = inputs[rank].clone()
        lane.broadcast(tensor, size - 1)
        assert torch.equal(tensor, inputs[-1])

    def work(group: hp.Group) -> None:
        ways = Ways(places[group.rank], 30, shared_memory=shared_memory)
        for route in ("flat", "striped", "hierarchical", "auto"):
            check(compose(group._lane, ways, route), group.rank)  # type: ignore[arg-type]
        lanes = [compose(group._lane, ways, "hierarchical"), *(group.new_lane() for _ in shares[1:])]
        lane = StripedLane(lanes, shares, adapt=False)
        striped.append(len(lane._pieces(inputs[0])) > 1 and lane._lane_alone(inputs[0], inputs[0].nbytes) is None)
        check(lane, group.rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STRIPED_BYTES", 64)
        patch.setattr(module, "_ALIGN", 4)
        run_threads(size, work, timeout=30)
    assert all(striped) or len(shares) == 1 or inputs[0].nbytes < 64


def _bits_of_sums(group: hp.Group) -> list[str]:
    """For every split of a tensor over two lanes, what the sums are, to the bit."""
    assert group._origin is not None
    ways = Ways("abc"[group.rank], 60, shared_memory=False, interfaces=("lo", "lo"), watch=group.watch)
    lane = compose(group._origin.parent, ways, "striped")
    assert isinstance(lane, StripedLane)
    lane._adapt = False
    found = []
    for shares in ([0.5, 0.5], [0.75, 0.25], [0.1, 0.9], [0.5, 0.5]):
        lane.shares = shares
        bits = hashlib.sha256()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            numbers = [torch.randn(200_001, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
            tensor = numbers[group.rank].to(dtype, copy=True)
            lane.all_reduce(tensor, "sum")
            torch.testing.assert_close(tensor.float(), torch.stack(numbers).sum(0), rtol=0.02, atol=0.05)
            bits.update(tensor.view(torch.uint8).numpy().tobytes())
        parts = numbers[group.rank].view(3, -1).unbind()
        output = torch.empty_like(parts[0])
        lane.reduce_scatter(output, parts)
        everyone = [torch.empty_like(output) for _ in range(3)]
        group._lane.all_gather(everyone, output)
        bits.update(torch.cat(everyone).numpy().tobytes())
        found.append(bits.hexdigest())
    lane.close()
    return found


def test_sums_do_not_depend_on_the_shares() -> None:
    """Shares follow measured speeds: the same training run twice must still give the same bits."""
    found = run_processes(3, _bits_of_sums, shared_memory=False)
    assert len({bits for rank in found for bits in rank}) == 1, found


def _values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)
