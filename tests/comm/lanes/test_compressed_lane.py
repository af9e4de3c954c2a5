"""Compressed sums: the bits that plain ones have, in fewer bytes, whatever the values of the step before were."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.lanes.compressed_lane as module
from hybridpar.comm.group import thread_groups
from hybridpar.comm.lanes import torch_lane
from hybridpar.comm.lanes.compose import Ways, compose
from hybridpar.comm.lanes.compressed_lane import CompressedLane
from hybridpar.comm.lanes.exponents import compress, compressed_bound
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.routes import StripedLane
from tests.comm.lanes.lane_contract import CHECKS, Check
from tests.ranks import run_processes, run_threads

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_fulfils_the_contract(check: Check, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 0)  # the contract's tensors are small
    run_threads(size, lambda group: check(CompressedLane(group.new_lane())), timeout=30)


def _values(rank: int, count: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(count, generator=generator) * 10.0 ** (step - 2)
    values[count // 3 : count // 2] = 0.0
    values[count // 2 : count // 2 + 300] = -0.0
    return values.to(dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


def _sum_in_rank_order(everyone: Sequence[Tensor]) -> Tensor:
    total = everyone[0].float()
    for other in everyone[1:]:
        total = total + other.float()
    return total.to(everyone[0].dtype)


def sums_are_those_of_plain_lanes_to_the_bit(group: hp.Group) -> None:
    torch_lane._PIECE = 10_000  # several pieces of a message, the last one shorter
    module._LEAST_BYTES, module._MOST_VALUES = 1000, 40_000  # and several messages
    plain, lane = group.new_lane(), group.new_lane("flat", compress_exponents=True)
    assert isinstance(lane, CompressedLane)
    for dtype in DTYPES:
        for count in (20_000, 65_537):
            for step in range(3):
                tensor = _values(group.rank, count, dtype, step)
                expected, again = tensor.clone(), tensor.clone()
                lane.all_reduce(tensor, "sum")
                plain.all_reduce(expected, "sum")
                everyone = [_values(rank, count, dtype, step) for rank in range(group.size)]
                assert _same_bits(tensor, _sum_in_rank_order(everyone)), (dtype, count, step)
                if group.size == 2 or dtype is torch.bfloat16:  # gloo sums float32 in the order of its ring
                    assert _same_bits(tensor, expected), (dtype, count, step)
                lane.all_reduce(again.view(1, -1), "sum")
                assert _same_bits(again, tensor), (dtype, count, step)
    lane.close()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_plain_lanes_to_the_bit(size: int) -> None:
    # As if every rank had a host of its own.
    run_processes(size, _on_hosts_of_their_own, sums_are_those_of_plain_lanes_to_the_bit)


def _on_hosts_of_their_own(group: hp.Group, check: object) -> None:
    origin = group._origin
    assert origin is not None and callable(check)
    ways = Ways(f"host {group.rank}", origin.ways.timeout, watch=origin.ways.watch)
    check(hp.Group.over(origin.parent, ways, topology=group.topology))


class Counting(CompressedLane):
    """Over a lane whose gathered bytes are counted, as this rank sends them."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.messages: list[int] = []
        gather = lane.all_gather

        def all_gather(outputs: Sequence[Tensor], tensor: Tensor) -> None:
            self.messages.append(tensor.nbytes)
            gather(outputs, tensor)

        lane.all_gather = all_gather  # type: ignore[method-assign]


