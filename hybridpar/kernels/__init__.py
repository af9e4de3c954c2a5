"""Kernels: the compiled ones (csrc/) and their PyTorch references, which have the same signatures."""

from __future__ import annotations

try:
    from hybridpar.kernels import _native as _native
except ImportError as error:
    raise ImportError(
        "expected the compiled module hybridpar.kernels._native, got none that loads "
        f"({error}); build it with `make venv`, or `pip install -e .` in the source folder (needs a C++17 compiler)"
    ) from error

from hybridpar.kernels.initial import draw_normal_rows
from hybridpar.kernels.packing import pack, unpack
from hybridpar.kernels.rows import (
    advance_rows,
    load_rows,
    measure_rows,
    project_gradient,
    step_adagrad,
    step_adamw,
    step_sgd,
)
from hybridpar.kernels.rows_reference import Adagrad, AdamW, Gradient, Rounding, Rows, Sgd
from hybridpar.kernels.sample import draw_with
from hybridpar.kernels.softmax import add_exponentials, to_probabilities
from hybridpar.kernels.softmax_reference import Chunk, Own, exact_dtype, unit_rows, unit_rows_backward_

__all__ = [
    "Adagrad",
    "AdamW",
    "Chunk",
    "Gradient",
    "Own",
    "Rounding",
    "Rows",
    "Sgd",
    "add_exponentials",
    "advance_rows",
    "draw_normal_rows",
    "draw_with",
    "exact_dtype",
    "load_rows",
    "measure_rows",
    "pack",
    "project_gradient",
    "step_adagrad",
    "step_adamw",
    "step_sgd",
    "to_probabilities",
    "unit_rows",
    "unit_rows_backward_",
    "unpack",
]
