"""Checks of equal beginnings, and of state that is saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar.horovod as hvd
from tests.comm.horovod.scripts.whole_batch import KINDS, Make, batches, loss_of, model, train, whole


def parameters_begin_the_same() -> None:
    for form in ("state_dict", "named", "list"):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        torch.manual_seed(hvd.rank())
        for tensor in net.state_dict().values():
            tensor.copy_(torch.randint(0, 100, tensor.shape))
        given: Any = {"state_dict": net.state_dict(), "named": net.named_parameters(), "list": list(net.parameters())}[
            form
        ]
        hvd.broadcast_parameters(given, root_rank=1)
        torch.manual_seed(1)
        for name, tensor in net.state_dict().items():
            expected = torch.randint(0, 100, tensor.shape)
            if form == "state_dict" or name in dict(net.named_parameters()):
                assert torch.equal(tensor, expected.to(tensor.dtype)), (form, name)


def optimizer_state_is_the_roots() -> None:
    for name, make in {**KINDS, "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)}.items():

        def stepped(steps: int, make: Make = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            net = model()
            optimizer = make(net.parameters())
            optimizer.param_groups[0]["lr"] = 0.01 * (steps + 1)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, batches(1)[0])
                loss.backward()
                return loss

            for _ in range(steps):
                optimizer.step(closure)
            return net, optimizer

        # Rank 1 has state of two steps, rank 0 of one, rank 2 has none.
        net, given = stepped([1, 2, 0][hvd.rank()])
        optimizer = hvd.DistributedOptimizer(given, net.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        _equal(optimizer.state_dict(), stepped(2)[1].state_dict(), name)
        assert optimizer.param_groups is given.param_groups and optimizer.state is given.state
    empty = torch.optim.Adam(model().parameters())
    if hvd.rank() == 2:
        for parameter in empty.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        empty.step()
    hvd.broadcast_optimizer_state(empty, root_rank=0)
    assert not empty.state_dict()["state"]
    with pytest.raises(
        ValueError, match=r"expected parameter groups of \[2\] parameters as on rank 0, got \[1\] on rank 2"
    ):
        hvd.broadcast_optimizer_state(
            torch.optim.SGD([torch.ones(1) for _ in range(1 if hvd.rank() == 2 else 2)]), root_rank=0
        )


def _equal(one: Any, other: Any, place: str) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, msg=lambda text: f"{place}: {text}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            _equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            _equal(mine, theirs, f"{place}.{number}")
    else:
        assert one == other, place


def state_is_kept_and_loaded() -> None:
    net = model()
    given = torch.optim.Adam(net.parameters(), lr=0.01)
    loss_of(net, whole(0)).backward()
    given.step()
    optimizer = hvd.DistributedOptimizer(given, net.named_parameters())
    assert optimizer.state is given.state and len(optimizer.state) == 4
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer)
    loss_of(net, batches(0)[0]).backward()
    optimizer.load_state_dict(saved)
    _equal(optimizer.state_dict(), saved, "loaded")
    optimizer.zero_grad()  # what backward had begun is forgotten
    train(net, optimizer)


def batch_norm_sees_the_batches_of_all_ranks() -> None:
    data = [
        torch.randn(2 + 3 * rank, 4, 5, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3)
    ]
    layer, plain = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    mine, everything = data[hvd.rank()].requires_grad_(), torch.cat([one.detach() for one in data]).requires_grad_()
    for _ in range(2):
        result, expected = layer(mine), plain(everything)
    start = sum(len(one) for one in data[: hvd.rank()])
    torch.testing.assert_close(result, expected[start : start + len(mine)])
    torch.testing.assert_close(layer.running_var, plain.running_var)
    result.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None and everything.grad is not None
    torch.testing.assert_close(mine.grad, everything.grad[start : start + len(mine)], atol=1e-6, rtol=1e-5)
    converted = hvd.SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm2d(2)), layer.group)
    assert isinstance(converted[0], hvd.SyncBatchNorm)  # type: ignore[index]
