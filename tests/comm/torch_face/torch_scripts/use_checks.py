"""How scripts use a process group: works and futures, functional collectives, objects, sub-groups, meshes, mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hybridpar as hp
from hybridpar.comm.torch_face.process_group import HybridProcessGroup
from tests.comm.torch_face.torch_scripts.collective_checks import values


def _total(count: int) -> Tensor:
    return torch.stack([values(count, torch.float32, rank) for rank in range(dist.get_world_size())]).sum(0)


def works_and_futures_carry_the_result(gloo: dist.ProcessGroup) -> None:
    assert dist.get_backend() == "hybridpar"
    tensor = values(100_000, torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert torch.equal(tensor, _total(100_000))
    assert torch.equal(doubled.wait(), 2 * tensor)
    assert torch.equal(work.get_future().wait()[0], tensor)
    done = dist.group.WORLD.allreduce([values(3, torch.float32)], _blocking())
    assert done.wait()
    assert done.is_completed()
    assert done.is_success()
    assert torch.equal(done.get_future().wait()[0], _total(3))


def _blocking() -> torch._C._distributed_c10d.AllreduceOptions:
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.asyncOp = False
    return options


def many_calls_in_flight_keep_their_order(gloo: dist.ProcessGroup) -> None:
    tensors = [values(1 + 50 * index, torch.float32) for index in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    blocking = values(7, torch.float32)
    dist.all_reduce(blocking)
    gathered = torch.zeros(7 * dist.get_world_size())
    works.append(dist.all_gather_into_tensor(gathered, blocking, async_op=True))
    for work in reversed(works):
        work.wait()
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, _total(1 + 50 * index))
    assert torch.equal(gathered, blocking.repeat(dist.get_world_size()))


def callbacks_may_send(gloo: dist.ProcessGroup) -> None:
    """As PowerSGD's hook does: a callback starts the next collective and waits for it, while others are under way."""
    time.sleep(0.02 * dist.get_rank())
    first, second, third = (values(5, torch.float32) for _ in range(3))

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        second.add_(future.value()[0])
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(first, async_op=True).get_future().then(again)
    dist.all_reduce(third)
    assert torch.equal(chained.wait(), _total(5) + dist.get_world_size() * _total(5))
    assert torch.equal(third, _total(5))


