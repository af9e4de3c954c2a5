"""LAMB for models whose parameters are partly cut across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from hybridpar.comm.group import Group


class Lamb(Optimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes").

    Adam's direction with decoupled weight decay, for each parameter scaled by |w| / |direction|. For a parameter that
    is cut across ranks both norms are those of the whole, so that N ranks step as one does: ``step`` is then
    collective, with one small all-reduce for each group of ranks.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: at least 0.
        betas: of the moments, each in [0, 1); both are corrected for their bias.
        eps: above 0.
        weight_decay: at least 0; where it is 0, the step is Adam's, without scaling, as biases and norms want it.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's.

        Raises:
            ValueError: an option is out of range.
        """
        options = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            if not options[name] >= 0:
                raise ValueError(f"Lamb.{name}: expected a number of at least 0, got {options[name]}")
        if not options["eps"] > 0:
            raise ValueError(f"Lamb.eps: expected a number above 0, got {options['eps']}")
        for beta in options["betas"]:
            if not 0 <= beta < 1:
                raise ValueError(f"Lamb.betas: expected numbers in [0, 1), got {options['betas']}")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient. Collective where some are cut across ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        cut: dict[Group, list[_Step]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                one = _Step(parameter, self._direction(parameter, group), group["lr"], scaled=group["weight_decay"] > 0)
                ranks: Group | None = getattr(parameter, "hybridpar_group", None)
                if ranks is None or ranks.size == 1:
                    one.apply(one.squares())
                else:
                    cut.setdefault(ranks, []).append(one)
        for ranks, steps in cut.items():
            # In one message, whose order is that of the parameter groups: the same on every rank.
            squares = ranks.all_reduce(torch.stack([one.squares() for one in steps]))
            for one, theirs in zip(steps, squares, strict=True):
                one.apply(theirs)
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's, with decay; moves the moments on."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"Lamb: expected dense gradients, got {gradient.layout}; use sparse=False")
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        count = float(state["step"])
        root = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
        direction: Tensor = (state["exp_avg"] / (1 - first**count)).div_(root)
        return direction.add_(parameter, alpha=group["weight_decay"])


class _Step:
    """What one parameter is about to do."""

    def __init__(self, parameter: Tensor, direction: Tensor, rate: float, *, scaled: bool) -> None:
        self._parameter, self._direction, self._rate, self._scaled = parameter, direction, rate, scaled

    def squares(self) -> Tensor:
        """Sums of squares [2] of parameter and direction on this rank, float64."""
        both = (self._parameter, self._direction)
        return torch.stack([torch.linalg.vector_norm(each).double().square() for each in both])

    def apply(self, squares: Tensor) -> None:
        """Step, with the sums of squares of the whole parameter."""
        weight, direction = squares.sqrt().tolist()
        trust = weight / direction if self._scaled and weight > 0 and direction > 0 else 1.0
        self._parameter.add_(self._direction, alpha=-self._rate * trust)
