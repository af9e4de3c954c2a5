"""Checks of the collectives, on three ranks: results are gloo's, or those of a formula."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybridpar as hp
import hybridpar.horovod as hvd

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8]
SHAPES = [(), (1,), (17,), (0,), (5, 3), (2, 3, 4)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, high: int = 5) -> Tensor:
    """Small whole numbers, others on each rank."""
    return torch.randint(1, high, shape).to(dtype)


def of_gloo(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduced by gloo in float64."""
    wide = tensor.to(torch.float64, copy=True)
    dist.all_reduce(wide, op)
    return wide


def ranks_are_the_launchers() -> None:
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized() and hvd.is_homogeneous()


def queries_tell_the_truth() -> None:
    assert hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled()
    assert hvd.cuda_built() == (torch.version.cuda is not None) and hvd.rocm_built() == (torch.version.hip is not None)
    assert bool(hvd.nccl_built()) == torch.cuda.is_available()
    assert not hvd.ddl_built() and not hvd.ccl_built()
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()


def reductions_are_gloos() -> None:
    kinds = {hvd.Sum: dist.ReduceOp.SUM, hvd.Min: dist.ReduceOp.MIN, hvd.Max: dist.ReduceOp.MAX}
    kinds[hvd.Product] = dist.ReduceOp.PRODUCT
    for dtype in DTYPES:
        for shape in SHAPES:
            for op, theirs in kinds.items():
                tensor = drawn(shape, dtype)
                given = tensor.clone()
                result = hvd.allreduce(tensor, op=op)
                assert torch.equal(result.double(), of_gloo(tensor, theirs)), (dtype, shape, op)
                assert torch.equal(tensor, given) and result.dtype == dtype and result.shape == shape


def average_is_the_default_and_divides_by_the_ranks() -> None:
    for dtype in FLOATS:
        tensor = drawn((6,), dtype)
        expected = (of_gloo(tensor) / 3).to(dtype)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}
        for result in (
            hvd.allreduce(tensor),
            hvd.allreduce(tensor, average=True),
            hvd.allreduce(tensor, op=hvd.Average),
        ):
            torch.testing.assert_close(result, expected, **tolerance)
    assert torch.equal(hvd.allreduce(drawn((6,), torch.float32), average=False) % 1, torch.zeros(6))


def averages_of_whole_numbers_are_rounded_towards_zero() -> None:
    tensor = torch.tensor([1, -1, 10, -10]) * (1 + hvd.rank())  # sums 6, -6, 60, -60
    assert hvd.allreduce(tensor + torch.tensor([0, 0, 1, -1])).tolist() == [2, -2, 21, -21]
    assert hvd.allreduce(torch.tensor([1, -1])).tolist() == [1, -1]
    few = torch.tensor([1, -1]) if hvd.rank() else torch.tensor([0, 0])
    assert hvd.allreduce(few).tolist() == [0, 0]


def factors_are_applied_before_and_after() -> None:
    tensor = drawn((4,), torch.float64)
    for op, theirs in (
        (hvd.Sum, dist.ReduceOp.SUM),
        (hvd.Max, dist.ReduceOp.MAX),
        (hvd.Product, dist.ReduceOp.PRODUCT),
    ):
        result = hvd.allreduce(tensor, op=op, prescale_factor=-0.5, postscale_factor=3.0)
        torch.testing.assert_close(result, 3.0 * of_gloo(-0.5 * tensor, theirs))
    result = hvd.allreduce(tensor, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(result, 3.0 * of_gloo(0.5 * tensor) / 3)
    whole = torch.full((2,), 5 + hvd.rank())
    result = hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    assert result.tolist() == [int((2 + 3 + 3) * 1.5)] * 2  # 5, 6, 7, halved and rounded towards zero


def half_precision_averages_do_not_overflow() -> None:
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(hvd.allreduce(large).float(), torch.full((3,), 60000.0), rtol=2e-3, atol=0)


def calls_in_place_write_into_what_they_are_given() -> None:
    for step in range(4):  # by rounds, then by the engine
        tensor = drawn((3, 4), torch.float32).t()
        expected = of_gloo(tensor)
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="in place") is tensor
        assert torch.equal(tensor.double(), expected), step
        leaf = torch.ones(3, requires_grad=True)
        hvd.allreduce_(leaf, op=hvd.Sum, name="leaf")
        assert torch.equal(leaf.detach(), torch.full((3,), 3.0)) and leaf.requires_grad
    two = [drawn((2,), torch.float32), drawn((3,), torch.int64)]
    expected_two = [of_gloo(one) for one in two]
    results = hvd.grouped_allreduce_(two, op=hvd.Sum, name="two")
    for result, tensor, expected in zip(results, two, expected_two, strict=True):
        assert result is tensor and torch.equal(tensor.double(), expected)


