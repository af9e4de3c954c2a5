"""An optimizer that steps bucket by bucket, while later buckets still travel and the next forward pass has begun.

# Note [steps on demand]
When backward is over the round is closed, but nothing is waited for. From then on a bucket is outstanding until someone
needs its parameters: the forward pass of a module that owns one, ``optimizer.step()``, ``state_dict()``, or the next
backward pass. Whoever needs one takes the steps of the buckets up to it, in the order in which they are sent; so a
bucket is stepped while the later ones travel. What the step sees is what there was when backward ended: the gradients
(whatever zero_grad() did since) and the options of the parameter groups (whatever a scheduler did since).

# Note [parameters used elsewhere]
A parameter may be used by another module than the one that owns it (attention uses its output layer's weight so). No
hook announces that. But its gradient arrives without its owner's forward pass having been seen, and from then on it is
waited for at the beginning of every forward pass. If its gradient arrives while its bucket is still outstanding, an old
value has been used, which is refused.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.timeline.timeline import Timeline
from hybridpar.comm.timeline.trace import COMPUTATION

# A gradient that holds a sum, and an earlier one to be added -> what .grad is to be.
Settle = Callable[..., Tensor | None]


class BucketOptimizer:
    """Takes the steps of a torch optimizer, of one bucket's parameters at a time.

    Args:
        make: the user's: parameters -> optimizer. It may leave parameters out, and make several groups.
        module: whose forward passes need the parameters.
        named: parameters as registered with the engine.
        engine: sums their gradients.
        settle: makes gradients of sums.
        timeline: records when steps are taken.

    Attributes:
        optimizer: the user's. Its step() finishes what backward began.

    Raises:
        TypeError: what was made is no torch optimizer.
        ValueError: it has a parameter that is not among the given ones.
    """

    def __init__(
        self,
        make: Callable[[list[Tensor]], Optimizer],
        module: nn.Module,
        named: Mapping[str, Tensor],
        engine: Engine,
        settle: Settle,
        timeline: Timeline,
    ) -> None:
        self._parameters, self._names = list(named.values()), list(named)
        self.optimizer = make(list(self._parameters))
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        _check(self.optimizer, self._index)
        self._engine, self._settle, self._timeline = engine, settle, timeline
        self._take_step, self._zero_grad = self.optimizer.step, self.optimizer.zero_grad
        self._pending: deque[int] = deque()
        self._outstanding: set[int] = set()
        self._stale: set[int] = set()
        self._gradients: list[Tensor | None] = []
        self._seen: list[Tensor | None] = []
        self._versions: list[int] = []
        self._sizes: list[int] = []
        self._cuts: dict[tuple[int, ...], list[list[Tensor]]] = {}
        self._options: list[dict[str, Any]] = []
        # Whether backward began a step that the user's step() has not ended yet.
        self._begun = False
        # Indices in the order in which forward passes since the last step first needed them; see also the note above.
        self._needed: dict[int, None] = {}
        self.order_of_need: list[int] = []
        self._used_elsewhere: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._take_over(self.optimizer)
        for owner in module.modules():
            own = [self._index[p] for p in owner.parameters(recurse=False) if p in self._index]
            if own or owner is module:
                need = _Need(self, own, owner is module)
                self._hooks.append(owner.register_forward_pre_hook(need, prepend=True))
                self._hooks.append(owner.register_state_dict_pre_hook(_Finish(self)))
                self._hooks.append(owner.register_load_state_dict_pre_hook(_Finish(self)))

    def begin(self, missing: Sequence[int]) -> None:
        """Backward is over: close the engine's round, and let steps be taken on demand.

        Args:
            missing: indices of what was not submitted.
        """
        self._remember_options()
        self._note_use(missing)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._seen = list(self._gradients)
        self._versions = [-1 if gradient is None else gradient._version for gradient in self._gradients]
        for index, gradient in enumerate(self._gradients):
            if gradient is None:
                # Other ranks may have one. zero_grad() takes the placeholder away, which tells that it was called.
                parameter = self._parameters[index]
                parameter.grad = self._seen[index] = parameter.new_zeros(()).expand(parameter.shape)
        self._engine.close_round()
        self._pending.extend(range(len(self._engine.buckets)))
        self._outstanding = set(range(len(self._parameters)))
        self._stale = set()

    def step_whole(self, missing: Sequence[int]) -> None:
        """All gradients are sums: take the whole step now."""
        self._remember_options()
        self._note_use(missing)
        self._step_subset(range(len(self._parameters)))

    def need(self, indices: Sequence[int], beginning: bool) -> None:
        """A forward pass is about to use these parameters. ``beginning``: of the whole module."""
        self._needed.update(dict.fromkeys(indices))
        if self._stale:
            self._stale = set() if beginning else self._stale.difference(indices)
        while self._outstanding and not (
            self._outstanding.isdisjoint(indices)
            and (not beginning or self._outstanding.isdisjoint(self._used_elsewhere))
        ):
            self._deliver_next()

    def gradient_comes(self, index: int) -> None:
        """Backward is about to add to a gradient.

        Raises:
            RuntimeError: it comes from an old value of the parameter.
        """
        if self._outstanding:
            self._stale = set(self._outstanding)
            self.finish()
        if index in self._stale:
            raise RuntimeError(
                f"{self._names[index]} was used before its step had been taken: expected it to be used in the forward "
                "pass of its module, or later; call optimizer.step() after backward()"
            )

    @property
    def watches(self) -> bool:
        """Whether ``gradient_comes`` may raise for further gradients of the present backward pass."""
        return bool(self._outstanding or self._stale)

    def finish(self) -> None:
        """Take all outstanding steps."""
        while self._pending:
            self._deliver_next()

    def prepare_replan(self) -> None:
        """The engine is about to make other buckets."""
        self.finish()
        self._cuts.clear()

    def close(self) -> None:
        """Take all outstanding steps, and leave module and optimizer as they were."""
        try:
            self.finish()
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            for name in ("step", "zero_grad"):
                self.optimizer.__dict__.pop(name, None)

    def _take_over(self, optimizer: Optimizer) -> None:
        def step(_: Optimizer, closure: Any = None) -> None:
            self._user_step(closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none:  # sums must not be written into what was zeroed
                self.finish()
            self._zero_grad(set_to_none=set_to_none)

        # Schedulers wrap the function of the bound method.
        step.__name__ = "step"
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        # A GradScaler leaves a trace on optimizers that have this mark.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(_Finish(self))
        optimizer.register_load_state_dict_pre_hook(_Finish(self))

    def _user_step(self, closure: Any) -> None:
        if closure is not None:
            raise ValueError("optimizer.step: expected no closure, since backward has begun the step, got one; drop it")
        if hasattr(self.optimizer, "found_inf"):
            raise RuntimeError(
                "optimizer.step: expected gradients without loss scaling, since each is used as soon as it is summed; "
                "train in bfloat16, or make the optimizer yourself, without DataParallel(optimizer=...)"
            )
        if not self._begun:
            raise RuntimeError(
                "optimizer.step: expected a backward() outside no_sync() before it, which begins the step, got none "
                "since the last step"
            )
        self.finish()
        self._begun = False

    def _remember_options(self) -> None:
        """See Note [steps on demand]."""
        self._begun = True
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn where step() is left out
        groups = self.optimizer.param_groups
        if [len(group["params"]) for group in groups] != self._sizes:
            _check(self.optimizer, self._index)  # add_param_group was called
        self._options = [
            {name: _frozen(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def _note_use(self, missing: Sequence[int]) -> None:
        """Note [parameters used elsewhere]."""
        self._used_elsewhere.update(set(range(len(self._parameters))) - self._needed.keys() - set(missing))
        self.order_of_need = [*sorted(self._used_elsewhere), *self._needed]
        self._needed = {}

    def _deliver_next(self) -> None:
        number = self._pending.popleft()
        members = self._engine.buckets[number].members
        device = self._parameters[0].device.type
        try:
            # A step may be taken within an evaluation, or a forward pass in mixed precision.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
                self._check_untouched(members)
                self._use(members, self._engine.deliver(number))
        except BaseException:
            self._pending.clear()
            self._outstanding.clear()
            raise
        self._outstanding.difference_update(members)

    def _use(self, members: Sequence[int], received: Mapping[int, Tensor]) -> None:
        """Step with the sums of a bucket. They are left in ``.grad`` unless that was zeroed since."""
        zeroed = []
        for index in members:
            parameter, before = self._parameters[index], self._parameters[index].grad
            gradient = self._gradients[index]
            total = self._settle(received[index], gradient) if index in received else self._settle(gradient)
            if before is not self._seen[index]:
                zeroed.append((parameter, before))
            if before is not total:
                parameter.grad = total
            self._gradients[index] = self._seen[index] = None
        self._step_subset(members)
        for parameter, before in zeroed:
            parameter.grad = before

    def _check_untouched(self, members: Sequence[int]) -> None:
        for index in members:
            gradient = self._gradients[index]
            if gradient is not None and gradient._version != self._versions[index]:
                raise RuntimeError(
                    f"the gradient of {self._names[index]} was written while its sum was on its way: expected it to be "
                    "left alone until optimizer.step(); to drop gradients use zero_grad(set_to_none=True)"
                )

    def _step_subset(self, members: Sequence[int]) -> None:
        """The optimizer's step, as if there were no other parameters than these."""
        optimizer, whole = self.optimizer, self.optimizer.param_groups
        groups, given = [], []
        for part, options in zip(self._cut_groups(tuple(members)), self._options, strict=True):
            if part:
                groups.append({**options, "params": part})
                given.append(options)
        if not groups:
            return
        try:
            optimizer.param_groups = groups
            with self._timeline.span("optimizer", row=COMPUTATION):
                self._take_step()
        finally:
            optimizer.param_groups = whole
        for group, options in zip(groups, given, strict=True):
            changed = [name for name in group if name != "params" and group[name] is not options.get(name)]
            if changed:
                raise TypeError(
                    f"optimizer: expected one that treats each parameter alone, got {type(optimizer).__name__}, which "
                    f"keeps {changed[0]!r} for all of them together; make it yourself, without "
                    "DataParallel(optimizer=...)"
                )

    def _cut_groups(self, members: tuple[int, ...]) -> list[list[Tensor]]:
        """Of each parameter group, those parameters."""
        groups = self.optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._cuts.clear()
        if members not in self._cuts:
            chosen = {self._parameters[index] for index in members}
            self._cuts[members] = [[p for p in group["params"] if p in chosen] for group in groups]
        return self._cuts[members]


class _Call:
    """What modules and optimizers call. Copies and pickles of a module come without it."""

    def __init__(self, owner: BucketOptimizer | None) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> _Call:
        return _Call(None)

    def __reduce__(self) -> tuple[type[_Call], tuple[None]]:
        return _Call, (None,)

    def __call__(self, *_: Any) -> None:
        pass


class _Need(_Call):
    """Before a module's forward pass."""

    def __init__(self, owner: BucketOptimizer, indices: Sequence[int], beginning: bool) -> None:
        super().__init__(owner)
        self._indices, self._beginning = indices, beginning

    def __call__(self, *_: Any) -> None:
        assert self.owner is not None
        self.owner.need(self._indices, self._beginning)


class _Finish(_Call):
    """Before state is read or written."""

    def __call__(self, *_: Any) -> None:
        assert self.owner is not None
        self.owner.finish()


def _check(optimizer: Any, index: dict[Tensor, int]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a function that makes a torch.optim.Optimizer of parameters, got one that makes "
            f"{type(optimizer).__name__}; pass for example lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in index:
                raise ValueError(
                    f"optimizer: expected parameters of the wrapped module only, got another of shape "
                    f"{list(parameter.shape)}; give it an optimizer of its own"
                )


def _frozen(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
