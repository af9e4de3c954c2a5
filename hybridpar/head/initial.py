"""Initial rows of a head. The row of class c depends on (seed, c) alone, whatever the ranks and the rule."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements per step: what is worked on stays in the cache


def initial_rows_(rows: Tensor, class_ids: Tensor, *, seed: int, std: float) -> Tensor:
    """Fill ``rows`` [n, D] in place with normal draws of standard deviation ``std``; row i is that of ``class_ids[i]``.

    Element (c, d) is the (c * D + d)-th output of a SplitMix64 stream (Steele et al. 2014) that starts at a hash of
    the seed, sent through the inverse of the normal distribution.
    """
    width = rows.shape[1]
    per_block = max(1, _BLOCK // max(width, 1))
    columns = np.arange(width, dtype=np.uint64)
    start = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64) + np.uint64(0x9E37_79B9_7F4A_7C15))
    for begin in range(0, len(class_ids), per_block):
        ids = class_ids[begin : begin + per_block].numpy().astype(np.uint64)
        counter = ids[:, None] * np.uint64(width) + columns
        counter *= np.uint64(0x9E37_79B9_7F4A_7C15)
        counter += start
        # 52 bits, at the middle of their cell: never 0 or 1, where the inverse is infinite.
        uniform = ((_mix(counter) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        normal = torch.erfinv(torch.from_numpy(2.0 * uniform - 1.0))
        rows[begin : begin + per_block] = normal.mul_(math.sqrt(2.0) * std)
    return rows


def _mix(state: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """The output function of SplitMix64, in place on uint64."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58_476D_1CE4_E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D0_49BB_1331_11EB)
    state ^= state >> np.uint64(31)
    return state
