"""What routes make of tensors: as torch would, on any hosts, and the same bits however a tensor is divided."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.lanes.routes as module
from hybridpar.comm.lanes.compose import Ways, compose
from hybridpar.comm.lanes.lane import Lane, Op
from hybridpar.comm.lanes.routes import StripedLane
from tests.comm.lanes.lane_contract import COMBINE
from tests.ranks import run_processes, run_threads


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
