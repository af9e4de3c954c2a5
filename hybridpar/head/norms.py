"""Norms of the rows of a head, measured only where somebody else than their optimizer may have changed them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar import kernels

_TOLERANCE = 1e-3  # relative; rounding to bfloat16 in the middle of everything stays below


class RowNorms:
    """1 / max(norm, 1e-12) of each row of one parameter.

    torch counts the changes of a tensor, but not those by way of ``.data``: so the norms of the rows that are in use
    are compared as well, where that costs nothing, and if one is wrong all are measured again.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._of: tuple[object, ...] = ()

    def of(self, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """[n] of ``weight`` [n, D]: float64 for float64 rows, else float32.

        Args:
            rows: int64, of which the norms are compared.
        """
        if self._values is None or self._of != identity(weight) or not self._holds(weight, rows):
            exact = kernels.exact_dtype(weight.dtype)
            self._values = torch.empty(len(weight), dtype=exact, device=weight.device)
            kernels.measure_rows(kernels.Rows(weight.detach(), self._values, 0, len(weight)))
            self._of = identity(weight)
        return self._values

    def updated(self, weight: Tensor) -> None:
        """The rows were changed, and their norms with them."""
        self._of = identity(weight)

    def _holds(self, weight: Tensor, rows: Tensor | None) -> bool:
        if rows is None or not weight.is_cpu or self._values is None:
            return True
        norms: Tensor = torch.linalg.vector_norm(weight.detach()[rows].to(self._values.dtype), dim=1)
        return bool(((norms * self._values[rows] - 1).abs() < _TOLERANCE).logical_or_(norms < 1e-12).all())


def identity(weight: Tensor) -> tuple[object, ...]:
    """Another one as soon as the rows are others, or are changed where torch counts it."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), weight.shape, weight.dtype, weight.device, version