def handles_are_polled_and_synchronized() -> None:
    if hvd.rank():
        time.sleep(0.2)
    handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
    if not hvd.rank():
        assert not hvd.poll(handle)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), 3.0))
    assert hvd.synchronize(handle) is None  # as in Horovod
    with pytest.raises(ValueError, match="poll: expected a handle that was not synchronized yet"):
        hvd.poll(handle)
    handles = [hvd.allreduce_async_(torch.full((2,), float(i)), op=hvd.Sum) for i in range(40)]
    assert [hvd.synchronize(handle)[0].item() for handle in reversed(handles)] == [3.0 * i for i in reversed(range(40))]


def any_order_of_names_is_served() -> None:
    for step in range(4):
        order = list(range(30))
        random.Random(1000 * step + hvd.rank()).shuffle(order)  # noqa: S311
        handles = {}
        for i in order:
            tensor = torch.full((i + 1,), float(i + hvd.rank()))
            if i % 3 == 0:
                handles[i] = hvd.allreduce_async(tensor, name=f"any {i}", op=hvd.Sum)
            elif i % 3 == 1:
                handles[i] = hvd.broadcast_async(tensor, root_rank=2, name=f"any {i}")
            else:
                handles[i] = hvd.allgather_async(tensor[:1], name=f"any {i}")
        for i, handle in handles.items():
            result = hvd.synchronize(handle)
            expected = [torch.full((i + 1,), 3.0 * i + 3), torch.full((i + 1,), i + 2.0), torch.arange(3) + float(i)]
            assert torch.equal(result, expected[i % 3]), (step, i)


def groups_are_reduced_by_place() -> None:
    tensors = [drawn((2,), torch.float32), drawn((3, 2), torch.float64), drawn((), torch.float32)]
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group")),
        hvd.grouped_allreduce_([tensor.clone() for tensor in tensors], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_([tensor.clone() for tensor in tensors], average=False)),
    ):
        assert len(results) == 3
        for result, tensor in zip(results, tensors, strict=True):
            assert torch.equal(result.double(), of_gloo(tensor))
    gathered = hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(hvd.rank(), 2)])
    assert gathered[0].tolist() == [0, 1, 2] and gathered[1].shape == (3, 2)
    assert [one.shape[0] for one in hvd.synchronize(hvd.grouped_allgather_async(gathered))] == [9, 9]
    parts = hvd.grouped_reducescatter([torch.ones(3), torch.ones(6)], op=hvd.Sum)
    assert [part.tolist() for part in parts] == [[3.0], [3.0, 3.0]]
    again = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(3), torch.ones(6)], op=hvd.Sum))
    assert [part.tolist() for part in again] == [[3.0], [3.0, 3.0]]


def compression_changes_what_is_sent_and_not_what_is_returned() -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(hvd.rank()))
    exact = (of_gloo(tensor) / 3).float()
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        result = hvd.allreduce(tensor, compression=compression)
        assert result.dtype == torch.float32 and not torch.equal(result, exact)
        torch.testing.assert_close(result, exact, rtol=tolerance, atol=tolerance)
        assert hvd.allreduce(torch.tensor([4]), compression=compression).tolist() == [4]  # as in Horovod: floats only
        listed = hvd.grouped_allreduce([tensor, tensor.double()], compression=compression)
        assert [one.dtype for one in listed] == [torch.float32, torch.float64]

    class Doubled:
        def compress(self, tensor: Tensor) -> tuple[Tensor, str]:
            return tensor * 2, "what I need"

        def decompress(self, tensor: Tensor, ctx: str) -> Tensor:
            assert ctx == "what I need"
            return tensor / 2

    torch.testing.assert_close(hvd.allreduce(tensor, compression=Doubled()), exact)
    with pytest.raises(TypeError, match=r"compression: expected hvd\.Compression\.none.*got 'fp16'"):
        hvd.allreduce(tensor, compression="fp16")


