"""What many tensors are, asked in one pass: in compiled code where torch has DLPack's exchange API."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridpar.kernels import _native
from hybridpar.kernels.packing import CODES


def _reader() -> _native.TensorReader | None:
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    try:
        return None if exchange is None else _native.TensorReader(exchange)
    except ValueError:  # of another version
        return None


_READER = _reader()


class Expected:
    """Shapes, dtype and device of the tensors of a bucket.

    Args:
        shapes: of each tensor.
        dtype, device: of all of them.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype = list(shapes), dtype
        self._device_number = torch.empty(0, device=device).get_device()
        self._numbers = np.array([number for shape in shapes for number in (len(shape), *shape)], dtype=np.int64)

    def fit(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether all tensors are there, dense, and as expected."""
        if _READER is not None and self._device_number < 0:
            return _READER.fit(list(tensors), CODES[self._dtype], self._numbers)
        present = [tensor for tensor in tensors if tensor is not None]
        # One pass in C for each property costs a third of a check of each tensor.
        return (
            [tensor.shape for tensor in present] == self._shapes
            and {tensor.dtype for tensor in present} == {self._dtype}
            and {tensor.layout for tensor in present} == {torch.strided}
            and set(map(Tensor.get_device, present)) == {self._device_number}
            and (self._device_number >= 0 or all(tensor.is_cpu for tensor in present))
        )


class Addresses:
    """Finds where the tensors of a bucket lie.

    Args:
        counts: elements of each tensor.
        dtype: of all of them.
    """

    def __init__(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        self._counts, self._code = np.array(counts, dtype=np.int64), CODES[dtype]
        self._found = np.empty(len(counts), dtype=np.int64)

    def find(self, tensors: Sequence[Tensor | None]) -> npt.NDArray[np.int64] | None:
        """The address of each, until the next call; None where one is missing, empty, strided, or not on CPU.

        The caller answers for counts and dtype.
        """
        if _READER is not None:
            found = _READER.find(list(tensors), self._code, self._counts, self._found)
            return self._found if found else None
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(tensors) or not all(map(Tensor.is_contiguous, present)):
            return None
        if not all(tensor.is_cpu for tensor in present):
            return None
        self._found[:] = np.fromiter(map(Tensor.data_ptr, present), np.int64, len(present))
        return self._found if self._found.all() else None
