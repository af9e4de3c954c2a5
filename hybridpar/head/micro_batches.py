"""``MicroBatches``: what backward passes that do not step leave for the one that does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hybridpar.head.norms import identity
from hybridpar.head.row_gradients import MicroBatch


class MicroBatches:
    """Of the step that is going on: Note [micro-batches] in row_gradients.py. A copy starts without any."""

    def __init__(self) -> None:
        self._batches: list[MicroBatch] = []
        self._rows: tuple[object, ...] = ()
        self._held = False

    @property
    def held(self) -> bool:
        """Whether backward passes are not to step."""
        return self._held

    @property
    def one_of_many(self) -> bool:
        """Whether the next backward pass is not the only one of its step."""
        return self._held or bool(self._batches)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes inside do not step. An error inside ends the step: nothing is left of it."""
        before, self._held = self._held, True
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            self._held = before

    def add(self, batch: MicroBatch, weight: Tensor) -> None:
        """One more.

        Raises:
            RuntimeError: the rows have changed since the first one; none is left.
        """
        self._check(weight)
        self._rows = identity(weight)
        self._batches.append(batch)

    def take(self, weight: Tensor) -> list[MicroBatch]:
        """All of them, which are then none. Raises as ``add``."""
        self._check(weight)
        batches, self._batches = self._batches, []
        return batches

    def drop(self) -> None:
        """Forget them."""
        self._batches = []

    @contextmanager
    def others_move(self, weight: Tensor) -> Iterator[None]:
        """Rows change inside that take no part in any of them."""
        as_they_were = self._rows == identity(weight)
        yield
        if as_they_were:
            self._rows = identity(weight)

    def _check(self, weight: Tensor) -> None:
        if self._batches and self._rows != identity(weight):
            self.drop()
            raise RuntimeError(
                "head: expected rows that stay as they are from the first micro-batch of a step to the last, got rows "
                "that were changed in between; change them after the step, or give the step up by "
                "head.row_optimizer.zero_grad() before"
            )

    def __reduce__(self) -> Any:
        return MicroBatches, ()
