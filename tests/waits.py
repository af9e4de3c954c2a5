"""A step of backward that waits, so that a test can say what must happen meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Waits(torch.autograd.Function):
    """The identity, whose backward waits for something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert ctx.event.wait(20), "no all_reduce came through while backward was running"
        return grads[0], None
