"""Kernels: the compiled ones (csrc/) and their PyTorch references, which have the same signatures."""

from __future__ import annotations

try:
    from hybridpar.kernels import _native as _native
except ImportError as error:
    raise ImportError(
        "expected the compiled module hybridpar.kernels._native, got none that loads "
        f"({error}); build it with `make venv`, or `pip install -e .` in the source folder (needs a C++17 compiler)"
    ) from error

from hybridpar.kernels.packing import pack, unpack
from hybridpar.kernels.softmax_reference import online_exp_, softmax_, unit_rows, unit_rows_backward_

__all__ = ["online_exp_", "pack", "softmax_", "unit_rows", "unit_rows_backward_", "unpack"]
