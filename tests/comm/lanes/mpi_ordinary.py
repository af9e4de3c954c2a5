"""What an MPI lane must do beside the contract, as functions of one rank's lane; ``mpi_checks`` runs them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hybridpar.comm.lanes.mpi_lane as module
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.mpi_lane import MpiLane
from tests.comm.lanes.lane_contract import CHECKS, abort_ends_a_wait_and_all_later_calls

Check = Callable[[Any], None]


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
