"""Tensors as the bytes that they are made of, and several of them as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [nbytes], whatever its dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The values of vectors of one dtype, one behind the other: their own memory where they lie so already."""
    if (whole := _as_one(parts)) is not None:
        return whole
    return torch.cat(list(parts))


def room_for(parts: Sequence[Tensor]) -> Tensor:
    """Where to write the values of all the vectors, one behind the other. ``deal`` brings them to their places."""
    whole = _as_one(parts)
    return parts[0].new_empty(sum(part.numel() for part in parts)) if whole is None else whole


def deal(whole: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill the vectors with what was written to ``room_for(parts)``."""
    for part, values in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        if part.data_ptr() != values.data_ptr():
            part.copy_(values)


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    full = [part for part in parts if part.numel()]
    if not full:
        return parts[0].new_empty(0)
    storage = full[0].untyped_storage().data_ptr()
    for one, two in pairwise(full):
        # Neighbours in two allocations are no tensor.
        if two.untyped_storage().data_ptr() != storage or one.data_ptr() + one.nbytes != two.data_ptr():
            return None
    return full[0].as_strided((sum(part.numel() for part in full),), (1,))
