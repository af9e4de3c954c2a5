"""pack and unpack for tensors whose counts and dtype stay the same, step after step: what never changes is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridpar.kernels import _native
from hybridpar.kernels.packing import _NONE, CODES, _written, pack, unpack
from hybridpar.kernels.tensor_reader import Addresses


class PackTable:
    """The tensors of one bucket. As `hybridpar.kernels.pack` and `unpack`, with less to do for many small ones.

    The caller answers for what they would check: every tensor has its count and the dtype, and is on the bucket's
    device; the bucket has as many elements as all of them.

    Args:
        counts: the number of elements of each tensor.
        dtype: of all tensors.
    """

    def __init__(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        self._counts = list(counts)
        self._count_array = np.array(self._counts, dtype=np.int64)
        self._addresses = Addresses(counts, dtype)
        self._dtypes = np.full(len(self._counts), CODES[dtype], dtype=np.uint8)

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, scale: float = 1.0
    ) -> int | torch.Tensor:
        """See `hybridpar.kernels.pack`."""
        addresses = self._addresses.find(tensors) if bucket.is_cpu else None
        if addresses is None:
            return pack(tensors, self._counts, bucket, scale)
        known = addresses, self._count_array, self._dtypes, _NONE, _NONE
        nonfinite = _native.pack(*known, bucket.data_ptr(), bucket.numel(), CODES[bucket.dtype], scale)
        _written([bucket])
        return nonfinite

    def unpack(
        self, bucket: torch.Tensor, tensors: Sequence[torch.Tensor | None], scale: float = 1.0
    ) -> int | torch.Tensor:
        """See `hybridpar.kernels.unpack`."""
        addresses = self._addresses.find(tensors) if bucket.is_cpu else None
        if addresses is None:
            return unpack(bucket, self._counts, tensors, scale)
        known = addresses, self._count_array, self._dtypes, _NONE, _NONE
        nonfinite = _native.unpack(bucket.data_ptr(), bucket.numel(), CODES[bucket.dtype], *known, scale)
        _written(tensors)  # type: ignore[arg-type]
        return nonfinite
