"""The device of these tests, and how tensors get there."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda")


def moved(view: torch.Tensor) -> torch.Tensor:
    """A view with the same strides and offset, on a copy of its storage on the device."""
    store = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(DEVICE)
    return store.as_strided(view.shape, view.stride(), view.storage_offset())


def busy(milliseconds: float = 20.0) -> None:
    """Keeps the current stream occupied for about that long, so that what does not wait for it is seen."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))