def gathers_take_uneven_rows_and_any_dtype() -> None:
    for dtype in (*DTYPES, torch.bool, torch.int16, torch.complex64):
        tensor = (torch.arange(2 * hvd.rank()).reshape(-1, 2) + hvd.rank()).to(dtype)
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, tensor)
        assert torch.equal(hvd.allgather(tensor), torch.cat(everyone))
        assert torch.equal(hvd.synchronize(hvd.allgather_async(tensor, name="rows")), torch.cat(everyone))


def broadcasts_take_any_dtype_and_layout() -> None:
    for dtype in (*DTYPES, torch.bool, torch.int16, torch.complex64):
        for shape in SHAPES:
            tensor = drawn(shape, torch.int64, high=90).to(dtype)
            theirs = [tensor.clone()]
            dist.broadcast_object_list(theirs, src=1)
            assert torch.equal(hvd.broadcast(tensor, 1), theirs[0])
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(tensor, root_rank=1)), theirs[0])
            mine = tensor.clone()
            assert hvd.broadcast_(mine, 1, name="mine") is mine and torch.equal(mine, theirs[0])
    columns = drawn((3, 4), torch.float32).t()
    theirs = [columns.clone()]
    dist.broadcast_object_list(theirs, src=2)
    assert torch.equal(hvd.synchronize(hvd.broadcast_async_(columns, 2)), theirs[0]) and torch.equal(columns, theirs[0])


def alltoall_deals_out_rows_and_says_how_many_came() -> None:
    rank = hvd.rank()
    splits = torch.tensor([rank, 1, 2], dtype=torch.int32)
    tensor = torch.arange(int(splits.sum()) * 2).reshape(-1, 2) + 100 * rank
    everyone: list[Any] = [None] * 3
    dist.all_gather_object(everyone, (tensor, splits.tolist()))
    expected = torch.cat([theirs.split(counts)[rank] for theirs, counts in everyone])
    received = [counts[rank] for _, counts in everyone]
    for given in (splits, splits.long(), splits.tolist()):
        result, counts = hvd.alltoall(tensor, splits=given)
        assert torch.equal(result, expected) and counts.tolist() == received
        assert counts.dtype == (given.dtype if isinstance(given, Tensor) else torch.int32)
    even = torch.arange(6) + 10 * rank
    assert hvd.alltoall(even).tolist() == [2 * rank + i + 10 * other for other in range(3) for i in range(2)]
    both = hvd.synchronize(hvd.alltoall_async(even))
    assert both[0].shape == (6,) and both[1].tolist() == [2, 2, 2]


