"""A module whose backward pass takes no time, so that what is timed is the reduction of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ReadyGradients(nn.Module):
    """Parameters of given shapes, whose gradients exist before backward, and become ready from the last to the first.

    ``.grad`` shares the memory of the prepared gradient, which a reduction therefore overwrites: call ``prepare``
    before every step. ``forward`` takes nothing and returns a scalar.

    Args:
        shapes: of the parameters (float32), in forward order.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        # Parameters only have shapes here: they may all lie in the same memory, which many ranks of one machine need.
        memory = torch.zeros(max(map(math.prod, shapes)))
        self.weights = nn.ParameterList(nn.Parameter(memory[: math.prod(shape)].view(tuple(shape))) for shape in shapes)
        self.gradients = [torch.zeros(tuple(shape)) for shape in shapes]

    def prepare(self, value: float) -> None:
        """Drop the gradients of the last step, and make those of the next one equal ``value``."""
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = None
            gradient.fill_(value)

    def forward(self) -> Tensor:
        token = torch.zeros(())
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            token = _Ready.apply(token, weight, gradient)  # type: ignore[no-untyped-call]
        return token

    def reduced_to(self, value: float, tolerance: float = 0.0) -> bool:
        """Whether every element of every gradient is ``value``, up to a relative tolerance."""
        bounds = [torch.stack(torch.aminmax(weight.grad)) for weight in self.weights if weight.grad is not None]
        far = (torch.stack(bounds) - value).abs().max().item()
        return len(bounds) == len(self.weights) and far <= tolerance * abs(value)


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # A tensor that nobody else refers to becomes .grad as it is; one that is referred to would be copied.
        return grads[0], ctx.gradient.detach(), None
