"""Optimizers of a head's rows, which step in the backward pass: each row as soon as its gradient is known.

So the gradient of all rows never exists, and a row and its state are read and written once a step. Policies say what is
done; a ``RowOptimizer`` does it to the rows of one head, and is driven like any optimizer of torch: by its
``param_groups``, from a learning-rate scheduler.

# Note [rounding of rows]
A step may be smaller than the distance of two neighbouring numbers in bfloat16, and rounding to the nearest would lose
it every time. So bfloat16 rows and states are rounded up or down at random, such that on average nothing is lost. The
choice depends on the seed, the step, the rank, the row and the column alone: a run can be repeated, bit for bit.

# Note [lazy decay]
A step without a gradient still moves a row of a dense optimizer: weight decay shrinks it, momentum carries it on. Both
are linear in row w and momentum m: (w, m) becomes (a w + b m, c w + d m), with the same four numbers for all rows. With
``lazy_decay`` these matrices are remembered, and a row that takes part again is first multiplied by the product of
those that it has missed: it is then where dense steps would have brought it. Without it, a row that takes no part stays
as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hybridpar import kernels
from hybridpar.head.micro_batches import MicroBatches
from hybridpar.head.missed_steps import MissedSteps
from hybridpar.head.norms import RowNorms
from hybridpar.head.row_gradients import MicroBatch, pass_b
from hybridpar.head.row_memory import RowMemory
from hybridpar.kernels import Gradient, Rounding, Rows

STATE_DTYPES = (torch.float32, torch.bfloat16)
_BLOCK = 4096  # rows
_MOST_MISSED = 1024  # steps: then all rows are moved on, so that what is remembered stays small


@dataclass(frozen=True)
class RowPolicy(ABC):
    """Base of all.

    Attributes:
        lr: learning rate, at least 0. Where the head's loss is a mean over the global batch, that of any optimizer.
        weight_decay: at least 0.
        state_dtype: of moments: float32 or bfloat16; None means float32, or float64 for float64 rows.
        stochastic_rounding: whether bfloat16 rows and states are rounded at random: Note [rounding of rows].
        seed: of that.
        lazy_decay: whether rows that take no part are moved on: Note [lazy decay].
    """

    lr: float
    weight_decay: float = 0.0
    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = True
    seed: int = 0
    lazy_decay: bool = False

    moments: ClassVar[str | None] = None  # the state that steps without a gradient move

    def __post_init__(self) -> None:
        self.check(self.hyperparameters())
        if self.lazy_decay:
            self.idle_step(self.hyperparameters())
        if self.state_dtype not in (None, *STATE_DTYPES):
            raise ValueError(f"{self._name}.state_dtype: expected float32, bfloat16 or None, got {self.state_dtype}")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def hyperparameters(self) -> dict[str, Any]:
        """What a parameter group starts with, and a scheduler may change."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def check(self, group: dict[str, Any]) -> None:
        """Raises ValueError where hyperparameters are out of range."""
        for name in ("lr", "weight_decay"):
            if not (math.isfinite(group[name]) and group[name] >= 0):
                raise ValueError(f"{self._name}.{name}: expected a finite number >= 0, got {group[name]}")

    @abstractmethod
    def states(self, rows: Tensor, memory: RowMemory) -> dict[str, Tensor]:
        """What is remembered of ``rows`` [n, D], before the first step. What is as large as they are is ``memory``'s.

        Raises OSError where there is no room.
        """

    @abstractmethod
    def step(
        self, rows: Rows, gradient: Gradient, states: dict[str, Tensor], group: dict[str, Any], rounding: Rounding
    ) -> None:
        """One step of some rows."""

    def idle_step(self, group: dict[str, Any]) -> tuple[float, float, float, float]:
        """a, b, c and d of a step without a gradient. Raises ValueError where it is not linear."""
        raise ValueError(f"{self._name}.lazy_decay: expected RowSGD or RowAdamW, whose decay is linear")

    def _moments(self, rows: Tensor, memory: RowMemory) -> Tensor:
        wide = kernels.exact_dtype(rows.dtype)
        narrow = self.state_dtype if wide == torch.float32 and self.state_dtype is not None else wide
        return memory.zeros(tuple(rows.shape), narrow)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected a number in [0, 1), got {value}")


