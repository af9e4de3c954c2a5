"""Checks of which gradients DistributedOptimizer takes, and when it may write into them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
import hybridpar.horovod as hvd
from tests.comm.horovod.scripts.whole_batch import KINDS, alone, model, same, train


def unused_parameters_count_as_zeros() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = (nn.Parameter(torch.ones(3)) for _ in range(3))

    net = Two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss = net.used.sum() + (net.sometimes.sum() if hvd.rank() == 1 else 0)
        loss.backward()
        optimizer.step()
    assert net.used.tolist() == [-3.0] * 3 and net.never.tolist() == [1.0] * 3
    torch.testing.assert_close(net.sometimes.detach(), torch.full((3,), 1 - 4 / 3))


class _Late(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.2)
        return grads[0] * 2


def gradients_that_share_memory_with_a_running_backward_are_right() -> None:
    """The sum has the same gradient on both sides, as views of one memory; one side's is done long before the other."""
    count, mine = 10_000, float(hvd.rank() + 1)
    early, late = (nn.Parameter(torch.zeros(count, dtype=torch.float64)) for _ in range(2))
    names = [("early", early), ("late", late)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([early, late], lr=1.0), names)
    for _ in range(4):
        optimizer.zero_grad()
        slow = _Late.apply(late * mine).view(1, count)  # type: ignore[no-untyped-call]
        total = slow + early.view(1, count)  # made last, so its gradient comes first
        (total * torch.full((1, count), mine, dtype=torch.float64)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(early.detach(), torch.full_like(early, -4 * (1 + 2 + 3) / 3))
    torch.testing.assert_close(late.detach(), torch.full_like(late, -4 * 2 * (1 + 4 + 9) / 3))


def gradients_that_share_memory_with_each_other_are_right() -> None:
    count = 10_000
    one, other = (nn.Parameter(torch.zeros(count)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one, other], lr=1.0), [("one", one), ("other", other)], op=hvd.Sum
    )
    for _ in range(4):
        optimizer.zero_grad()
        ((one.unsqueeze(0) + other.unsqueeze(0)) * torch.full((1, count), 2.0)).sum().backward()
        assert one.grad is not None and other.grad is not None
        assert one.grad.data_ptr() == other.grad.data_ptr()
        optimizer.step()
    assert torch.equal(one.detach(), torch.full((count,), -24.0)) and torch.equal(one, other)


def parameters_that_come_later_are_reduced() -> None:
    """Those that were frozen, and those of a group that is added; with and without names for them."""
    for named in (True, False):
        layers = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        layers[1].requires_grad_(False)
        names = [(str(i), layer) for i, layer in enumerate(layers)] if named else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers[:2], lr=1.0), names)
        for step in range(6):
            if step == 2:
                layers[1].requires_grad_()
                optimizer.add_param_group({"params": [layers[2]]})
            optimizer.zero_grad()
            sum(hvd.rank() * layer.sum() for layer in layers).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert [layer.tolist() for layer in layers] == [[-6.0] * 3, [-4.0] * 3, [-4.0] * 3]


def compressors_of_ones_own_are_served() -> None:
    """Also one that has no hash, and one that sends a view of what it is given."""

    class Flat:
        __hash__ = None  # type: ignore[assignment]

        def compress(self, tensor: Tensor) -> tuple[Tensor, torch.Size]:
            return tensor.view(-1), tensor.shape

        def decompress(self, tensor: Tensor, ctx: torch.Size) -> Tensor:
            return tensor.view(ctx)

    net = model()
    optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()), net.named_parameters(), compression=Flat())
    train(net, optimizer)
    same(net, alone(KINDS["SGD"]))


def gradients_may_have_another_dtype_than_their_parameters() -> None:
    layers = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    layers[1].grad_dtype = torch.float64
    names = [(f"other dtype {i}", layer) for i, layer in enumerate(layers)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=1.0), names)
    for layer in layers:
        grad_dtype = torch.float64 if layer is layers[1] else torch.float32
        layer.grad = torch.full((3,), float(hvd.rank()), dtype=grad_dtype)
    optimizer.synchronize()
    assert [layer.grad.tolist() for layer in layers if layer.grad is not None] == [[1.0] * 3] * 3


def all_is_waited_for_before_a_failure_is_raised() -> None:
    """One gradient differs between the ranks, the others come late on one of them; the names are free afterwards."""
    sizes = [9000 + hvd.rank() // 2, 9000, 9000]
    layers = [nn.Parameter(torch.zeros(size)) for size in sizes]
    names = [(f"waited {i}", layer) for i, layer in enumerate(layers)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=1.0), names)
    layers[0].sum().backward()
    if hvd.rank() == 1:
        time.sleep(0.5)
    with pytest.raises(hp.CommunicationError, match="waited 0"):
        optimizer.step()
    for name, _ in names[1:]:
        assert hvd.allreduce_(torch.ones(9000), name=name, op=hvd.Sum)[0].item() == 3


def sparse_gradients_are_reduced_sparse_or_dense() -> None:
    rows = [[0, 1, 1], [1, 5], [2, 3, 4, 5]][hvd.rank()]
    expected = torch.zeros(6, 2, dtype=torch.float64)
    for theirs in ([0, 1, 1], [1, 5], [2, 3, 4, 5]):
        for row in theirs:
            expected[row] -= 4.0 / 3
    for options in ({}, {"sparse_as_dense": True}):
        table = nn.Embedding(6, 2, sparse=True).double()
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), **options
        )
        for _ in range(4):
            optimizer.zero_grad()
            table(torch.tensor(rows)).sum().backward()
            optimizer.step()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
        torch.testing.assert_close(table.weight.detach(), expected)
