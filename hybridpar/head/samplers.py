"""Samplers: which classes take part in a training step, where not all of them do.

The classes of the batch always do. Of the others each rank draws a part of its own, in a stream of its own that depends
on (seed, step, rank) alone: a draw can be repeated.

# Note [logit correction]
Where m of N negatives are drawn, each of them stands for N / m. Adding log(N / m) to their logits makes the sum of
exponentials an unbiased estimate of that over all classes (Bengio and Senecal 2008); without it the loss is that of a
smaller problem, as in PartialFC (An et al. 2022). Classes of the batch stand for themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar import kernels


class Drawn(NamedTuple):
    """What takes part on one rank.

    Attributes:
        rows: int64 [m] on the CPU, ascending.
        shifts: float64 [m], what is added to the logit of each row where it is a negative; None for nothing.
    """

    rows: Tensor
    shifts: Tensor | None


@dataclass(frozen=True)
class Sampler(ABC):
    """Base of all.

    Attributes:
        correct_logits: Note [logit correction].
        seed: of the draws.
    """

    correct_logits: bool = True
    seed: int = 0

    @abstractmethod
    def draw(self, positives: Tensor, rows: int, classes: int, step: int, rank: int) -> Drawn:
        """What takes part on one rank in one step.

        Args:
            positives: int64 on the CPU, ascending, without repetition: rows of the batch's classes. All take part.
            rows: how many the rank has.
            classes: how many all ranks have.
            step: number of the draw.
            rank: of the head's group.
        """


@dataclass(frozen=True, kw_only=True)
class UniformSampler(Sampler):
    """Every negative equally likely, without replacement, in time of the order of what is drawn.

    Args:
        rate: share of each rank's rows that take part, in (0, 1]; those of the batch's classes count as drawn.
        count: the same as a number of classes over all ranks. Give one of the two.
    """

    rate: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.count is None):
            raise ValueError(f"UniformSampler: expected rate or count, got rate={self.rate} and count={self.count}")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"UniformSampler.rate: expected a share in (0, 1], got {self.rate}")
        if self.count is not None and self.count < 1:
            raise ValueError(f"UniformSampler.count: expected at least 1 class, got {self.count}")

    def draw(self, positives: Tensor, rows: int, classes: int, step: int, rank: int) -> Drawn:
        share = self.rate if self.rate is not None else min(1.0, (self.count or 0) / classes)
        negatives = rows - len(positives)
        drawn = min(negatives, max(0, math.ceil(share * rows) - len(positives)))
        seed = stream(self.seed, step, rank)
        active = kernels.draw_with(positives, rows, drawn, seed)
        if not self.correct_logits or not 0 < drawn < negatives:
            return Drawn(active, None)
        shifts = torch.full((len(active),), math.log(negatives / drawn), dtype=torch.float64)
        shifts[torch.searchsorted(active, positives)] = 0.0
        return Drawn(active, shifts)


def stream(seed: int, step: int, rank: int) -> int:
    """A seed of 64 bits for one rank in one step."""
    state = seed
    for number in (step, rank):
        state = (state + 0x9E37_79B9_7F4A_7C15) * 0xBF58_476D_1CE4_E5B9 + number & (1 << 64) - 1
        state ^= state >> 31
    return state