@dataclass(frozen=True)
class RowSGD(RowPolicy):
    """torch.optim.SGD for rows.

    Args:
        momentum: in [0, 1).
        nesterov: Nesterov's form of it.
    """

    momentum: float = 0.0
    nesterov: bool = False

    moments: ClassVar[str | None] = "momentum_buffer"

    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters() | {"momentum": self.momentum, "nesterov": self.nesterov}

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        _check_share("RowSGD.momentum", group["momentum"])
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("RowSGD.nesterov: expected a momentum above 0 with it, got 0")

    def idle_step(self, group: dict[str, Any]) -> tuple[float, float, float, float]:
        rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        moved = decay, momentum  # the new momentum, in terms of row and momentum
        if not momentum:
            return 1 - rate * decay, 0.0, 0.0, 0.0
        if group["nesterov"]:
            return 1 - rate * (decay + momentum * moved[0]), -rate * momentum * moved[1], *moved
        return 1 - rate * moved[0], -rate * moved[1], *moved

    def states(self, rows: Tensor, memory: RowMemory) -> dict[str, Tensor]:
        return {"momentum_buffer": self._moments(rows, memory)} if self.momentum else {}

    def step(
        self, rows: Rows, gradient: Gradient, states: dict[str, Tensor], group: dict[str, Any], rounding: Rounding
    ) -> None:
        policy = kernels.Sgd(group["lr"], group["momentum"], group["weight_decay"], group["nesterov"])
        kernels.step_sgd(rows, gradient, states.get("momentum_buffer"), policy, rounding)


@dataclass(frozen=True)
class RowAdamW(RowPolicy):
    """torch.optim.AdamW for rows. Bias correction counts the steps of each row by itself.

    Args:
        betas: each in [0, 1).
        eps: above 0.
    """

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters() | {"betas": self.betas, "eps": self.eps}

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        for beta in group["betas"]:
            _check_share("RowAdamW.betas", beta)
        if not group["eps"] > 0:
            raise ValueError(f"RowAdamW.eps: expected a number above 0, got {group['eps']}")

    def idle_step(self, group: dict[str, Any]) -> tuple[float, float, float, float]:
        """Moments stay: bias correction counts a row's own steps."""
        return 1 - group["lr"] * group["weight_decay"], 0.0, 0.0, 1.0

    def states(self, rows: Tensor, memory: RowMemory) -> dict[str, Tensor]:
        steps = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return {"exp_avg": self._moments(rows, memory), "exp_avg_sq": self._moments(rows, memory), "steps": steps}

    def step(
        self, rows: Rows, gradient: Gradient, states: dict[str, Tensor], group: dict[str, Any], rounding: Rounding
    ) -> None:
        first, second = group["betas"]
        policy = kernels.AdamW(group["lr"], first, second, group["eps"], group["weight_decay"])
        kernels.step_adamw(rows, gradient, states["exp_avg"], states["exp_avg_sq"], states["steps"], policy, rounding)


@dataclass(frozen=True)
class RowAdagrad(RowPolicy):
    """Adagrad with one number a row: the sum over steps of the mean of its squared gradient.

    Args:
        eps: above 0.
        initial_accumulator_value: where the sums start, at least 0.
    """

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters() | {"eps": self.eps}

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if not group["eps"] > 0 or not self.initial_accumulator_value >= 0:
            raise ValueError(
                "RowAdagrad: expected eps above 0 and initial_accumulator_value of 0 or more, got "
                f"{group['eps']} and {self.initial_accumulator_value}"
            )

    def states(self, rows: Tensor, memory: RowMemory) -> dict[str, Tensor]:
        exact = kernels.exact_dtype(rows.dtype)
        return {"sums": torch.full((len(rows),), self.initial_accumulator_value, dtype=exact, device=rows.device)}

    def step(
        self, rows: Rows, gradient: Gradient, states: dict[str, Tensor], group: dict[str, Any], rounding: Rounding
    ) -> None:
        policy = kernels.Adagrad(group["lr"], group["eps"], group["weight_decay"])
        kernels.step_adagrad(rows, gradient, states["sums"], policy, rounding)


