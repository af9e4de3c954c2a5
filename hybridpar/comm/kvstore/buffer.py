"""Memory for one value of a key."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Copies of so few bytes keep the interpreter: to let go of it, and to get it back from a thread that has taken it
# meanwhile, costs more. Larger ones let go of it, and torch may copy them on several threads.
_SMALL_BYTES = 64 << 10
# NumPy does not know bfloat16.
_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


class Buffer:
    """A contiguous tensor.

    Attributes:
        values: the same memory in one dimension, where it is small and on the CPU; None otherwise.
    """

    __slots__ = ("_memory", "tensor", "values")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.values: npt.NDArray[Any] | None = None
        if tensor.is_cpu and tensor.dtype in _DTYPES and 0 < tensor.nbytes <= _SMALL_BYTES:
            self.values = tensor.view(-1).numpy()
            self._memory = memoryview(self.values)  # type: ignore[arg-type]

    def fill(self, values: npt.NDArray[Any]) -> None:
        """Copy from an array that is like ``values``."""
        self._memory[:] = values  # type: ignore[call-overload]

    def copy_to(self, values: npt.NDArray[Any]) -> None:
        """Copy into an array that is like ``values``."""
        memoryview(values)[:] = self._memory  # type: ignore[arg-type]


def small_values(array: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """The elements of a NumPy array or a tensor in one dimension; None if it is not as simple as that.

    Args:
        shape, dtype: expected of it.
    """
    if type(array) is Tensor:
        if array.requires_grad or not array.is_cpu or array.is_inference():
            return None
        try:
            array = array.numpy()
        except (RuntimeError, TypeError):
            return None
    if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
        return None
    if array.ndim == 1:
        return array
    return array.reshape(-1) if array.flags.c_contiguous else None
