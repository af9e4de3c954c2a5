"""A small model, and what one process makes of it on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hybridpar.horovod as hvd

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
STEPS = 5


def model(seed: int = 0) -> nn.Sequential:
    """The same on every rank, in float64, where rounding does not add up."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    """One rank's, for every step."""
    drawn = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(rows, 4, generator=drawn, dtype=torch.float64) for _ in range(STEPS)]
    return [(one, torch.randint(0, 3, (rows,), generator=drawn)) for one in inputs]


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the batch."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def whole(step: int, ranks: Sequence[int] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """The batch of all ranks, of equal parts."""
    pairs = [batches(rank)[step] for rank in ranks]
    return torch.cat([one for one, _ in pairs]), torch.cat([labels for _, labels in pairs])


def alone(make: Make, change: Callable[[nn.Module], None] = lambda net: None) -> nn.Module:
    """Trained by one process on the whole batches."""
    net = model()
    optimizer = make(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, whole(step)).backward()
        change(net)
        optimizer.step()
    return net


def same(net: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Parameters are equal to rounding, and the same bits on all ranks."""
    for (name, one), other in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
        everyone = hvd.allgather(one.detach().flatten()[None])
        assert all(torch.equal(theirs, everyone[0]) for theirs in everyone), name


def train(net: nn.Module, optimizer: Any, own_step: Callable[[Tensor], None] | None = None) -> None:
    """A script's loop, on this rank's batches."""
    for batch in batches(hvd.rank()):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        if own_step is not None:
            own_step(loss)
            continue
        loss.backward()
        optimizer.step()