def autograd_and_inference_mode_do_not_get_in_the_way(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    weight = torch.nn.Parameter(values(6, torch.float32))
    gathered = torch.zeros(6 * size)
    dist.all_gather_into_tensor(gathered, weight)
    assert not gathered.requires_grad
    dist.all_reduce(weight)
    assert torch.equal(weight.detach(), _total(6))
    for in_flight in (False, True):
        weight = torch.nn.Parameter(values(6, torch.float32).view(2, 3))
        work = dist.all_reduce(weight.t(), async_op=in_flight)
        if in_flight:
            work.wait()
        assert torch.equal(weight.detach().flatten(), _total(6)), "written through a view of a leaf"
        assert weight.grad_fn is None
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        inside = values(6, torch.float32)
        work = dist.all_reduce(inside, async_op=True)
        out = torch.zeros(6 * size)
        dist.all_gather_into_tensor(out, inside, async_op=True).wait()
        work.wait()
        assert torch.equal(inside, _total(6))
        assert torch.equal(out, _total(6).repeat(size))


def names_before_torch_2_13_are_served(gloo: dist.ProcessGroup) -> None:
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(4 * size)
    world._allgather_base(whole, values(4, torch.float32)).wait()
    everyone = torch.cat([values(4, torch.float32, other) for other in range(size)])
    assert torch.equal(whole, everyone)
    one, two = torch.zeros(4 * size), torch.zeros(2 * size)
    world.allgather_into_tensor_coalesced([one, two], [values(4, torch.float32), values(2, torch.float32)]).wait()
    assert torch.equal(one, everyone)
    assert torch.equal(two, torch.cat([values(2, torch.float32, other) for other in range(size)]))
    lists = [[torch.zeros(4), torch.zeros(2)] for _ in range(size)]
    world.allgather_coalesced(lists, [values(4, torch.float32), values(2, torch.float32)]).wait()
    for other in range(size):
        assert torch.equal(lists[other][0], values(4, torch.float32, other))
        assert torch.equal(lists[other][1], values(2, torch.float32, other))
    out = torch.zeros(3)
    world._reduce_scatter_base(out, values(3 * size, torch.float32)).wait()
    assert torch.equal(out, _total(3 * size).split(3)[rank])
    outs = [torch.zeros(3), torch.zeros(1)]
    world.reduce_scatter_tensor_coalesced(outs, [values(3 * size, torch.float32), values(size, torch.float32)]).wait()
    assert torch.equal(outs[0], _total(3 * size).split(3)[rank])
    assert torch.equal(outs[1], _total(size).split(1)[rank])
    dealt = torch.zeros(2 * size)
    world.alltoall_base(dealt, values(2 * size, torch.float32), [], []).wait()
    expected = torch.zeros(2 * size)
    dist.all_to_all_single(expected, values(2 * size, torch.float32), group=gloo)
    assert torch.equal(dealt, expected)
    single = values(3, torch.float32)
    world.allreduce(single).wait()
    assert torch.equal(single, _total(3))


def functional_collectives_equal_gloos(gloo: dist.ProcessGroup) -> None:
    world, size = dist.group.WORLD, dist.get_world_size()
    calls: list[Callable[[dist.ProcessGroup], object]] = [
        lambda group: funcol.all_reduce(values(6, torch.float32), "sum", group),
        lambda group: funcol.all_reduce(values(6, torch.int32), "max", group),
        lambda group: funcol.all_gather_tensor(values(6, torch.float32).view(2, 3), 0, group),
        lambda group: funcol.all_gather_tensor(values(6, torch.float32).view(2, 3), 1, group),
        lambda group: funcol.reduce_scatter_tensor(values(6 * size, torch.float32), "sum", 0, group),
        lambda group: funcol.reduce_scatter_tensor(values(6 * size, torch.float32).view(2, 3 * size), "sum", 1, group),
        lambda group: funcol.broadcast(values(6, torch.float32), 1, group),
        lambda group: funcol.all_to_all_single(values(2 * size, torch.float32), None, None, group),
        lambda group: funcol.all_reduce_coalesced([values(6, torch.float32), values(3, torch.float32)], "sum", group),
        lambda group: funcol.all_gather_into_tensor_coalesced(
            [values(6, torch.float32), values(3, torch.float32)], group
        ),
        lambda group: funcol.reduce_scatter_tensor_coalesced(
            [values(6 * size, torch.float32), values(size, torch.float32)], "sum", [0, 0], group
        ),
    ]
    for index, call in enumerate(calls):
        ours, theirs = call(world), call(gloo)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
        for one, other in pairs:
            assert torch.equal(funcol.wait_tensor(one), funcol.wait_tensor(other)), index
    leaf = values(6, torch.float32).requires_grad_()
    funcol.all_gather_tensor_autograd(leaf, 0, world).square().sum().backward()
    assert torch.equal(leaf.grad, 2 * size * leaf.detach())


def coalescing_managers_are_served(gloo: dist.ProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensors = [values(4, torch.float32), values(9, torch.float32)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert torch.equal(tensors[0], _total(4))
    assert torch.equal(tensors[1], _total(9))
    outs = [torch.zeros(4), torch.zeros(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_tensor(outs[0], values(4 * size, torch.float32))
        dist.reduce_scatter_tensor(outs[1], values(2 * size, torch.float32))
    manager.wait()
    assert torch.equal(outs[0], _total(4 * size).split(4)[rank])
    assert torch.equal(outs[1], _total(2 * size).split(2)[rank])


def objects_travel(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    assert everyone == [{"rank": other, "text": "x" * other} for other in range(size)]
    shared = [rank, {"of": rank}] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, 1)
    assert shared == [1, {"of": 1}]
    gathered: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "me"), gathered, 0)
    assert gathered == ([(other, "me") for other in range(size)] if rank == 0 else None)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]


def barriers_wait(gloo: dist.ProcessGroup) -> None:
    last = dist.get_world_size() - 1
    limited = torch._C._distributed_c10d.BarrierOptions()
    limited.timeout = timedelta(seconds=30)
    for wait in (dist.barrier, dist.monitored_barrier, lambda: dist.group.WORLD.barrier(limited).wait()):
        if dist.get_rank() == last:
            time.sleep(0.2)
        before = torch.tensor(time.time(), dtype=torch.float64)
        wait()
        after = time.time()
        dist.all_reduce(before, dist.ReduceOp.MAX, gloo)
        assert after >= float(before)
    dist.monitored_barrier(gloo, timedelta(seconds=30))


def sub_groups_have_their_own_ranks(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = dist.new_group([0, size - 1], timeout=timedelta(seconds=30))
    if rank in (0, size - 1):
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=ends)
        assert tensor.item() == size + 1
        dist.broadcast(tensor.fill_(rank), size - 1, ends)
        assert tensor.item() == size - 1
        assert dist.get_process_group_ranks(ends) == [0, size - 1]
        assert dist.get_group_rank(ends, rank) == (rank != 0)
        if rank == 0:
            dist.send(torch.tensor([5.0]), size - 1, ends)
        else:
            dist.recv(tensor, 0, ends)
            assert tensor.item() == 5.0
        dist.destroy_process_group(ends)
    # Every rank makes one, or torch's own numbers of groups differ from here on.
    mine = [0] if rank == 0 else list(range(1, size))
    local = dist.new_group(mine, use_local_synchronization=True, backend="hybridpar")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=local)
    assert tensor.tolist() == [float(len(mine))] * 3
    dist.barrier()


def groups_split(gloo: dist.ProcessGroup) -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    assert isinstance(world, HybridProcessGroup)
    part = world.split_group([2, 0], group_name="zero and two", group_desc="ends")
    if rank == 1:
        assert part is None
    else:
        assert part is not None
        assert (part.rank(), part.size()) == (rank // 2, 2)
        assert part.group_name == "zero and two"
        tensor = torch.tensor([float(rank)])
        part.allreduce([tensor]).wait()
        assert tensor.item() == 2.0
        part.shutdown()
    for members in ([0, 1], [0, 2]):
        pair = world.split_group(members)
        if pair is not None:
            tensor = torch.ones(1)
            pair.allreduce([tensor]).wait()
            assert tensor.item() == 2.0
            pair.shutdown()


def meshes_have_their_groups(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    for name, members in (("replicate", 1), ("shard", size)):
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.tolist() == [members] * 2
        assert dist.get_backend(mesh.get_group(name)) == "hybridpar"


def a_group_of_hybridpar_lives_beside_it(gloo: dist.ProcessGroup) -> None:
    group = hp.init(timeout=60)
    assert (group.rank, group.size) == (dist.get_rank(), dist.get_world_size())
    assert torch.equal(group.all_reduce(values(5, torch.float32)), _total(5))
    part = dist.new_group([0, 1])
    if group.rank < 2:
        pair = hp.Group.from_torch(part, timeout=60)
        assert (pair.rank, pair.size) == (group.rank, 2)
        assert pair.all_gather(torch.tensor([group.rank])).tolist() == [0, 1]
        pair.close()
    group.close()


def sparse_gradients_are_summed(gloo: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sparse = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 1,), check_invariants=True)
    expected = sparse.to_dense()
    dist.all_reduce(sparse)
    dist.all_reduce(expected)
    assert torch.equal(sparse.to_dense(), expected)


def mistakes_say_what_was_expected(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    plain = torch.ones(4)
    for error, text, call in (
        (TypeError, "expected floating point for AVG", lambda: dist.all_reduce(plain.long(), dist.ReduceOp.AVG)),
        (ValueError, f"expected output of {size} x 4", lambda: dist.all_gather_into_tensor(torch.ones(5), plain)),
        (ValueError, f"expected input of {size} x 4", lambda: dist.reduce_scatter_tensor(plain, torch.ones(5))),
        (ValueError, f"each of {size} ranks", lambda: dist.all_gather([plain], plain)),
        (ValueError, "expected 3 values of input", lambda: dist.all_gather([torch.ones(3)] * size, plain)),
        (ValueError, "contiguous", lambda: dist.send(torch.ones(4, 2)[:, 0], (dist.get_rank() + 1) % size)),
        (TypeError, "expected CPU or CUDA", lambda: dist.all_reduce(torch.ones(3, device="meta"))),
        (hp.CommunicationError, "all_reduce of int16", lambda: dist.all_reduce(plain.short())),
    ):
        try:
            call()
        except error as raised:
            assert text in str(raised), raised  # noqa: PT017
        else:
            raise AssertionError(f"nothing raised: {text}")
    dist.all_reduce(plain)
    assert plain.tolist() == [size] * 4, "a mistake that was refused leaves the group as it is"
