"""Lanes over CUDA tensors: gloo with two ranks on one device, NCCL with one rank; training on two ranks."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.lanes.lane import Lane, Op
from tests.comm.lanes.lane_contract import CHECKS, Check, LaneContract
from tests.gpu.device import DEVICE, busy
from tests.gpu.ranks import group_on_one_device, run_on_one_device
from tests.ranks import free_port

pytestmark = pytest.mark.gpu


class OnDevice(Lane):
    """A lane whose tensors are copied to the device and back, so that it can be tried with CPU tensors."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.rank, self.size, self.ranks = lane.rank, lane.size, lane.ranks

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        there = tensor.to(DEVICE)
        self._lane.all_reduce(there, op)
        tensor.copy_(there)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        there = [torch.empty_like(output, device=DEVICE) for output in outputs]
        self._lane.all_gather(there, tensor.to(DEVICE))
        for output, value in zip(outputs, there, strict=True):
            output.copy_(value)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        there = torch.empty_like(output, device=DEVICE)
        self._lane.reduce_scatter(there, [part.to(DEVICE) for part in inputs])
        output.copy_(there)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        there = [torch.empty_like(output, device=DEVICE) for output in outputs]
        self._lane.all_to_all(there, [part.to(DEVICE) for part in inputs])
        for output, value in zip(outputs, there, strict=True):
            output.copy_(value)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        there = tensor.to(DEVICE)
        self._lane.broadcast(there, root)
        tensor.copy_(there)

    def barrier(self) -> None:
        self._lane.barrier()

    def split(self, members: Sequence[int]) -> Lane:
        return OnDevice(self._lane.split(members))

    def close(self) -> None:
        self._lane.close()

    def abort(self, why: str = "") -> None:
        self._lane.abort(why)


def _verdicts(group: hp.Group) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for check in CHECKS:
        lane = OnDevice(group.new_lane())
        try:
            check(lane)
            found[check.__name__] = None
        except Exception:
            found[check.__name__] = traceback.format_exc()
    return found


@functools.cache
def _gloo_verdicts(size: int) -> list[dict[str, str | None]]:
    return run_on_one_device(size, _verdicts)


class TestGlooLane(LaneContract):
    sizes = (2,)

    def verdict(self, check: Check, size: int) -> str | None:
        return next((found[check.__name__] for found in _gloo_verdicts(size) if found[check.__name__]), None)


@functools.cache
def _nccl_verdicts() -> dict[str, str | None]:
    return _verdicts_of_nccl(group_on_one_device(0, 1, free_port(), nccl=True))


def _verdicts_of_nccl(group: hp.Group) -> dict[str, str | None]:
    lane = group._origin.parent  # type: ignore[union-attr]
    assert lane._nccl is not None  # type: ignore[attr-defined]
    group.new_lane = lambda *_: lane.clone()  # type: ignore[method-assign]
    return _verdicts(group)


class TestNcclLane(LaneContract):
    sizes = (1,)

    def verdict(self, check: Check, size: int) -> str | None:
        return _nccl_verdicts()[check.__name__]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).double()


def batch(step: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 64, dtype=torch.float64, generator=generator)
    targets = torch.randn(32, 8, dtype=torch.float64, generator=generator)
    return inputs[begin:end].to(DEVICE), targets[begin:end].to(DEVICE)


def trained(network: nn.Module, begin: int, end: int) -> list[list[float]]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        inputs, targets = batch(step, begin, end)
        loss = (network(inputs) - targets).square().sum() / 32
        loss.backward()
        busy(1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [parameter.flatten().tolist() for parameter in network.parameters()]


def _train_in_parallel(group: hp.Group) -> list[list[float]]:
    parallel = hp.DataParallel(model().to(DEVICE), group=group, bucket_bytes=1 << 17)
    return trained(parallel, 16 * group.rank, 16 * group.rank + 16)


def test_two_ranks_train_as_one_does() -> None:
    expected = trained(model().to(DEVICE), 0, 32)
    for parameters in run_on_one_device(2, _train_in_parallel):
        for got, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-10, atol=1e-12)


def _normalized(group: hp.Group) -> list[list[float]]:
    layer = hp.SyncBatchNorm(5, group=group).double().to(DEVICE)
    inputs = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mine = (inputs[:3] if group.rank == 0 else inputs[3:]).requires_grad_()
    layer(mine).pow(3).sum().backward()
    assert mine.grad is not None
    return mine.grad.tolist()


def test_batch_normalisation_of_uneven_batches_is_that_of_the_whole() -> None:
    inputs = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    nn.BatchNorm1d(5).double()(inputs).pow(3).sum().backward()
    assert inputs.grad is not None
    first, second = run_on_one_device(2, _normalized)
    torch.testing.assert_close(torch.tensor(first + second, dtype=torch.float64), inputs.grad, rtol=1e-9, atol=1e-11)
