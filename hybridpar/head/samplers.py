"""Samplers: which classes take part in a training step, where not all of them do.

The classes of the batch always do. Of the others each rank draws a part of its own, in a stream of its own that depends
on (seed, step, rank) alone: a draw can be repeated.

# Note [logit correction]
Where m of N negatives are drawn, each of them stands for N / m. Adding log(N / m) to their logits makes the sum of
exponentials an unbiased estimate of that over all classes (Bengio and Senecal 2008); without it the loss is that of a
smaller problem, as in PartialFC (An et al. 2022). Classes that are certain to take part stand for themselves: those of
the batch, and near ones. N then counts the others only, so the estimate is unbiased where each rank draws one of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.head.class_graph import SEARCHES, GraphPolicy


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

    @property
    def graph(self) -> GraphPolicy | None:
        """The class graph that the head is to keep for its draws; None for none."""
        return None

    @abstractmethod
    def draw(
        self, positives: Tensor, rows: int, classes: int, step: int, rank: int, near: Tensor | None = None
    ) -> Drawn:
        """What takes part on one rank in one step.

        Args:
            positives: int64 on the CPU, ascending, without repetition: rows of the batch's classes. All take part.
            rows: how many the rank has.
            classes: how many all ranks have.
            step: number of the draw.
            rank: of the head's group.
            near: int64 on the CPU, without repetition, the nearest first: rows of neighbours of the batch's classes,
                among which may be such classes; None without a graph.
        """


@dataclass(frozen=True, kw_only=True)
class _Quota(Sampler):
    """A number of classes each step.

    Args:
        rate: share of each rank's rows that take part, in (0, 1]; those of the batch's classes count as drawn.
        count: the same as a number of classes over all ranks. Give one of the two.
    """

    rate: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if (self.rate is None) == (self.count is None):
            raise ValueError(f"{name}: expected rate or count, got rate={self.rate} and count={self.count}")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"{name}.rate: expected a share in (0, 1], got {self.rate}")
        if self.count is not None and self.count < 1:
            raise ValueError(f"{name}.count: expected at least 1 class, got {self.count}")

    def _negatives(self, positives: Tensor, rows: int, classes: int) -> int:
        """How many rows take part beside those of the batch's classes."""
        share = self.rate if self.rate is not None else min(1.0, (self.count or 0) / classes)
        return min(rows - len(positives), max(0, math.ceil(share * rows) - len(positives)))

    def _with_others(self, certain: Tensor, count: int, rows: int, step: int, rank: int) -> Drawn:
        """``certain`` rows (ascending) and ``count`` of the others, each equally likely, without replacement."""
        others = rows - len(certain)
        active = kernels.draw_with(certain, rows, count, stream(self.seed, step, rank))
        if not self.correct_logits or not 0 < count < others:
            return Drawn(active, None)
        shifts = torch.full((len(active),), math.log(others / count), dtype=torch.float64)
        shifts[torch.searchsorted(active, certain)] = 0.0
        return Drawn(active, shifts)


@dataclass(frozen=True, kw_only=True)
class UniformSampler(_Quota):
    """Every negative equally likely, without replacement, in time of the order of what is drawn.

    Args:
        rate: share of each rank's rows that take part, in (0, 1]; those of the batch's classes count as drawn.
        count: the same as a number of classes over all ranks. Give one of the two.
    """

    def draw(
        self, positives: Tensor, rows: int, classes: int, step: int, rank: int, near: Tensor | None = None
    ) -> Drawn:
        return self._with_others(positives, self._negatives(positives, rows, classes), rows, step, rank)


@dataclass(frozen=True, kw_only=True)
class HardSampler(_Quota):
    """The negatives that are hardest to tell from the batch's classes, and uniform ones beside them.

    The head keeps the ``neighbors`` nearest classes of each class, by the cosine of their rows (KNN softmax, Song et
    al. 2020): 4 bytes a neighbour. Neighbours of the batch's classes take part, the nearest first, up to a share of the
    quota of each rank; what they leave of it is drawn uniformly from all the others. With ``correct_logits`` the
    uniform ones stand for all that is not there, and the sum of exponentials is an unbiased estimate of that over all
    classes: Note [logit correction].

    The graph is built in the first step, and anew after ``every`` steps. Until then it stays as it is, while rows move
    on. It is part of ``state_dict`` and of checkpoints, so that a run that goes on draws what it would have drawn; from
    a checkpoint that has none, or another number of neighbours, it is built in the next step. Building takes as many
    products as K / B forward passes of a head without sampler (K classes, B samples a step), which the ranks share, and
    for the time 4 bytes more a neighbour. For very many classes choose ``every`` accordingly, or ``search="faiss"``.

    Args:
        rate: share of each rank's rows that take part, in (0, 1]; those of the batch's classes count as drawn.
        count: the same as a number of classes over all ranks. Give one of the two.
        neighbors: k, of each class; all others where there are fewer. At least 1.
        every: steps after which the graph is built anew, at least 1.
        uniform: least share of a step's negatives that is drawn uniformly, in [0, 1). With 0 there may be none, and
            classes that no draw can reach are then missing from the loss.
        search: ``"exact"``, or ``"faiss"``: inverted lists, which look at a part of the classes only and may miss
            neighbours, for graphs that would take too long. Needs ``pip install 'hybridpar[faiss]'``, computes in
            32 bits on the CPU, and takes 384 bytes a row and some hundred MB on each rank while it builds.
    """

    neighbors: int = 32
    every: int = 1000
    uniform: float = 0.5
    search: Literal["exact", "faiss"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("neighbors", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"HardSampler.{name}: expected a whole number of at least 1, got {value!r}")
        if not 0 <= self.uniform < 1:
            raise ValueError(
                f"HardSampler.uniform: expected a share in [0, 1), got {self.uniform}; use UniformSampler for 1"
            )
        if self.search not in SEARCHES:
            raise ValueError(f"HardSampler.search: expected 'exact' or 'faiss', got {self.search!r}")

    @property
    def graph(self) -> GraphPolicy:
        return GraphPolicy(self.neighbors, self.every, self.search)

    def draw(
        self, positives: Tensor, rows: int, classes: int, step: int, rank: int, near: Tensor | None = None
    ) -> Drawn:
        if near is None:
            raise ValueError("HardSampler.draw: expected near, the rows that the head's class graph names, got None")
        negatives = self._negatives(positives, rows, classes)
        near = near[~torch.isin(near, positives)]
        hard = near[: negatives - math.ceil(self.uniform * negatives)]
        certain = torch.cat([positives, hard]).sort().values
        return self._with_others(certain, negatives - len(hard), rows, step, rank)


def stream(seed: int, step: int, rank: int) -> int:
    """A seed of 64 bits for one rank in one step."""
    state = seed
    for number in (step, rank):
        state = (state + 0x9E37_79B9_7F4A_7C15) * 0xBF58_476D_1CE4_E5B9 + number & (1 << 64) - 1
        state ^= state >> 31
    return state
