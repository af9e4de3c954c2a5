"""A partition rule without any structure, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomRule:
    """Every class on a random rank; the first classes of a random order see to it that no rank stays empty."""

    seed: int

    def __call__(self, num_classes: int, num_ranks: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        owners = torch.randint(num_ranks, (num_classes,), generator=draw)
        owners[torch.randperm(num_classes, generator=draw)[:num_ranks]] = torch.arange(num_ranks)
        return owners
