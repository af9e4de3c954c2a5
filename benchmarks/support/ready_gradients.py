"""A module whose backward pass takes no time, so that what is timed is the reduction of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Values of which the gradients are made: more than a cache or a compressor remembers; a prime number, so that tensors,
# ranks and steps begin at different places.
_PERIOD = 1_048_583
_SHIFT = 333_667


class ReadyGradients(nn.Module):
    """Parameters of given shapes, whose gradients exist before backward, and become ready from the last to the first.

    Gradients are normally distributed, with another standard deviation for each tensor, and other ones on each rank and
    in each step. ``.grad`` shares the memory of the prepared gradient, which a reduction therefore overwrites: call
    ``prepare`` before every step. ``forward`` takes nothing and returns a scalar.

    Args:
        shapes: of the parameters (float32), in forward order.
        rank, size: whose gradients these are.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = 0, size: int = 1) -> None:
        super().__init__()
        # Parameters only have shapes here: they may all lie in the same memory, which many ranks of one machine need.
        memory = torch.zeros(max(map(math.prod, shapes)))
        self.weights = nn.ParameterList(nn.Parameter(memory[: math.prod(shape)].view(tuple(shape))) for shape in shapes)
        self.gradients = [torch.zeros(tuple(shape)) for shape in shapes]
        values = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0))
        # Rank r has the values of rank 0, r of ``size`` parts of a period further.
        self._values = values.roll(-(rank * _PERIOD // size))
        self._mean = torch.stack([values.roll(-(other * _PERIOD // size)) for other in range(size)]).mean(0)
        # Powers of two, so that a scaled sum is the sum of what is scaled.
        self._scales = [2.0 ** (number * 7 % 11 - 9) for number in range(len(shapes))]
        self._begin = 0

    def prepare(self) -> None:
        """Drop the gradients of the last step, and make those of the next one."""
        self._begin = (self._begin + _SHIFT) % _PERIOD
        begin = self._begin
        for weight, gradient, scale in zip(self.weights, self.gradients, self._scales, strict=True):
            weight.grad = None
            _tile(gradient.view(-1), self._values, begin)
            gradient.mul_(scale)
            begin += gradient.numel()

    def forward(self) -> Tensor:
        token = torch.zeros(())
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            token = _Ready.apply(token, weight, gradient)  # type: ignore[no-untyped-call]
        return token

    def error(self) -> float:
        """How far the gradients are from the mean over the ranks, at most, in standard deviations of one rank's.

        Infinity where there is no gradient.
        """
        begin, worst = self._begin, torch.zeros(())
        for weight, scale in zip(self.weights, self._scales, strict=True):
            if weight.grad is None:
                return math.inf
            expected = torch.empty(weight.numel())
            _tile(expected, self._mean, begin)
            far = expected.sub_(weight.grad.view(-1), alpha=1 / scale).aminmax()
            worst = torch.maximum(worst, torch.maximum(-far.min, far.max))
            begin += weight.numel()
        return float(worst)


def _tile(target: Tensor, values: Tensor, begin: int) -> None:
    """target[i] = values[(begin + i) modulo their number]"""
    done = 0
    while done < target.numel():
        first = (begin + done) % values.numel()
        count = min(values.numel() - first, target.numel() - done)
        target[done : done + count] = values[first : first + count]
        done += count


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # A tensor that nobody else refers to becomes .grad as it is; one that is referred to would be copied.
        return grads[0], ctx.gradient.detach(), None