class RowOptimizer(torch.optim.Optimizer):
    """Steps the rows (and biases) of one head in its backward pass, and takes part in no other way.

    ``step()`` does nothing, so that a training loop may treat it as any optimizer. ``zero_grad()`` gives up what
    backward passes in ``ShardedClassifier.no_step()`` have left for a step. ``param_groups`` holds one group, with the
    hyperparameters of the policy and the number of steps so far; ``state`` what is remembered of each parameter, rows
    in the order of the parameter's.

    Args:
        policy: what is done.
        weight, bias: parameters [n, D] and [n] or None.
        norms: of the rows; kept up to date.
        rank: of the head, for what is random.
        memory: where moments live; None for that of the parameters.

    Attributes:
        policy: as given.
        micro_batches: of the step that is going on.

    Raises:
        OSError: there is no room for them.
    """

    def __init__(
        self,
        policy: RowPolicy,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        norms: RowNorms | None,
        rank: int,
        memory: RowMemory | None = None,
    ) -> None:
        self.policy, self.micro_batches = policy, MicroBatches()
        self._norms, self._rank = norms, rank
        parameters = [weight] if bias is None else [weight, bias]
        super().__init__(parameters, policy.hyperparameters() | {"steps": 0})
        memory = RowMemory(weight.device) if memory is None else memory
        for parameter in parameters:
            self.state[parameter] = dict(policy.states(_as_rows(parameter), memory))
        self._missed = MissedSteps(len(weight)) if policy.lazy_decay else None
        self._took_part: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing: the rows were stepped in the backward pass."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Of use to the constructor only: the rows of one head are one group.

        Torch's own imports its compiler: 70 MB and seconds that a program without optimizers of torch can do without.
        """
        if self.param_groups:
            raise ValueError("RowOptimizer: expected one group, the rows and biases of its head, got another")
        self.param_groups.append({**self.defaults, **param_group})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; there is more than gradients to forget."""
        self.micro_batches.drop()
        super().zero_grad(set_to_none)

    def catch_up(self, drawn: Tensor | None = None) -> None:
        """Move rows on to where they would be if they had taken part in every step: Note [lazy decay].

        Args:
            drawn: int64 on the CPU, of which rows; None for all.
        """
        if self._missed is None:
            return
        late, matrices = self._missed.take(drawn)
        weight = self.param_groups[0]["params"][0]
        # Those that took part in a micro-batch of this step had caught up before it.
        with self.micro_batches.others_move(weight):
            self._advance(late, matrices)

    def _advance(self, late: Tensor, matrices: Tensor) -> None:
        """By one matrix [4] for each row."""
        weight, *bias = self.param_groups[0]["params"]
        rounding = self._rounding(stream=1)
        for begin in range(0, len(late), _BLOCK):
            part = late[begin : begin + _BLOCK].to(weight.device)
            factors = matrices[begin : begin + _BLOCK].to(weight.device)
            norms = None if self._norms is None else self._norms.of(weight)
            for parameter, inverse_norms in ((weight, norms), *((one, None) for one in bias)):
                momentum = self.state[parameter].get(self.policy.moments) if self.policy.moments else None
                rows = Rows(_as_rows(parameter), inverse_norms, 0, len(part), part)
                kernels.advance_rows(rows, momentum, factors, rounding)
            if self._norms is not None:
                self._norms.updated(weight)

    def __getstate__(self) -> dict[str, Any]:
        """All there is, for copies; torch's own would leave the policy out. Not a scheduler's wrapper around step()."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's; rows and states are moved on first."""
        self.catch_up()
        return super().state_dict()

    def take(self, rows: Rows, gradient: Gradient, sums_C: Tensor | None) -> None:
        """As a sink of pass B: one step of some rows and their biases."""
        group = self.param_groups[0]
        weight, *bias = group["params"]
        rounding = self._rounding(stream=0)
        self.policy.step(rows, gradient, self.state[weight], group, rounding)
        if self._missed is not None and rows.indices is not None:
            self._took_part.append(rows.indices.cpu())
        for parameter in bias:
            assert sums_C is not None
            column = rows._replace(weight=_as_rows(parameter), inverse_norms=None)
            by_bias = Gradient(sums_C[:, None], gradient.factor)
            self.policy.step(column, by_bias, self.state[parameter], group, rounding)

    def step_by(self, batches: Sequence[MicroBatch], weight: Tensor, bias: Tensor | None) -> None:
        """One step by the gradient of all batches together.

        Args:
            weight, bias: the parameters as they are now; what was remembered of those before belongs to them.

        Raises:
            ValueError: hyperparameters have left their range.
        """
        self._begin(weight, bias)
        pass_b(batches, self)
        self._end()

    def _begin(self, weight: Tensor, bias: Tensor | None) -> None:
        group = self.param_groups[0]
        self.policy.check(group)
        given = [weight] if bias is None else [weight, bias]
        for place, (before, now) in enumerate(zip(group["params"], given, strict=True)):
            if before is not now:
                group["params"][place] = now
                self.state[now] = self.state.pop(before)

    def _end(self) -> None:
        self.param_groups[0]["steps"] += 1
        if self._missed is not None:
            took_part = torch.cat(self._took_part) if self._took_part else None
            self._took_part.clear()
            self._missed.add(self.policy.idle_step(self.param_groups[0]), took_part)
            if len(self._missed) >= _MOST_MISSED:
                self.catch_up()
        if self._norms is not None:
            self._norms.updated(self.param_groups[0]["params"][0])
        self.step()  # a scheduler counts the calls

    def _rounding(self, *, stream: int) -> Rounding:
        seed = self.policy.seed * 0x1_0000_0001 + self.param_groups[0]["steps"] * 0x1_0001 + self._rank * 2 + stream
        return Rounding(self.policy.stochastic_rounding, seed & (1 << 64) - 1)


def _as_rows(parameter: Tensor) -> Tensor:
    """[n, D], or of biases [n, 1]; the same memory."""
    detached = parameter.detach()
    return detached if detached.dim() == 2 else detached[:, None]
