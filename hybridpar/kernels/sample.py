"""The door of csrc/sample.cc: drawing without replacement in time of the order of what is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.kernels import _native


def draw_with(kept: Tensor, size: int, count: int, seed: int) -> Tensor:
    """``count`` of the numbers in [0, size) that are not in ``kept``, without replacement, and the kept ones.

    Each set is equally likely; the same seed gives the same numbers on every machine.

    Args:
        kept: int64 on the CPU, ascending, without repetition, in [0, size).
        count: 0 to size - len(kept).
        seed: 64 bits.

    Returns:
        int64 [len(kept) + count] on the CPU, ascending.

    Raises:
        TypeError, ValueError: arguments that are not as described.
    """
    if kept.dtype != torch.int64 or not kept.is_cpu or kept.dim() != 1 or not kept.is_contiguous():
        raise TypeError(f"expected contiguous int64 [k] on the CPU, got {kept.dtype} {tuple(kept.shape)}")
    if len(kept) and not (kept[0] >= 0 and kept[-1] < size and bool((kept[1:] > kept[:-1]).all())):
        raise ValueError(f"expected ascending numbers in [0, {size}), none twice, got {kept.tolist()[:10]}")
    result = torch.empty(len(kept) + max(count, 0), dtype=torch.int64)
    _native.draw_with(kept.data_ptr(), len(kept), size, count, seed & (1 << 64) - 1, result.data_ptr())
    return result