def reducescatter_gives_first_ranks_one_row_more() -> None:
    for rows in (3, 7, 2, 0):
        tensor = drawn((rows, 2), torch.float64)
        total = of_gloo(tensor)
        assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), total.tensor_split(3)[hvd.rank()])
        torch.testing.assert_close(hvd.reducescatter(tensor), total.tensor_split(3)[hvd.rank()] / 3)
        handle = hvd.reducescatter_async(tensor, op=hvd.Sum, prescale_factor=2.0)
        assert torch.equal(hvd.synchronize(handle), 2 * total.tensor_split(3)[hvd.rank()])
    whole = torch.tensor([1, 2, 7]) * (hvd.rank() + 1)
    assert hvd.reducescatter(whole).tolist() == [[2], [4], [14]][hvd.rank()]
    half = hvd.reducescatter(torch.full((3,), 0.5), compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(0.5, rel=1e-3)


def _gradient(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """Of the sum of the results, weighted by rank + 1 and place."""
    tensor = torch.arange(1.0, rows + 1, dtype=torch.float64).requires_grad_()
    result = function(tensor)
    (result * torch.arange(1.0, len(result) + 1) * (hvd.rank() + 1)).sum().backward()
    assert tensor.grad is not None
    return tensor.grad


def gradients_are_horovods() -> None:
    rank, places = hvd.rank(), torch.arange(1.0, 7, dtype=torch.float64)
    six = 1 + 2 + 3
    torch.testing.assert_close(_gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), 6), six * places)
    torch.testing.assert_close(_gradient(lambda t: hvd.allreduce(t), 6), six / 3 * places)
    scaled = _gradient(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 6)
    torch.testing.assert_close(scaled, 2 * six * places)
    grouped = _gradient(lambda t: torch.cat(hvd.grouped_allreduce([t, 2 * t])), 3)
    torch.testing.assert_close(grouped, six / 3 * (places[:3] + 2 * places[3:]))
    gathered = _gradient(lambda t: hvd.allgather(t), 2)
    torch.testing.assert_close(gathered, six / 3 * places[2 * rank : 2 * rank + 2])
    broadcast = _gradient(lambda t: hvd.broadcast(t, 1), 6)
    torch.testing.assert_close(broadcast, six / 3 * places if rank == 1 else torch.zeros(6, dtype=torch.float64))
    # Rank r's rows 2k and 2k + 1 go to rank k, to its places 2r and 2r + 1.
    dealt = _gradient(lambda t: hvd.alltoall(t, splits=[2, 2, 2])[0], 6)
    expected = torch.cat([(k + 1) * places[2 * rank : 2 * rank + 2] for k in range(3)])
    torch.testing.assert_close(dealt, expected)
    # As Horovod has it, the sum's adjoint is scaled by the number of ranks.
    weights = torch.cat([(k + 1) * places[:2] for k in range(3)])
    torch.testing.assert_close(_gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), 6), 3 * weights)
    torch.testing.assert_close(_gradient(lambda t: hvd.reducescatter(t), 6), weights)
    with pytest.raises(RuntimeError, match="gradients pass through Average and Sum, not through Max"):
        _gradient(lambda t: hvd.allreduce(t, op=hvd.Max), 2)


def sparse_tensors_are_added_up() -> None:
    places = [[0, 2 + hvd.rank()], [1, 0]]
    tensor = torch.sparse_coo_tensor(torch.tensor(places), torch.tensor([1.0, 2.0]), (6, 2))
    expected = of_gloo(tensor.to_dense()).float()
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / 3)):
        wait = hvd.sparse_allreduce_async(tensor, name="sparse", op=op)
        torch.testing.assert_close(hvd.synchronize(wait).to_dense(), factor * expected)  # type: ignore[arg-type]
    rows = torch.sparse_coo_tensor(torch.tensor([[4, 4]]), torch.ones(2, 3), (6, 3))  # dense rows, not coalesced
    wanted = torch.zeros(6, 3)
    wanted[4] = 6
    assert torch.equal(hvd.sparse_allreduce_async(rows, name=None, op=hvd.Sum)().to_dense(), wanted)


def objects_travel() -> None:
    mine = {"rank": hvd.rank(), "tensor": torch.ones(hvd.rank()), "nested": [None, (1, "two")]}
    everyone = hvd.allgather_object(mine, name="objects")
    assert [one["rank"] for one in everyone] == [0, 1, 2] and everyone[2]["tensor"].shape == (2,)
    assert hvd.broadcast_object(mine if hvd.rank() == 1 else None, root_rank=1)["rank"] == 1
    with pytest.raises(hp.CommunicationError, match=r"rank 2: .*cannot be pickled"):
        hvd.broadcast_object((lambda: 0) if hvd.rank() == 2 else None, root_rank=2)


def inference_mode_does_not_get_in_the_way() -> None:
    with torch.inference_mode():
        for _ in range(4):
            tensor = torch.full((2,), float(hvd.rank()))
            assert torch.equal(hvd.allreduce(tensor, name="seen"), torch.ones(2))
            hvd.allreduce_(tensor, name="written", op=hvd.Sum)
            assert torch.equal(tensor, torch.full((2,), 3.0))
            assert torch.equal(hvd.broadcast_(torch.full((2,), float(hvd.rank())), 2, name="b"), torch.full((2,), 2.0))
