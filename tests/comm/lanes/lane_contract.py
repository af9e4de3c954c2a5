"""What every lane must do, as functions of one rank's lane. Subclass ``LaneContract`` for each kind of lane."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane, Op

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
# What a lane may refuse: with a TypeError, on every rank, before anything is sent.
OTHER_DTYPES = (torch.float16, torch.int32, torch.int16, torch.int8, torch.bool)
# All-to-all takes every dtype.
MOVED_DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64,
    torch.float8_e5m2,
)  # fmt: skip
# What an abort may take on a busy machine. All tests of lanes have time-outs of 20 s and more.
PROMPTLY = 5.0
COMBINE: dict[Op, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
Check = Callable[[Lane], None]


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    # Small integers: exact in every dtype, whatever the order of the sum.
    return ((torch.arange(count) * (rank + 2)) % 7 + rank).to(dtype)


def all_reduce_gives_every_rank_sum_max_and_min(lane: Lane) -> None:
    for dtype in DTYPES:
        for op, expected in COMBINE.items():
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


def gather_and_scatter_work_in_place(lane: Lane) -> None:
    """``output`` is ``inputs[rank]``, ``tensor`` is ``outputs[rank]``; the parts lie side by side, or do not."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for sizes in ([3] * lane.size, [rank * 2 for rank in range(lane.size)], [200] * lane.size):
            for side_by_side in (True, False):
                before = [_values(rank, sum(sizes), dtype).split(sizes) for rank in range(lane.size)]
                parts = list(_values(lane.rank, sum(sizes), dtype).split(sizes))
                if not side_by_side:
                    parts = [part.clone() for part in parts]
                own = parts[lane.rank]
                lane.reduce_scatter(own, parts)
                total = torch.stack([theirs[lane.rank] for theirs in before]).double().sum(0)
                assert torch.equal(own.double(), total), (dtype, sizes, side_by_side)
                others = [rank for rank in range(lane.size) if rank != lane.rank]
                assert all(torch.equal(parts[rank], before[lane.rank][rank]) for rank in others), (dtype, sizes)
                own.copy_(before[lane.rank][lane.rank])
                for rank in others:
                    parts[rank].zero_()
                lane.all_gather(parts, own)
                assert all(torch.equal(parts[rank], before[rank][rank]) for rank in range(lane.size)), (dtype, sizes)


