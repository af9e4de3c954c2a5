"""AdamW whose bias correction counts the steps of each row, as an optimizer of torch."""

from __future__ import annotations

from typing import Any

import torch


class RowwiseAdamW(torch.optim.Optimizer):
    """From the definition: each row by its own steps, those in which it has a gradient, but decayed in all."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        first, second = group["betas"]
        for parameter in group["params"]:
            rows, grad = parameter.view(len(parameter), -1), parameter.grad.view(len(parameter), -1)
            state = self.state[parameter]
            if not state:
                state |= {"m": torch.zeros_like(rows), "v": torch.zeros_like(rows), "t": torch.zeros(len(rows), 1)}
            moves = (grad != 0).any(dim=1)
            rows *= 1 - group["lr"] * group["decay"]
            state["t"][moves] += 1
            m = state["m"][moves] = first * state["m"][moves] + (1 - first) * grad[moves]
            v = state["v"][moves] = second * state["v"][moves] + (1 - second) * grad[moves] ** 2
            t = state["t"][moves].double()
            mean, square = m / (1 - first**t), v / (1 - second**t)
            rows[moves] -= group["lr"] * mean / (square.sqrt() + group["eps"])
