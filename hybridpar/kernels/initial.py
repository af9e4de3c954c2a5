"""The door of csrc/initial.cc: the rows that a head starts with."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.kernels import _native
from hybridpar.kernels.packing import CODES


def draw_normal_rows(rows: Tensor, class_ids: Tensor, *, seed: int, std: float) -> Tensor:
    """Fill ``rows`` in place with normal draws of standard deviation ``std``; row i is that of class ``class_ids[i]``.

    The row of a class depends on the seed, the class and the width alone, and is the same on every machine. A draw is
    one of 2^23 quantiles, computed in float32: no row holds a value beyond 5.3 standard deviations.

    Args:
        rows: contiguous [n, D] on the CPU: float32, float64, bfloat16 or float16.
        class_ids: int64 [n] on the CPU.
        seed: 64 bits of it count.
        std: at least 0.

    Raises:
        TypeError: arguments that are not as described.
    """
    if rows.dtype not in CODES or not rows.is_cpu or rows.dim() != 2 or not rows.is_contiguous():
        raise TypeError(f"expected contiguous floating-point rows [n, D] on the CPU, got {rows.dtype} {rows.shape}")
    if class_ids.dtype != torch.int64 or not class_ids.is_cpu or class_ids.shape != rows.shape[:1]:
        raise TypeError(f"expected int64 [{len(rows)}] on the CPU, got {class_ids.dtype} {list(class_ids.shape)}")
    ids = class_ids.contiguous()
    _native.draw_normal_rows(
        ids.data_ptr(), len(rows), rows.shape[1], seed & (1 << 64) - 1, std, CODES[rows.dtype], rows.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return rows
