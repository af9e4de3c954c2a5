"""The trial data beside the repository, and small images for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the trial data ../shared/data are not beside this checkout"
)


def png(value: int, *, size: tuple[int, int] = (8, 8), mode: str = "L") -> bytes:
    """A PNG of one gray value; size is (width, height)."""
    out = io.BytesIO()
    Image.new(mode, size, (value,) * len(mode) if mode != "L" else value).save(out, "png")
    return out.getvalue()


def best_accuracy(features: Tensor, first: Tensor, second: Tensor, same: Tensor) -> float:
    """Share of pairs told right by cosine similarity at the best threshold."""
    unit = torch.nn.functional.normalize(features.flatten(1).double(), dim=1)
    scores = (unit[first] * unit[second]).sum(1).numpy()
    truth = same.numpy()
    return float(
        max(np.mean((scores >= threshold) == truth) for threshold in np.quantile(scores, np.linspace(0, 1, 513)))
    )
