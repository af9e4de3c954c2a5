"""The same tensor in other memory layouts."""

from __future__ import annotations

import torch
from torch import Tensor


def strided(tensor: Tensor, how: int) -> Tensor:
    """The same values: as they are (0), channels last (1), transposed (2), every other place (3), where that exists."""
    if how == 1 and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if how == 2 and tensor.ndim >= 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if how == 3 and tensor.ndim:
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor
