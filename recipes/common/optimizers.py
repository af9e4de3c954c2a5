"""Optimizers of a run that goes on from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch.optim import Optimizer


@contextlib.contextmanager
def options_kept(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Loading a checkpoint inside does not change the optimizers' options, such as their weight decay.

    What the command line says of an optimizer counts, not what it said when the checkpoint was written. How many steps
    the optimizer of rows has made is no option.
    """
    no_options = ("params", "steps")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    options = [{name: value for name, value in group.items() if name not in no_options} for group in groups]
    yield
    for group, mine in zip(groups, options, strict=True):
        group.update(mine)


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    """Give it to all their parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
