"""What every lane must do, as functions of one rank's lane. Subclass ``LaneContract`` for each kind of lane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybridpar.comm.lanes import Lane, Op

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
Check = Callable[[Lane], None]


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    # Small integers: exact in every dtype, whatever the order of the sum.
    return ((torch.arange(count) * (rank + 2)) % 7 + rank).to(dtype)


def all_reduce_gives_every_rank_sum_max_and_min(lane: Lane) -> None:
    combine: dict[Op, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda stacked: stacked.sum(0),
        "max": lambda stacked: stacked.amax(0),
        "min": lambda stacked: stacked.amin(0),
    }
    for dtype in DTYPES:
        for op, expected in combine.items():
            for count in (1, 5, 1000):
                everyone = torch.stack([_values(rank, count, dtype) for rank in range(lane.size)]).double()
                tensor = _values(lane.rank, count, dtype)
                lane.all_reduce(tensor, op)
                assert torch.equal(tensor.double(), expected(everyone)), (dtype, op, count)


def all_gather_takes_uneven_and_empty_tensors(lane: Lane) -> None:
    for dtype in DTYPES:
        for sizes in ([3] * lane.size, [rank * 2 for rank in range(lane.size)]):
            outputs = [torch.zeros(size, 2, dtype=dtype) for size in sizes]
            mine = _values(lane.rank, 2 * sizes[lane.rank], dtype).view(-1, 2)
            lane.all_gather(outputs, mine)
            for rank, output in enumerate(outputs):
                assert torch.equal(output, _values(rank, 2 * sizes[rank], dtype).view(-1, 2)), (dtype, sizes, rank)


def reduce_scatter_takes_uneven_and_empty_parts(lane: Lane) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for sizes in ([3] * lane.size, [rank * 2 for rank in range(lane.size)]):
            total = sum(sizes)
            output = torch.empty(sizes[lane.rank], dtype=dtype)
            lane.reduce_scatter(output, _values(lane.rank, total, dtype).split(sizes))
            summed = torch.stack([_values(rank, total, dtype) for rank in range(lane.size)]).double().sum(0)
            assert torch.equal(output.double(), summed.split(sizes)[lane.rank]), (dtype, sizes)


def broadcast_overwrites_with_the_roots_tensor(lane: Lane) -> None:
    for root in range(lane.size):
        for dtype in DTYPES:
            tensor = _values(lane.rank, 11, dtype)
            lane.broadcast(tensor, root)
            assert torch.equal(tensor, _values(root, 11, dtype)), (root, dtype)


def inputs_of_gather_and_scatter_stay_as_they_were(lane: Lane) -> None:
    mine = _values(lane.rank, 6, torch.float32)
    lane.all_gather([torch.empty(6) for _ in range(lane.size)], mine)
    assert torch.equal(mine, _values(lane.rank, 6, torch.float32))
    whole = _values(lane.rank, 2 * lane.size, torch.float32)
    lane.reduce_scatter(torch.empty(2), whole.split(2))
    assert torch.equal(whole, _values(lane.rank, 2 * lane.size, torch.float32))


def clones_are_independent(lane: Lane) -> None:
    first, second = lane.clone(), lane.clone()
    one, two = torch.ones(4), torch.full((4,), 10.0)
    # Different orders on different lanes of a rank are fine: each lane has an order of its own.
    second.all_reduce(two, "sum")
    first.all_reduce(one, "sum")
    lane.barrier()
    assert one.tolist() == [lane.size] * 4
    assert two.tolist() == [10.0 * lane.size] * 4
    first.close()
    second.close()


CHECKS: tuple[Check, ...] = (
    all_reduce_gives_every_rank_sum_max_and_min,
    all_gather_takes_uneven_and_empty_tensors,
    reduce_scatter_takes_uneven_and_empty_parts,
    broadcast_overwrites_with_the_roots_tensor,
    inputs_of_gather_and_scatter_stay_as_they_were,
    clones_are_independent,
)


class LaneContract:
    """Inherit, and say in ``verdict`` how a check fares on ``size`` ranks: None, or what went wrong."""

    sizes: tuple[int, ...] = (1, 2, 3)

    def verdict(self, check: Check, size: int) -> str | None:
        raise NotImplementedError

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(self, check: Check) -> None:
        for size in self.sizes:
            assert self.verdict(check, size) is None
