"""Coverage: which part of the classes a sampler has reached, and how often."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm.group import Group


@dataclass(frozen=True)
class Coverage:
    """What has been drawn of all classes, by all ranks.

    Attributes:
        draws: how many draws are counted.
        positive: share of classes that were in a batch at least once, in [0, 1].
        negative: share of classes that were drawn as a negative at least once, in [0, 1].
        least, most, mean: how often a class was drawn as a negative.
    """

    draws: int
    positive: float
    negative: float
    least: int
    most: int
    mean: float


class DrawnSoFar:
    """Counts of one rank's rows: 4 bytes each.

    Args:
        rows: how many there are.
    """

    def __init__(self, rows: int) -> None:
        self.draws = 0
        # Twice the number of draws as a negative, plus 1 where the class was in a batch.
        self._counts = torch.zeros(rows, dtype=torch.int32)

    def add(self, positives: Tensor, drawn: Tensor) -> None:
        """One draw: rows, int64 on the CPU, none twice; all of ``positives`` are among ``drawn``."""
        as_positives = self._counts[positives] | 1
        self._counts[drawn] += 2
        self._counts[positives] = as_positives
        self.draws += 1

    @property
    def positive(self) -> Tensor:
        """Whether the class of each row was in a batch, bool [n]."""
        return (self._counts & 1).bool()

    @property
    def as_negative(self) -> Tensor:
        """How often each row was drawn as a negative, int32 [n]."""
        return self._counts >> 1


def coverage(group: Group, mine: DrawnSoFar) -> Coverage:
    """Collective: the same on every rank."""
    times = mine.as_negative
    local = {
        "rows": len(times),
        "positive": int(mine.positive.sum()),
        "negative": int(torch.count_nonzero(times)),
        "least": int(times.min()) if len(times) else None,
        "most": int(times.max()) if len(times) else None,
        "sum": int(times.sum(dtype=torch.int64)),
    }
    everyone = group.all_gather_json(local)
    classes = sum(rank["rows"] for rank in everyone)
    with_rows = [rank for rank in everyone if rank["rows"]]
    return Coverage(
        draws=mine.draws,
        positive=sum(rank["positive"] for rank in everyone) / classes,
        negative=sum(rank["negative"] for rank in everyone) / classes,
        least=min(rank["least"] for rank in with_rows),
        most=max(rank["most"] for rank in with_rows),
        mean=sum(rank["sum"] for rank in everyone) / classes,
    )
