"""Which steps each row of a head has missed: Note [lazy decay] in row_optimizers.py."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class MissedSteps:
    """Steps are 2 x 2 matrices on (row, momentum), the same for all rows that take no part.

    Args:
        rows: how many there are.
    """

    def __init__(self, rows: int) -> None:
        self._done = torch.zeros(rows, dtype=torch.int64)  # of each row: up to which step it has come
        self._steps: deque[Tensor] = deque()  # the last ones, as many as any row has missed at most
        self._now = 0

    def __len__(self) -> int:
        """How many steps are remembered."""
        return len(self._steps)

    def add(self, step: tuple[float, float, float, float], took_part: Tensor | None) -> None:
        """One more step.

        Args:
            step: a, b, c and d: a row that took no part still has to become (a w + b m, c w + d m).
            took_part: int64 on the CPU, of which rows; None for all.
        """
        self._now += 1
        self._steps.append(torch.tensor(step, dtype=torch.float64).view(2, 2))
        if took_part is None:
            self._done.fill_(self._now)
            self._steps.clear()
        else:
            self._done[took_part] = self._now

    def take(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """What rows have missed, which from now on they have not.

        Args:
            rows: int64 on the CPU, none twice; None for all.

        Returns:
            int64 [l], those of ``rows`` that have missed a step, and float64 [l, 4], the product of what they missed.
        """
        chosen = torch.arange(len(self._done)) if rows is None else rows
        behind = self._now - self._done[chosen]
        late = chosen[behind > 0]
        behind = behind[behind > 0]
        self._done[late] = self._now
        if not len(late):
            return late, torch.empty(0, 4, dtype=torch.float64)
        # Products of the last 1, 2, ... steps; the latest is applied last, so it stands on the left.
        products = [torch.eye(2, dtype=torch.float64)]
        for step in list(self._steps)[: -int(behind.max()) - 1 : -1]:
            products.append(products[-1] @ step)
        if rows is None:
            self._steps.clear()
        return late, torch.stack(products)[behind].flatten(1).contiguous()