def test_a_message_has_the_length_of_the_last_one_and_what_does_not_fit_follows() -> None:
    count = 100_000
    bound = compressed_bound(count, torch.bfloat16)

    def work(group: hp.Group) -> None:
        lane = Counting(group.new_lane())
        generator = torch.Generator().manual_seed(group.rank)
        # Sparse, sparser on one rank than on the other; dense; noise that cannot be compressed; dense again.
        steps = [
            lambda: torch.randn(count, generator=generator) * (torch.arange(count) < 30_000 * (1 + group.rank)),
            lambda: torch.randn(count, generator=generator),
            lambda: torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).short().view(torch.bfloat16),
            lambda: torch.randn(count, generator=generator),
        ]
        before, planned = 0, bound
        for make in steps:
            for _ in range(2):
                lane.messages.clear()
                values = make().to(torch.bfloat16)
                everyone = [torch.empty(count, dtype=torch.bfloat16) for _ in range(2)]
                group._lane.all_gather(everyone, values)
                lengths = [compress(each, torch.empty(bound, dtype=torch.uint8)) for each in everyone]
                expected = _sum_in_rank_order(everyone)
                lane.all_reduce(values, "sum")
                assert torch.equal(values.isnan(), expected.isnan())
                assert _same_bits(values[~values.isnan()], expected[~expected.isnan()])
                fits = max(lengths) <= planned
                assert abs(lane.messages[0] - planned) <= 2 * module._HEAD
                assert len(lane.messages) == (1 if fits else 2), (lengths, planned)
                if not fits:
                    assert abs(sum(lane.messages) - max(lengths[group.rank], planned)) <= 2 * module._HEAD
                longest = max(before, *lengths)
                before, planned = max(lengths), min(bound, longest + longest // 64)

    run_threads(2, work)


def test_a_large_tensor_needs_little_memory_of_its_own() -> None:
    def work(group: hp.Group) -> None:
        lane = CompressedLane(group.new_lane())
        values = _values(group.rank, 3 * module._MOST_VALUES + 1, torch.bfloat16)
        everyone = [_values(rank, len(values), torch.bfloat16) for rank in range(2)]
        lane.all_reduce(values, "sum")
        assert _same_bits(values, _sum_in_rank_order(everyone))
        assert lane._memory.numel() < 2 * 2.1 * module._MOST_VALUES

    run_threads(2, work)


def test_a_first_call_in_inference_mode_leaves_a_lane_that_works() -> None:
    def work(group: hp.Group) -> None:
        lane = CompressedLane(group.new_lane())
        with torch.inference_mode():
            lane.all_reduce(torch.ones(100_000), "sum")
        tensor = torch.ones(100_000)
        lane.all_reduce(tensor, "sum")
        assert tensor.eq(2).all()

    run_threads(2, work)


def test_what_cannot_get_shorter_goes_through_as_it_is() -> None:
    def work(group: hp.Group) -> None:
        lane = Counting(group.new_lane())
        for tensor, op in [
            (torch.ones(20_000, dtype=torch.float64), "sum"),
            (torch.ones(20_000, dtype=torch.float16), "sum"),
            (torch.ones(20_000, dtype=torch.int64), "sum"),
            (torch.ones(20_000), "max"),
            (torch.ones(100), "sum"),
        ]:
            lane.all_reduce(tensor, op)  # type: ignore[arg-type]
            assert tensor.eq(2 if op == "sum" else 1).all()
        assert lane.messages == []

    run_threads(2, work)


@pytest.mark.parametrize("size", [2, 3])
def test_one_ranks_failure_is_the_failure_of_the_sum_that_was_asked_for(size: int) -> None:
    def work(group: hp.Group) -> None:
        lane = CompressedLane(group.new_lane())
        if group.rank == 0:
            lane.abort("a test ends it")
            return
        with pytest.raises(hp.CommunicationError) as caught:
            lane.all_reduce(torch.ones(100, 2_000), "sum")
        assert (caught.value.operation, caught.value.tensor) == ("all_reduce", "float32[100, 2000]")

    run_threads(size, work)


@pytest.mark.parametrize(
    ("places", "route"), [("aabb", "auto"), ("aabbcc", "auto"), ("abc", "flat"), ("ab", "striped")]
)
def test_every_route_has_it_where_it_crosses_hosts_and_only_there(places: str, route: str) -> None:
    def work(group: hp.Group) -> None:
        ways = Ways(places[group.rank], 30, shared_memory=False)
        plain, short = (
            compose(group._lane, ways, route, compress_exponents=compress)  # type: ignore[arg-type]
            for compress in (False, True)
        )
        crossing = getattr(short, "_cross", short)
        assert isinstance(crossing, CompressedLane) and not isinstance(crossing._lane, CompressedLane)
        assert not isinstance(getattr(short, "_local", None), CompressedLane)
        for dtype in DTYPES:
            tensor = _values(group.rank, 100_000, dtype)
            expected = tensor.clone()
            short.all_reduce(tensor, "sum")
            plain.all_reduce(expected, "sum")
            # Lanes of threads round bfloat16 after every addition.
            if dtype is torch.float32 or len(set(places)) == 2:
                assert _same_bits(tensor, expected), (places, dtype)
            else:
                torch.testing.assert_close(tensor, expected, rtol=2**-6, atol=2**-10)

    run_threads(len(places), work)


def test_a_striped_lane_carries_the_messages() -> None:
    def work(group: hp.Group) -> None:
        lane = CompressedLane(StripedLane([group.new_lane(), group.new_lane()]))
        for _ in range(4):
            tensor = _values(group.rank, 500_000, torch.bfloat16)
            everyone = [_values(rank, 500_000, torch.bfloat16) for rank in range(3)]
            lane.all_reduce(tensor, "sum")
            assert _same_bits(tensor, _sum_in_rank_order(everyone))
        lane.close()

    run_threads(3, work)


def test_inside_one_host_nothing_is_compressed() -> None:
    groups = thread_groups(1)
    assert not isinstance(groups[0].new_lane("auto", compress_exponents=True), CompressedLane)
