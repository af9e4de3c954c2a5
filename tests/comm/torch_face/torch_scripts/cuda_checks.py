"""CUDA tensors on "hybridpar": what they give is what CPU tensors give on the same group."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.comm.torch_face.torch_scripts.collective_checks import values

_CUDA = torch.device("cuda")


def _same(call: object, *inputs: Tensor) -> None:
    assert callable(call)
    on_cpu, on_cuda = [t.clone() for t in inputs], [t.to(_CUDA) for t in inputs]
    call(on_cpu)
    call(on_cuda)
    for one, other in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(one, other.cpu())


def collectives_and_ddp() -> str:
    """For NCCL and for gloo."""
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.float16, torch.int64):
        _same(lambda t: dist.all_reduce(t[0]), values(1000, dtype))
        _same(lambda t: dist.all_reduce(t[0], async_op=True).wait(), values(1000, dtype))
        _same(lambda t: dist.broadcast(t[0], size - 1), values(1000, dtype))
        _same(lambda t: dist.all_gather(t[1:], t[0]), values(10, dtype), *[torch.zeros(10, dtype=dtype)] * size)
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)).double()
    inputs = torch.randn(8, 20, dtype=torch.float64)
    models = DistributedDataParallel(plain), DistributedDataParallel(copy.deepcopy(plain).to(_CUDA))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs.to(next(model.parameters()).device)).square().mean().backward()
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other.cpu())
    return "held"


def what_only_nccl_does() -> str:
    """On one rank: no GPU is shared."""
    _same(lambda t: dist.all_gather_into_tensor(t[1], t[0]), values(10, torch.float32), torch.zeros(10))
    _same(lambda t: dist.reduce_scatter_tensor(t[1], t[0]), values(10, torch.float32), torch.zeros(10))
    _same(lambda t: dist.all_to_all_single(t[1], t[0]), values(10, torch.float32), torch.zeros(10))
    first, second = torch.ones(3, device=_CUDA), torch.ones(4, device=_CUDA)
    with dist._coalescing_manager(device=_CUDA):
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first.tolist() == [1.0] * 3
    model = fully_shard(nn.Linear(6, 4, device=_CUDA), mesh=init_device_mesh("cuda", (1,)))
    model(torch.ones(2, 6, device=_CUDA)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 6] * 4
    return collectives_and_ddp()
