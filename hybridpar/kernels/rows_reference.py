"""The kernels of csrc/row_update.cc in plain PyTorch, where those do not serve and as their test oracle.

Shapes: n rows of a head, C of them at a time, D embedding size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridpar.kernels.softmax_reference import exact_dtype

SMALLEST_NORM = 1e-12
_MASK = 0xFFFF_FFFF


class Rows(NamedTuple):
    """Some rows of a head.

    Attributes:
        weight: [n, D], contiguous.
        inverse_norms: exact [n], 1 / max(norm, 1e-12); None where rows are not normalised.
        first, size: the rows [first, first + size), where there are no ``indices``.
        indices: int64 [C], their numbers, none twice; ``size`` is C.
    """

    weight: Tensor
    inverse_norms: Tensor | None
    first: int
    size: int
    indices: Tensor | None = None

    @property
    def selection(self) -> Tensor | slice:
        return slice(self.first, self.first + self.size) if self.indices is None else self.indices


class Gradient(NamedTuple):
    """By the unit rows (the rows themselves where they are not normalised): ``factor`` times ``values`` [C, D]."""

    values: Tensor
    factor: float | Tensor


class Rounding(NamedTuple):
    """How bfloat16 is stored: to the nearest, or up or down at random, the same for the same seed, row and column."""

    stochastic: bool = False
    seed: int = 0


class Sgd(NamedTuple):
    """What ``step_sgd`` does, as torch.optim.SGD."""

    rate: float
    momentum: float = 0.0
    decay: float = 0.0
    nesterov: bool = False


class AdamW(NamedTuple):
    """What ``step_adamw`` does, as torch.optim.AdamW; ``first`` and ``second`` are its betas."""

    rate: float
    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.0


class Adagrad(NamedTuple):
    """What ``step_adagrad`` does."""

    rate: float
    epsilon: float = 1e-10
    decay: float = 0.0


def load_rows(rows: Rows, out: Tensor) -> None:
    out.copy_(rows.weight[rows.selection])


def measure_rows(rows: Rows) -> None:
    assert rows.inverse_norms is not None
    values = rows.weight[rows.selection].to(exact_dtype(rows.weight.dtype))
    norms: Tensor = torch.linalg.vector_norm(values, dim=1)
    rows.inverse_norms[rows.selection] = norms.clamp(min=SMALLEST_NORM).reciprocal_()


def project_gradient(rows: Rows, gradient: Gradient, out: Tensor) -> None:
    out.copy_(_projected(rows, gradient)[1])


def step_sgd(rows: Rows, gradient: Gradient, momentum: Tensor | None, policy: Sgd, rounding: Rounding) -> None:
    weight, grad = _projected(rows, gradient)
    grad = grad + policy.decay * weight
    if momentum is not None:
        moved = policy.momentum * momentum[rows.selection].to(grad.dtype) + grad
        _store(momentum, rows, moved, rounding, stream=1)
        grad = grad + policy.momentum * moved if policy.nesterov else moved
    _store_weight(rows, weight - policy.rate * grad, rounding)


def step_adamw(
    rows: Rows, gradient: Gradient, first: Tensor, second: Tensor, steps: Tensor, policy: AdamW, rounding: Rounding
) -> None:
    weight, grad = _projected(rows, gradient)
    steps[rows.selection] += 1
    step = steps[rows.selection].double()[:, None]
    mean = policy.first * first[rows.selection].to(grad.dtype) + (1 - policy.first) * grad
    square = policy.second * second[rows.selection].to(grad.dtype) + (1 - policy.second) * grad * grad
    rate = (policy.rate / (1 - policy.first**step)).to(grad.dtype)
    root = (1 - policy.second**step).rsqrt().to(grad.dtype)
    weight = weight * (1 - policy.rate * policy.decay) - rate * mean / (square.sqrt() * root + policy.epsilon)
    _store(first, rows, mean, rounding, stream=1)
    _store(second, rows, square, rounding, stream=2)
    _store_weight(rows, weight, rounding)


def step_adagrad(rows: Rows, gradient: Gradient, sums: Tensor, policy: Adagrad, rounding: Rounding) -> None:
    weight, grad = _projected(rows, gradient)
    grad = grad + policy.decay * weight
    sums[rows.selection] += grad.square().mean(dim=1)
    rate = policy.rate / (sums[rows.selection].sqrt() + policy.epsilon)
    _store_weight(rows, weight - rate[:, None] * grad, rounding)


def advance_rows(rows: Rows, momentum: Tensor | None, matrices: Tensor, rounding: Rounding) -> None:
    exact = exact_dtype(rows.weight.dtype)
    a, b, c, d = matrices.to(exact).T[:, :, None]
    weight = rows.weight[rows.selection].to(exact)
    if momentum is None:
        return _store_weight(rows, a * weight, rounding)
    moved = momentum[rows.selection].to(exact)
    new = a * weight + b * moved, c * weight + d * moved
    _store(momentum, rows, new[1], rounding, stream=1)
    return _store_weight(rows, new[0], rounding)


def _projected(rows: Rows, gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Weights and the gradient by them, exact [C, D]."""
    exact = exact_dtype(rows.weight.dtype)
    weight = rows.weight[rows.selection].to(exact)
    grad = gradient.values.to(exact) * gradient.factor
    if rows.inverse_norms is None:
        return weight, grad
    inverse = rows.inverse_norms[rows.selection][:, None]
    unit = weight * inverse
    inner = torch.sum(grad * unit, dim=1, keepdim=True).masked_fill_(inverse >= 1 / SMALLEST_NORM, 0.0)
    return weight, (grad - inner * unit) * inverse


def _store_weight(rows: Rows, values: Tensor, rounding: Rounding) -> None:
    _store(rows.weight, rows, values, rounding, stream=0)
    if rows.inverse_norms is not None:
        measure_rows(rows)


def _store(target: Tensor, rows: Rows, values: Tensor, rounding: Rounding, *, stream: int) -> None:
    if rounding.stochastic and target.dtype == torch.bfloat16:
        numbers = torch.arange(rows.first, rows.first + rows.size) if rows.indices is None else rows.indices
        random = _random_bits(numbers.cpu(), target.shape[1], rounding.seed, stream).to(target.device)
        bits = values.float().view(torch.int32)
        finite = values.isfinite()
        bits = torch.where(finite, bits.to(torch.int64) + (random & 0xFFFF), bits).to(torch.int32)
        values = torch.where(finite, (bits & -0x10000).view(torch.float32), values.float())
    target[rows.selection] = values.to(target.dtype)


def _random_bits(numbers: Tensor, width: int, seed: int, stream: int) -> Tensor:
    """The random bits [C, D] of csrc/row_update.cc, as int64."""
    starts = _mixed(np.array([(seed + stream) & (1 << 64) - 1], dtype=np.uint64)) + numbers.numpy().astype(np.uint64)
    first = torch.from_numpy((_mixed(starts) & np.uint64(_MASK)).astype(np.int64))[:, None]
    counter = (first + torch.arange(width) * 0x9E37_79B9) & _MASK
    for shift, factor in ((16, 0x7FEB_352D), (15, 0x846C_A68B)):
        counter = _product(counter ^ (counter >> shift), factor)
    return counter ^ (counter >> 16)


def _product(values: Tensor, factor: int) -> Tensor:
    """Of 32-bit numbers, without overflow of 63 bits."""
    low, high = values & 0xFFFF, values >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & _MASK


def _mixed(state: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """The output function of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    state ^= state >> np.uint64(31)
    return state
