"""The launches of csrc/cuda/row_update.cu: see Note [strips] in strips.h. No call waits for the device, or allocates.

A CUDA graph can hold them, once a first call outside of a graph has compiled the kernels. Hyperparameters and the seed
of the rounding are part of the graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.kernels.pack_cuda import Launcher
from hybridpar.kernels.packing import CODES
from hybridpar.kernels.rows_reference import Adagrad, AdamW, Gradient, Rounding, Rows, Sgd
from hybridpar.kernels.softmax_reference import exact_dtype

_WIDE = 4  # elements that a thread reads at once, where the width of a row and the addresses allow it


class _Policy(NamedTuple):
    """As HYBRIDPAR_PARAMETERS has it; ``first`` is the momentum of SGD."""

    rate: float = 0.0
    decay: float = 0.0
    epsilon: float = 0.0
    first: float = 0.0
    second: float = 0.0
    log_first: float = 0.0
    log_second: float = 0.0
    nesterov: int = 0


def load_rows(launcher: Launcher, rows: Rows, out: Tensor) -> None:
    """See `hybridpar.kernels.load_rows`; here and below, all tensors on one device, as that asks for them."""
    _launch(launcher, "load", rows, one=out)


def measure_rows(launcher: Launcher, rows: Rows) -> None:
    """See `hybridpar.kernels.measure_rows`."""
    _launch(launcher, "measure", rows)


def project_gradient(launcher: Launcher, rows: Rows, gradient: Gradient, out: Tensor) -> None:
    """See `hybridpar.kernels.project_gradient`."""
    _launch(launcher, "project", rows, gradient, one=out)


def step_sgd(
    launcher: Launcher, rows: Rows, gradient: Gradient, momentum: Tensor | None, policy: Sgd, rounding: Rounding
) -> None:
    """See `hybridpar.kernels.step_sgd`."""
    numbers = _Policy(policy.rate, policy.decay, first=policy.momentum, nesterov=int(policy.nesterov))
    _launch(launcher, "sgd", rows, gradient, rounding, one=momentum, policy=numbers)


def step_adamw(
    launcher: Launcher,
    rows: Rows,
    gradient: Gradient,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    policy: AdamW,
    rounding: Rounding,
) -> None:
    """See `hybridpar.kernels.step_adamw`."""
    numbers = _Policy(
        policy.rate, policy.decay, policy.epsilon, policy.first, policy.second, _log(policy.first), _log(policy.second)
    )
    _launch(launcher, "adamw", rows, gradient, rounding, one=first, two=second, of_rows=steps, policy=numbers)


def step_adagrad(
    launcher: Launcher, rows: Rows, gradient: Gradient, sums: Tensor, policy: Adagrad, rounding: Rounding
) -> None:
    """See `hybridpar.kernels.step_adagrad`."""
    numbers = _Policy(policy.rate, policy.decay, policy.epsilon)
    _launch(launcher, "adagrad", rows, gradient, rounding, of_rows=sums, policy=numbers)


def advance_rows(launcher: Launcher, rows: Rows, momentum: Tensor | None, matrices: Tensor, rounding: Rounding) -> None:
    """See `hybridpar.kernels.advance_rows`."""
    _launch(launcher, "advance", rows, rounding=rounding, one=momentum, of_rows=matrices)


def _launch(
    launcher: Launcher,
    kernel: str,
    rows: Rows,
    gradient: Gradient | None = None,
    rounding: Rounding | None = None,
    *,
    one: Tensor | None = None,
    two: Tensor | None = None,
    of_rows: Tensor | None = None,
    policy: _Policy | None = None,
) -> None:
    weight = rows.weight
    if not rows.size or not weight.shape[1]:
        return
    values = None if gradient is None else gradient.values
    rounding, numbers = rounding or Rounding(), policy or _Policy()
    width = _width(weight, values, one, two)
    exact = str(exact_dtype(weight.dtype)).removeprefix("torch.")
    launcher.launch(
        f"{kernel}_{exact}_{width}", rows.size,
        *_memory(weight), weight.shape[1], rows.size, _address(rows.indices), rows.first, _address(rows.inverse_norms),
        *_memory(values), *_factor(gradient), int(rounding.stochastic), _signed(rounding.seed),
        *_memory(one), *_memory(two), _address(of_rows), *map(float, numbers[:-1]), numbers.nesterov,
    )  # fmt: skip


def _factor(gradient: Gradient | None) -> tuple[float, int, int]:
    """A number, or where it lies on the device and its dtype: nobody waits for it."""
    if gradient is None:
        return 1.0, 0, 0
    factor = gradient.factor
    if not isinstance(factor, Tensor) or factor.device != gradient.values.device:
        return float(factor), 0, 0
    if factor.dtype not in (torch.float32, torch.float64) or factor.numel() != 1:
        raise TypeError(f"expected a factor of float32 or float64 [], got {factor.dtype} {tuple(factor.shape)}")
    return 1.0, factor.data_ptr(), CODES[factor.dtype]


def _memory(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), CODES[tensor.dtype])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _width(weight: Tensor, *others: Tensor | None) -> int:
    given = (weight, *(tensor for tensor in others if tensor is not None))
    aligned = all(tensor.data_ptr() % (_WIDE * tensor.element_size()) == 0 for tensor in given)
    return _WIDE if aligned and weight.shape[1] % _WIDE == 0 else 1


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _signed(seed: int) -> int:
    """The same 64 bits, as a launch takes them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