def gather_and_scatter_take_tensors_of_several_dimensions(lane: Lane) -> None:
    rows = [rank + 1 for rank in range(lane.size)]
    whole = torch.arange(6.0 * sum(rows)).view(-1, 2, 3)
    output = torch.empty(rows[lane.rank], 2, 3)
    lane.reduce_scatter(output, (whole * (lane.rank + 1)).split(rows))
    mine = whole.split(rows)[lane.rank]
    assert torch.equal(output, mine * (lane.size * (lane.size + 1) // 2))
    gathered = torch.empty_like(whole)
    lane.all_gather(gathered.split(rows), mine.clone())
    assert torch.equal(gathered, whole)


def tensors_without_elements_and_without_dimensions_travel(lane: Lane) -> None:
    for dtype in DTYPES:
        for op in COMBINE:
            for shape in ((0,), (0, 3)):
                lane.all_reduce(torch.empty(shape, dtype=dtype), op)
        lane.broadcast(torch.empty(0, dtype=dtype), lane.size - 1)
        nothing = [torch.empty(0, 2, dtype=dtype) for _ in range(lane.size)]
        lane.all_gather(nothing, torch.empty(0, 2, dtype=dtype))
        lane.reduce_scatter(torch.empty(0, 2, dtype=dtype), nothing)
        scalar = torch.ones((), dtype=dtype)
        lane.all_reduce(scalar, "sum")
        assert scalar.item() == lane.size, dtype
    assert _works(lane)


def other_dtypes_are_reduced_rightly_or_refused(lane: Lane) -> None:
    for dtype in OTHER_DTYPES:
        everyone = [_values(rank, 7, dtype) for rank in range(lane.size)]
        for op, combine in COMBINE.items():
            tensor = everyone[lane.rank].clone()
            expected = combine(torch.stack(everyone).double()).to(dtype)
            if not _refused(lane.all_reduce, tensor, op):
                assert torch.equal(tensor.to(torch.uint8), expected.to(torch.uint8)), (dtype, op)
                # A bool of three is neither true nor false.
                assert dtype != torch.bool or int(tensor.view(torch.uint8).max()) <= 1, op
            assert _works(lane), (dtype, op)
        tensor = everyone[lane.rank].clone()
        if not _refused(lane.broadcast, tensor, lane.size - 1):
            assert torch.equal(tensor, everyone[-1]), dtype
        outputs = [torch.zeros(7, dtype=dtype) for _ in everyone]
        if not _refused(lane.all_gather, outputs, everyone[lane.rank]):
            assert all(torch.equal(output, value) for output, value in zip(outputs, everyone, strict=True)), dtype
        assert _works(lane), dtype


def all_to_all_takes_uneven_and_empty_parts(lane: Lane) -> None:
    for dtype in MOVED_DTYPES:
        for rows in (
            lambda sender, receiver: 3,
            lambda sender, receiver: (2 * sender + 3 * receiver + 1) % 5,  # zero for some pairs
            lambda sender, receiver: 4 * (receiver == (sender + 1) % lane.size),  # one receiver each
            lambda sender, receiver: (receiver + 1) * (sender == lane.size - 1),  # one sender
            lambda sender, receiver: 0,
        ):
            _check_all_to_all(lane, rows, (), dtype)


def all_to_all_takes_tensors_of_several_dimensions_and_of_none(lane: Lane) -> None:
    for shape in ((2, 3), (0, 2), (1, 1, 5)):
        _check_all_to_all(lane, lambda sender, receiver: sender + receiver, shape, torch.float32)
    inputs = [torch.tensor(lane.rank * 10 + receiver) for receiver in range(lane.size)]
    outputs = [torch.zeros((), dtype=torch.int64) for _ in inputs]
    lane.all_to_all(outputs, inputs)
    assert [int(output) for output in outputs] == [sender * 10 + lane.rank for sender in range(lane.size)]


def all_to_all_moves_much(lane: Lane) -> None:
    """More than a lane stages at a time; between some pairs nothing, and not as much to any rank as to another."""
    for turn in range(3):
        _check_all_to_all(
            lane,
            lambda sender, receiver, turn=turn: (sender * 5 + receiver * 3 + turn) % 4 * 70_001 + receiver,
            (),
            torch.float32,
        )
        assert _works(lane)


def _check_all_to_all(lane: Lane, rows: Callable[[int, int], int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def part(sender: int, receiver: int) -> torch.Tensor:
        full = (rows(sender, receiver), *shape)
        places = torch.arange(math.prod(full))
        return ((places * (sender + 2) + receiver * 3) % 7 + sender).to(dtype).view(full)

    everyone = range(lane.size)
    # Once as parts of one tensor, once each by itself.
    for together in (True, False):
        inputs = [part(lane.rank, receiver) for receiver in everyone]
        outputs = [torch.full_like(part(sender, lane.rank), 1) for sender in everyone]
        if together:
            inputs = list(torch.cat(inputs).split([len(one) for one in inputs]))
            outputs = list(torch.cat(outputs).split([len(one) for one in outputs]))
        lane.all_to_all(outputs, inputs)
        for other in everyone:
            got, sent = outputs[other], inputs[other]
            assert same(got, part(other, lane.rank)), (dtype, shape, other)
            assert same(sent, part(lane.rank, other)), (dtype, shape, other)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, also in dtypes of which torch compares nothing."""
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def autograd_sees_what_all_to_all_overwrites(lane: Lane) -> None:
    weight = torch.ones(3, requires_grad=True)
    outputs = [torch.full((3,), 2.0) for _ in range(lane.size)]
    product = (weight * outputs[-1]).sum()
    lane.all_to_all(outputs, [torch.ones(3) for _ in range(lane.size)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def _refused(call: Callable[..., None], *arguments: object) -> bool:
    try:
        call(*arguments)
    except TypeError:
        return True
    return False


def _works(lane: Lane) -> bool:
    tensor = torch.full((3,), float(lane.rank + 1))
    lane.all_reduce(tensor, "sum")
    return tensor.tolist() == [lane.size * (lane.size + 1) / 2] * 3


def split_numbers_the_members_in_the_order_given(lane: Lane) -> None:
    last = lane.size - 1
    everyone = list(range(lane.size))
    for members in (everyone[::-1], everyone[1:] + everyone[:1], everyone[lane.rank % 2 :: 2][::-1]):
        _check_order(lane, members)
    if lane.rank in (0, last) and last > 0:  # the others know nothing of it
        _check_order(lane, [last, 0])
    assert _works(lane)


def _check_order(lane: Lane, members: Sequence[int]) -> None:
    part = lane.split(members)
    place = list(members).index(lane.rank)
    assert (part.rank, part.size) == (place, len(members)), members
    assert part.ranks == tuple(lane.ranks[member] for member in members)
    gathered = torch.zeros(len(members), 1, dtype=torch.int64)
    part.all_gather(gathered.unbind(), torch.tensor([lane.rank]))
    assert gathered.view(-1).tolist() == list(members)
    for root, member in enumerate(members):
        value = torch.tensor([lane.rank])
        part.broadcast(value, root)
        assert value.item() == member
    rows = torch.arange(float(len(members))) * 10 + lane.rank
    mine = torch.empty(1)
    part.reduce_scatter(mine, rows.split(1))
    assert mine.item() == 10 * place * len(members) + sum(members)
    received = torch.zeros(len(members))
    part.all_to_all(received.split(1), rows.split(1))
    assert received.tolist() == [10 * place + member for member in members]
    part.close()


def lanes_split_off_for_the_same_members_are_independent(lane: Lane) -> None:
    members = list(range(lane.size))[::-1]
    first, second = lane.split(members), lane.split(members)

    def summed(part: Lane, value: float) -> list[float]:
        tensors = [torch.full((count,), value) for count in (4, 4, 1000)]
        for tensor in tensors:
            part.all_reduce(tensor, "sum")
        return [float(tensor[-1]) for tensor in tensors]

    # Threads of one rank use them at the same time, and every rank begins with another one.
    jobs = [(first, 1.0), (second, 100.0)]
    with ThreadPoolExecutor(2) as pool:
        found = {value: pool.submit(summed, part, value) for part, value in (jobs if lane.rank % 2 else jobs[::-1])}
        assert found[1.0].result() == [lane.size] * 3
        assert found[100.0].result() == [100 * lane.size] * 3
    first.close()
    assert summed(second, 7.0) == [7 * lane.size] * 3
    assert _works(lane)
    second.close()


def abort_ends_a_wait_and_all_later_calls(lane: Lane) -> None:
    doomed = lane.clone()
    if lane.size == 1:
        doomed.close()
        return
    if lane.rank == 0:  # waits for the others, none of which comes
        timer = threading.Timer(0.2, doomed.abort, ["a test ends it"])
        timer.start()
        _fails(doomed)
        timer.join()
    lane.barrier()
    if lane.rank != 0:  # what the aborted rank has begun may still be completed
        with contextlib.suppress(CommunicationError):
            doomed.all_reduce(torch.ones(5), "sum")
    _fails(doomed)
    assert _works(lane)
    # Not close(): a lane that has failed holds nothing.


def _fails(lane: Lane) -> None:
    started = time.monotonic()
    error = None
    try:
        lane.all_reduce(torch.ones(5), "sum")
    except CommunicationError as caught:
        error = caught
    assert error is not None, "a call on an aborted lane went through"
    assert time.monotonic() - started < PROMPTLY, error
    assert (error.rank, error.operation) == (lane.ranks[lane.rank], "all_reduce")


CHECKS: tuple[Check, ...] = (
    all_reduce_gives_every_rank_sum_max_and_min,
    all_gather_takes_uneven_and_empty_tensors,
    reduce_scatter_takes_uneven_and_empty_parts,
    broadcast_overwrites_with_the_roots_tensor,
    inputs_of_gather_and_scatter_stay_as_they_were,
    clones_are_independent,
    gather_and_scatter_work_in_place,
    gather_and_scatter_take_tensors_of_several_dimensions,
    tensors_without_elements_and_without_dimensions_travel,
    other_dtypes_are_reduced_rightly_or_refused,
    all_to_all_takes_uneven_and_empty_parts,
    all_to_all_takes_tensors_of_several_dimensions_and_of_none,
    all_to_all_moves_much,
    autograd_sees_what_all_to_all_overwrites,
    split_numbers_the_members_in_the_order_given,
    lanes_split_off_for_the_same_members_are_independent,
    abort_ends_a_wait_and_all_later_calls,
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
