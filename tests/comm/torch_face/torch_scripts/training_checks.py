"""torch's own wrappers, unmodified, on "hybridpar": they train as they do on gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """Some layers, perhaps with buffers, and a branch that not every rank takes."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(33) if norm else nn.Tanh()
        self.body = nn.Sequential(nn.Linear(12, 33), middle, nn.ReLU(), nn.Linear(33, 16))
        self.even, self.odd = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        features = self.body(inputs)
        return (self.even if branch else self.odd)(features)


def train(model: nn.Module, *, branches: bool = False, steps: int = 3, optimizer: Any = None) -> None:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs = torch.randn(6, 12, generator=generator)
        branch = (step + dist.get_rank()) % 2 == 0 if branches else True
        optimizer.zero_grad()
        model(inputs, branch).square().mean().backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, first), second in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        first, second = (t.full_tensor() if isinstance(t, DTensor) else t for t in (first, second))
        assert torch.equal(first, second), name


def ddp_trains_as_on_gloo(gloo: dist.ProcessGroup) -> None:
    """Bit for bit: two ranks have one order of summation."""
    for options in (
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    ):
        ours = DistributedDataParallel(Network(), **options)
        theirs = DistributedDataParallel(Network(), process_group=gloo, **options)
        for model in (ours, theirs):
            train(model, branches=True)
        assert_same(ours, theirs)
        with ours.no_sync():
            train(ours, branches=True, steps=1)


def ddp_takes_uneven_inputs_and_sparse_gradients(gloo: dist.ProcessGroup) -> None:
    trained = []
    for group in (None, gloo):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        with model.join():
            for _ in range(2 + dist.get_rank()):
                model(torch.ones(4, 3) * (dist.get_rank() + 1)).sum().backward()
        table = DistributedDataParallel(nn.Embedding(9, 4, sparse=True), process_group=group)
        table(torch.tensor([dist.get_rank(), 5])).sum().backward()
        trained.append([*(p.grad for p in model.parameters()), table.module.weight.grad.to_dense()])
    for ours, theirs in zip(*trained, strict=True):
        assert torch.equal(ours, theirs)


def ddp_hooks_of_torch_work(gloo: dist.ProcessGroup) -> None:
    """PowerSGD sends from its callbacks, which gloo's threads do in any order, so it is compared with no hook at all:
    with matrices of full rank it leaves nothing out."""
    plain = DistributedDataParallel(Network(), process_group=gloo, find_unused_parameters=True)
    train(plain, steps=5)
    whole = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=0
    )
    hooks: list[tuple[Any, Callable[[Any, Any], Any], float]] = [
        (None, default_hooks.allreduce_hook, 0),
        (None, default_hooks.fp16_compress_hook, 1e-3),
        (whole, powerSGD_hook.powerSGD_hook, 1e-4),
    ]
    for state, hook, tolerance in hooks:
        model = DistributedDataParallel(Network(), find_unused_parameters=True, bucket_cap_mb=0.001)
        model.register_comm_hook(state, hook)
        train(model, steps=5)
        for first, second in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(first, second, atol=tolerance, rtol=tolerance, msg=hook.__name__)
    assert whole.total_numel_before_compression > 0


def zero_redundancy_optimizer_trains_as_on_gloo(gloo: dist.ProcessGroup) -> None:
    models = []
    for group in (None, gloo):
        model = DistributedDataParallel(Network(), process_group=group, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group or dist.group.WORLD, lr=0.1, momentum=0.9
        )
        train(model, optimizer=optimizer)
        optimizer.consolidate_state_dict()
        models.append(model)
    assert_same(*models)


def fsdp2_trains_as_on_gloo(gloo: dist.ProcessGroup) -> None:
    meshes = init_device_mesh("cpu", (dist.get_world_size(),)), DeviceMesh.from_group(gloo, "cpu")
    assert dist.get_backend(meshes[0].get_group()) == "hybridpar"
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), half):
        models = []
        for mesh in meshes:
            model = Network(norm=False)
            for layer in (model.body[0], model.body[3]):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
            models.append(model)
        assert_same(*models)


def fsdp2_trains_as_one_process(gloo: dist.ProcessGroup) -> None:
    """Equal batches on all ranks, no batch statistics of its own: the mean over ranks is the gradient itself."""
    plain = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
    torch.manual_seed(2)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    sharded = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    inputs = torch.randn(8, 7)
    for model, batch in ((plain, inputs), (sharded, inputs.chunk(dist.get_world_size())[dist.get_rank()])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one)


def dtensors_are_redistributed(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    mesh, reference = init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")
    placements: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), Partial("avg")]
    for rows, columns in ((4, 6), (5, 3), (1, 1)):
        torch.manual_seed(3)
        whole = torch.randint(-5, 5, (rows, columns)).float()
        for source in placements:
            for target in (Replicate(), Shard(0), Shard(1)):
                if isinstance(source, Partial):
                    local = whole * (dist.get_rank() + 1)
                    ours, theirs = (DTensor.from_local(local, m, [source]) for m in (mesh, reference))
                else:
                    ours, theirs = (distribute_tensor(whole, m, [source]) for m in (mesh, reference))
                one, other = ours.redistribute(mesh, [target]), theirs.redistribute(reference, [target])
                assert torch.equal(one.to_local(), other.to_local()), (source, target, rows, columns)
                assert torch.equal(one.full_tensor(), other.full_tensor())


def dtensor_products_and_their_gradients_are_right(gloo: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(4)
    left, right = torch.randn(6, 10), torch.randn(10, 4)
    for placement, other in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        one = distribute_tensor(left, mesh, [placement]).requires_grad_()
        two = distribute_tensor(right, mesh, [other]).requires_grad_()
        (one @ two).square().sum().backward()
        plain = left.clone().requires_grad_(), right.clone().requires_grad_()
        (plain[0] @ plain[1]).square().sum().backward()
        for sharded, whole in ((one, plain[0]), (two, plain[1])):
            assert isinstance(sharded.grad, DTensor)
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def tensor_parallel_layers_equal_whole_ones(gloo: dist.ProcessGroup) -> None:
    torch.manual_seed(6)
    plain = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(5, 8)
    torch.testing.assert_close(parallel(inputs), plain(inputs))
    parallel(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
