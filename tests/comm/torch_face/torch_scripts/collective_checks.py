"""Every collective of torch.distributed on the default group, "hybridpar", against the same call on a gloo group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def values(count: int, dtype: torch.dtype, seed: int | None = None) -> Tensor:
    """Small integers, different on every rank: exact in every dtype, whatever the order of a sum."""
    rank = dist.get_rank() if seed is None else seed
    whole = (torch.arange(count) * (rank + 2)) % 5 + rank
    return whole % 2 > 0 if dtype is torch.bool else whole.to(dtype)


def same(
    call: Callable[[dist.ProcessGroup | None, list[Tensor]], object], gloo: dist.ProcessGroup, *inputs: Tensor
) -> None:
    """``call`` leaves the same in its tensors on both groups."""
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    call(None, ours)
    call(gloo, theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (index, one, other, inputs[index].dtype)


def all_reduce_gives_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            for count in (0, 1, 7, 1000):
                same(lambda group, t, op=op: dist.all_reduce(t[0], op, group), gloo, values(count, dtype))
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        for dtype in (*INTEGERS, torch.bool):
            same(lambda group, t, op=op: dist.all_reduce(t[0], op, group), gloo, values(9, dtype))
    for dtype in FLOATS:
        same(lambda group, t: dist.all_reduce(t[0], dist.ReduceOp.AVG, group), gloo, values(9, dtype) * 12)
    for dtype in (torch.complex64, torch.complex128):
        same(
            lambda group, t: dist.all_reduce(t[0], group=group),
            gloo,
            torch.complex(*values(18, dtype.to_real()).split(9)),
        )


def all_reduce_takes_any_shape_and_strides(gloo: dist.ProcessGroup) -> None:
    for shape in ((), (1,), (3, 0, 2), (2, 3, 4)):
        tensor = values(max(1, torch.Size(shape).numel()), torch.float32)[: torch.Size(shape).numel()].reshape(shape)
        same(lambda group, t: dist.all_reduce(t[0], group=group), gloo, tensor)
    base = values(24, torch.float32).view(4, 6)
    for view in (base.t(), base[:, ::2], base[1:, 2:4], base[:, 0]):
        before, expected = base.clone(), view.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(expected, group=gloo)
        dist.all_reduce(view)
        assert torch.equal(view, expected)
        base.copy_(before)
    untouched = values(24, torch.float32).view(4, 6)
    dist.all_reduce(untouched[:, 0])
    assert torch.equal(untouched[:, 1:], values(24, torch.float32).view(4, 6)[:, 1:])


def broadcast_gives_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    for root in range(dist.get_world_size()):
        for dtype in (*INTEGERS, *FLOATS, torch.bool, torch.complex64):
            tensor = values(12, torch.float32).to(dtype)
            same(lambda group, t, root=root: dist.broadcast(t[0], root, group), gloo, tensor)
        strided = values(12, torch.float32).view(3, 4).t()
        dist.broadcast(strided, root)
        short = values(5, torch.int16)
        dist.broadcast(short, root)
        assert torch.equal(short, values(5, torch.int16, root)), "no transport reduces it, all can carry it"
        assert torch.equal(strided, values(12, torch.float32, root).view(3, 4).t())


def all_gather_gives_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()

    def listed(group: dist.ProcessGroup | None, t: list[Tensor]) -> None:
        dist.all_gather(t[1:], t[0], group)

    def single(group: dist.ProcessGroup | None, t: list[Tensor]) -> None:
        dist.all_gather_into_tensor(t[1], t[0], group)

    for dtype in (*INTEGERS, *FLOATS, torch.bool, torch.complex64):
        for count in (0, 1, 6):
            tensor = values(count, torch.float32).to(dtype)
            same(listed, gloo, tensor, *[torch.zeros_like(tensor)] * size)
            same(single, gloo, tensor, torch.zeros(size * count, dtype=dtype))
    same(single, gloo, values(6, torch.float32).view(2, 3), torch.zeros(2 * size, 3))
    stacked, flat = torch.zeros(size, 2, 3), torch.zeros(2 * size, 3)
    single(None, [values(6, torch.float32).view(2, 3), stacked])
    single(gloo, [values(6, torch.float32).view(2, 3), flat])
    assert torch.equal(stacked.view(2 * size, 3), flat)


def all_gather_takes_what_gloo_refuses(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    uneven = [torch.zeros(2 * other) for other in range(size)]
    dist.all_gather(uneven, values(2 * rank, torch.float32))
    for other, got in enumerate(uneven):
        assert torch.equal(got, values(2 * other, torch.float32, other))
    columns = torch.zeros(4, size)
    dist.all_gather(list(columns.unbind(1)), values(8, torch.float32)[::2])
    for other in range(size):
        assert torch.equal(columns[:, other], values(8, torch.float32, other)[::2])
    whole = torch.zeros(3 * size)
    own = whole[3 * rank : 3 * rank + 3]
    own.copy_(values(3, torch.float32))
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, torch.cat([values(3, torch.float32, other) for other in range(size)]))


def reduce_scatter_gives_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()

    def single(group: dist.ProcessGroup | None, t: list[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        dist.reduce_scatter_tensor(t[0], t[1], op, group)

    def listed(group: dist.ProcessGroup | None, t: list[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        dist.reduce_scatter(t[0], t[1:], op, group)

    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
        for op in ops:
            for count in (0, 5):
                out, parts = torch.zeros(count, dtype=dtype), values(size * count, dtype)
                same(lambda group, t, op=op: single(group, t, op), gloo, out, parts)
            same(lambda group, t, op=op: listed(group, t, op), gloo, out, *parts.split(5))
    same(
        lambda group, t: single(group, t, dist.ReduceOp.AVG), gloo, torch.zeros(2), values(2 * size, torch.float32) * 12
    )


def reduce_scatter_takes_what_gloo_refuses(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [other + 1 for other in range(size)]
    everyone = torch.stack([values(sum(sizes), torch.float32, other) for other in range(size)]).sum(0).split(sizes)
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, list(values(sum(sizes), torch.float32).split(sizes)))
    assert torch.equal(out, everyone[rank])
    whole = values(4 * size, torch.float32)
    expected = torch.stack([values(4 * size, torch.float32, other) for other in range(size)]).sum(0)
    dist.reduce_scatter_tensor(whole[4 * rank : 4 * rank + 4], whole)
    assert torch.equal(whole[4 * rank : 4 * rank + 4], expected[4 * rank : 4 * rank + 4])
    strided = torch.zeros(4, 2)
    dist.reduce_scatter_tensor(strided[:, 1], values(4 * size, torch.float32))
    assert torch.equal(strided[:, 1], expected[4 * rank : 4 * rank + 4])
    assert not strided[:, 0].any()


def reduce_gives_the_root_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    for root in range(dist.get_world_size()):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            for dtype in (torch.float32, torch.int32, torch.bfloat16):
                ours, theirs = values(7, dtype), values(7, dtype)
                dist.reduce(ours, root, op)
                dist.reduce(theirs, root, op, gloo)
                if dist.get_rank() == root:
                    assert torch.equal(ours, theirs)
                elif op != dist.ReduceOp.PRODUCT and dtype is not torch.int32:
                    assert torch.equal(ours, values(7, dtype)), "gloo leaves partial sums there; a lane leaves it alone"


def float16_averages_do_not_overflow(gloo: dist.ProcessGroup) -> None:
    large = torch.full((5,), 40000.0, dtype=torch.float16)
    for call in (
        lambda t: dist.all_reduce(t, dist.ReduceOp.AVG),
        lambda t: dist.reduce_scatter_tensor(t, torch.cat([t] * dist.get_world_size()), dist.ReduceOp.AVG),
    ):
        mean = large.clone()
        call(mean)
        torch.testing.assert_close(mean, large)


def a_factor_is_applied_before_the_sum(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    total = torch.stack([values(6 * size, torch.float32, other) for other in range(size)]).sum(0) / 2
    for factor in (0.5, torch.tensor([0.5])):
        half = torch._C._distributed_c10d._make_nccl_premul_sum(factor)
        tensor = values(6 * size, torch.float32)
        dist.all_reduce(tensor, half)
        assert torch.equal(tensor, total)
        out, given = torch.zeros(6), values(6 * size, torch.float32)
        dist.reduce_scatter_tensor(out, given, half)
        assert torch.equal(out, total.split(6)[dist.get_rank()])
        assert torch.equal(given, values(6 * size, torch.float32))


def gather_and_scatter_give_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):

        def gather(group: dist.ProcessGroup | None, t: list[Tensor], root: int = root) -> None:
            dist.gather(t[0], t[1:] if rank == root else None, root, group)

        def scatter(group: dist.ProcessGroup | None, t: list[Tensor], root: int = root) -> None:
            dist.scatter(t[0], t[1:] if rank == root else None, root, group)

        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            same(gather, gloo, values(4, dtype), *[torch.zeros(4, dtype=dtype)] * size)
            same(scatter, gloo, torch.zeros(4, dtype=dtype), *values(4 * size, dtype).split(4))


def all_to_all_gives_what_gloo_gives(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out_sizes, in_sizes = [2 * other + rank for other in range(size)], [2 * rank + other for other in range(size)]

    def even(group: dist.ProcessGroup | None, t: list[Tensor]) -> None:
        dist.all_to_all_single(t[0], t[1], group=group)

    def uneven(group: dist.ProcessGroup | None, t: list[Tensor]) -> None:
        dist.all_to_all_single(t[0], t[1], out_sizes, in_sizes, group)

    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64):
        whole = values(3 * size, torch.float32).to(dtype)
        same(even, gloo, torch.zeros_like(whole), whole)
        parts = values(sum(in_sizes), torch.float32).to(dtype)
        same(uneven, gloo, torch.zeros(sum(out_sizes), dtype=dtype), parts)
    rows = values(6 * size, torch.float32).view(-1, 2, 3)
    same(even, gloo, torch.zeros_like(rows), rows)
    same(even, gloo, torch.zeros(0, 3), torch.zeros(0, 3))
    same(even, gloo, torch.zeros(size, 0), torch.zeros(size, 0))
    same(uneven, gloo, torch.zeros(sum(out_sizes), 2), values(2 * sum(in_sizes), torch.float32).view(-1, 2))
    for dtype in (torch.bool, torch.float8_e5m2):  # of which gloo knows only the bytes
        given, got = (torch.arange(2 * size) % 2).to(dtype), torch.zeros(2 * size, dtype=dtype)
        even(None, [got, given])
        expected = torch.zeros(2 * size, dtype=torch.uint8)
        even(gloo, [expected, given.view(torch.uint8)])
        assert torch.equal(got.view(torch.uint8), expected), dtype
    expected = torch.zeros(sum(out_sizes))
    uneven(gloo, [expected, values(sum(in_sizes), torch.float32)])
    for stride in (1, 2):  # values side by side, and every other place
        outputs = [torch.zeros(stride * count)[::stride] for count in out_sizes]
        inputs = [
            part.repeat_interleave(stride)[::stride] for part in values(sum(in_sizes), torch.float32).split(in_sizes)
        ]
        dist.all_to_all(outputs, inputs)
        assert torch.equal(torch.cat(outputs), expected)
    dealt = torch.zeros(sum(out_sizes), 2)[:, 0]
    dist.all_to_all_single(dealt, values(2 * sum(in_sizes), torch.float32)[::2], out_sizes, in_sizes)
    uneven(gloo, [expected, values(2 * sum(in_sizes), torch.float32)[::2].contiguous()])
    assert torch.equal(dealt, expected)


def wrong_all_to_alls_are_refused_before_anything_is_sent(_: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    one, world = torch.zeros(size), dist.group.WORLD
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "output of rows that", lambda: dist.all_to_all_single(torch.zeros(size + 1), one)),
        (ValueError, "input of rows that", lambda: world.alltoall_base(one, torch.tensor(1.0), [], [])),
        (ValueError, "input_split_sizes: expected", lambda: world.alltoall_base(one, one.clone(), [], [size])),
        (ValueError, "output_split_sizes: expected", lambda: world.alltoall_base(one, one.clone(), [2] * size, [])),
        (ValueError, f"one input for each of {size} ranks", lambda: world.alltoall(list(one.split(1)), [one])),
        (TypeError, "one dtype", lambda: world.alltoall_base(one, torch.zeros(size, dtype=torch.float64), [], [])),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    dist.barrier()


def neighbours_send_and_receive(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(5)
    requests: Sequence[dist.Work | None] = [dist.isend(values(5, torch.float32), after), dist.irecv(got, before)]
    for request in requests:
        assert request is not None
        request.wait()
    assert torch.equal(got, values(5, torch.float32, before))
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values(5, torch.int64), after),
            dist.P2POp(dist.irecv, got64 := torch.zeros(5, dtype=torch.int64), before),
        ]
    ):
        work.wait()
    assert torch.equal(got64, values(5, torch.int64, before))
    if rank == 0:
        dist.send(values(3, torch.float32), size - 1, tag=7)
    elif rank == size - 1:
        anyone = torch.zeros(3)
        assert dist.recv(anyone, tag=7) == 0
        assert torch.equal(anyone, values(3, torch.float32, 0))
