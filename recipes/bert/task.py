"""What a run learns: where samples come from, what the encoder makes of them, and how well it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

import hybridpar as hp
from recipes.bert.learner import Batch
from recipes.bert.model import Encoder, Rows

Int64Array = npt.NDArray[np.int64]

Judge: TypeAlias = Callable[[Batch], tuple[float, Tensor]]
"""This rank's part of a batch to the mean loss of the global one, and the best class of each feature. Collective."""


class Start(NamedTuple):
    """What training starts from: an encoder, and the rows of all classes where there are some already."""

    encoder: Encoder
    rows: Rows | None


class Task(ABC):
    """Samples and classes of a run, the same on every rank. No method but ``evaluate`` communicates.

    Attributes:
        num_samples: of the training set.
        num_classes: of the head.
        labels: names of the classes, where they have some.
        baselines: what is reached without a model, by name: values under the names that ``evaluate`` gives.
        summary: of the data, for people.
    """

    num_samples: int
    num_classes: int
    labels: Mapping[int, str] | None
    baselines: Mapping[str, Mapping[str, float]]
    summary: str

    @abstractmethod
    def start(self) -> Start:
        """Collective only in that every rank does the same, after the same seed."""

    @abstractmethod
    def batch(self, samples: Int64Array, epochs: Int64Array) -> Batch:
        """Training samples as a batch; the same sample differs from epoch to epoch where there is chance in it."""

    @abstractmethod
    def evaluate(self, judge: Judge, group: hp.Group, micro_batch: int) -> dict[str, float]:
        """Judge on what is held out, ``micro_batch`` samples at a time over all ranks. Collective."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What must be the same where a run goes on."""


def spread(total: int, most: int) -> Int64Array:
    """``most`` of ``total`` numbers from 0 on, or all of them, at even distances: files may be sorted."""
    count = min(total, most)
    return np.arange(count, dtype=np.int64) * total // max(count, 1)


def shares(count: int, micro_batch: int, group: hp.Group) -> Iterator[Int64Array]:
    """This rank's part of samples 0 .. count - 1, ``micro_batch`` at a time over all ranks; it may be empty."""
    for first in range(0, count, micro_batch):
        size = min(micro_batch, count - first)
        low, high = (first + size * rank // group.size for rank in (group.rank, group.rank + 1))
        yield np.arange(low, high, dtype=np.int64)
