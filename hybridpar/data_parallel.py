"""``DataParallel``: a replicated module whose gradients are summed over the ranks while backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpar.bucket_optimizer import BucketOptimizer
from hybridpar.comm.agreement import check_same_settings, together
from hybridpar.comm.buckets import check_same_tensors
from hybridpar.comm.coalesce import broadcast_tensors
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.pace import Pace, tuner_for
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group
from hybridpar.comm.timeline.timeline import NoTimeline, Timeline
from hybridpar.comm.timeline.trace import COMPUTATION
from hybridpar.gradient_hooks import GradientHooks, has_hooks
from hybridpar.kept_sums import is_sum, put_aside, settle, settle_all, wait_on


class DataParallel(nn.Module):
    """Wraps a module that every rank holds whole.

    All ranks start with rank 0's parameters and buffers. At the end of every ``backward()`` outside ``no_sync()``
    each ``.grad`` holds the sum of what the ranks computed (see "sum everywhere" in the head's documentation), so
    the user's optimizer stays as it is. Gradients already there are kept, as in plain PyTorch: what was summed before
    is not summed again. Parameters that no rank used keep ``grad = None``; those that only other ranks used receive
    a gradient. Parameters of sharded heads inside the module are left alone, and so are those that require no gradient
    when the module is wrapped.

    ``state_dict`` is that of the wrapped module, without a prefix.

    With ``optimizer`` the wrapper steps, too: bucket by bucket, as their sums arrive, while later ones travel and the
    next forward pass has begun. The results are those of the plain optimizer, bit for bit. ``parallel.optimizer`` is
    that optimizer, for schedulers and checkpoints. Call its ``step()`` where a script would: it waits for what is
    still outstanding; gradients and parameters may be read from then on. Leave it out, and only the modules of the next
    forward pass wait, each for its own parameters. Each synchronised backward is one step, with the gradients as they
    are: what must see them all first (clipping, loss scaling) needs an optimizer of your own.

    Args:
        module: any module with dense gradients.
        group: the ranks.
        reduction: ``"sum"``, or ``"mean"`` for scripts whose loss is the mean over the local batch.
        bucket_bytes: gradients travel in buckets of up to this many bytes; short for ``plan=Plan(bucket_bytes=...)``.
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before the first training forward,
            and before the first one after each synchronised backward. Those in between, as when several forward passes
            share one backward, leave them alone, because autograd may have saved them.
        plan: how gradients travel.
        check_finite: if a sum is not finite, ``backward()`` raises ``NonFiniteError`` on every rank, for the step to be
            skipped: call ``zero_grad()`` and go on. The optimizer has not stepped then.
        optimizer: parameters -> torch optimizer; see above. It may leave parameters out, and make several groups.
        tune: try other plans during the first steps, beginning with ``plan``, and keep the fastest. A path: remember
            it there for the next run. HYBRIDPAR_TUNE=0 turns it off.
        wires: further formats that tuning may choose; others than ``Wire()`` round what they send.
        timeline: records what happens when.

    Attributes:
        optimizer: what ``optimizer`` made, or None.

    Raises:
        ValueError: reduction is neither; the module has nothing to train, or is in a ``DataParallel`` already; both
            bucket_bytes and plan are given; or the ranks were given different settings (on every rank).
        CommunicationError: the ranks hold different models (on every rank, naming the first tensor that differs).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group,
        reduction: Literal["sum", "mean"] = "sum",
        bucket_bytes: int | None = None,
        broadcast_buffers: bool = True,
        plan: Plan | None = None,
        check_finite: bool = False,
        optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        tune: bool | str | Path = False,
        wires: Sequence[Wire] = (),
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__()
        self.module, self.group, self._broadcasts_buffers = module, group, broadcast_buffers
        self._timeline = NoTimeline() if timeline is None else timeline
        replicated = {name: p for name, p in module.named_parameters() if not _is_sharded(p)}
        named = {name: p for name, p in replicated.items() if p.requires_grad}
        _check_same_model(module, replicated, group)
        given = plan is not None or bucket_bytes is not None
        plan = together(group, lambda: _checked(reduction, named, bucket_bytes, plan)).resolved(len(group.hosts))
        settings = {
            "reduction": reduction, **plan.to_json(), "broadcast_buffers": broadcast_buffers, "tune": bool(tune),
            "check_finite": check_finite, "optimizer": optimizer is not None, "wires": [w.to_json() for w in wires],
        }  # fmt: skip
        check_same_settings(group, "DataParallel", settings)
        self._parameters_sent = list(named.values())
        self._frozen = {name: p for name, p in replicated.items() if not p.requires_grad}
        tuner = tuner_for(group, plan, named, tune, given=given, wires=wires)
        scale = 1.0 / group.size if reduction == "mean" else 1.0
        self._engine = Engine(group, plan=tuner.plan, scale=scale, timeline=timeline, check_finite=check_finite)
        # Gradients become ready from the last layer to the first.
        self._engine.register(list(named), self._parameters_sent, range(len(named) - 1, -1, -1))
        self._pace = Pace(group, self._engine, tuner, self._prepare_replan)
        broadcast_tensors([*replicated.values(), *module.buffers()], group)
        self._synchronise = True
        self._backward_running = False
        self._buffers_may_differ = True
        self._set_aside: dict[int, Tensor] = {}
        # The bucket whose last gradient is being accumulated.
        self._complete: int | None = None
        self._stepper: BucketOptimizer | None = None
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            self._stepper = BucketOptimizer(optimizer, module, named, self._engine, settle, self._timeline)
            self.optimizer = self._stepper.optimizer
        arrivals, around = self._engine.arrivals, (self._before_accumulation, self._after_accumulation)
        self._hooks = GradientHooks(module, self._parameters_sent, *around, arrivals)
        for bucket in self._engine.buckets:
            self._hooks.follow(bucket.members[-1])
        _OPEN.add(self)
        # Only where this module is a part of another one: load_state_dict below goes to the wrapped module at once.
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward.

        Raises:
            RuntimeError: training cannot go on: the last backward pass failed, ``close`` was called, or a parameter
                requires a gradient only since the module was wrapped.
        """
        if self._backward_running or self._engine.failed:
            raise RuntimeError("the last backward pass failed on this rank, so the ranks are out of step; start again")
        if torch.is_grad_enabled() and self.training:
            self._check_hooked()
            if self._synchronise and self._broadcasts_buffers and self._buffers_may_differ:
                self.broadcast_buffers()
                self._buffers_may_differ = False
        with self._timeline.span("forward", row=COMPUTATION):
            return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's."""
        if self._stepper is not None and not set_to_none:
            self._stepper.finish()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Take the steps of ``optimizer`` that are still outstanding. Afterwards parameters and gradients may be read.

        ``optimizer.step()`` does it, and so do ``state_dict()`` and ``load_state_dict()``.
        """
        if self._stepper is not None:
            self._stepper.finish()

    def report(self) -> dict[str, Any]:
        """How gradients travel and why, as JSON can carry it: the engine's report, and the tuner's as ``tuner``."""
        return {**self._engine.report(), "tuner": self._pace.tuner.report()}

    def broadcast_buffers(self) -> None:
        """Collective: give every rank rank 0's buffers, for example before an evaluation that the ranks share."""
        broadcast_tensors(self.module.buffers(), self.group)

    @contextmanager
    def buffers_kept_on_error(self) -> Iterator[None]:
        """If the block raises, put all buffers back as they were before.

        For training steps that may be skipped: when the head refuses a batch with ``NonFiniteError``, the backbone's
        batch norms have already taken it into their running statistics.
        """
        before = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate locally; the next one outside sends the sum of all of them."""
        before, self._synchronise = self._synchronise, False
        self._engine.arrivals.counting = False
        try:
            yield
        finally:
            self._synchronise = before

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped module's."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The wrapped module's.

        Raises:
            ValueError: assign is True: it would put other parameters in the place of those that are synchronised.
        """
        if assign:
            raise ValueError("load_state_dict: expected assign=False in DataParallel, got True; assign before wrapping")
        return self.module.load_state_dict(state_dict, strict)

    def close(self) -> None:
        """Free the engine and let go of the module. Collective where the library demands it."""
        try:
            if self._stepper is not None:
                self._stepper.close()
        finally:
            _OPEN.discard(self)
            self._hooks.remove()
            self._engine.close()

    def _check_hooked(self) -> None:
        if not self._hooks:
            raise RuntimeError("DataParallel: expected an open one, got one that was closed; wrap the module again")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} required no gradient when it was wrapped, so its gradient would not be summed; "
                    "close() this DataParallel and wrap the module again"
                )

    def _before_accumulation(self, index: int, parameter: Tensor) -> None:
        if self._stepper is not None:
            self._stepper.gradient_comes(index)
        if parameter.grad is not None:
            earlier = put_aside(parameter)
            if earlier is not None:
                self._set_aside[index] = earlier
                self._hooks.follow(index)
        if not self._synchronise:
            return
        if not self._backward_running:
            self._begin_backward()
        number = self._engine.announce(index)
        if number is not None:
            self._complete = number
            self._hooks.follow(index)

    def _after_accumulation(self, index: int, parameter: Tensor) -> None:
        if self._set_aside and index in self._set_aside:
            wait_on(parameter.grad, self._set_aside.pop(index))
        if self._complete is not None:
            number, self._complete = self._complete, None
            sent = self._parameters_sent
            self._submit(number, [sent[index].grad for index in self._engine.members(number)])
        elif self._synchronise and not self._backward_running:
            self._begin_backward()  # Note [other accumulators]

    def _late(self, index: int) -> Tensor | None:
        """When backward is over: what is still to be sent of a parameter."""
        gradient = self._parameters_sent[index].grad
        if gradient is None or self._engine.announced(index):
            return gradient
        # From a pass under no_sync, not touched by this last one; or added past the hooks. Sums wait for their use.
        changed, summed = self._hooks.renew(index), is_sum(gradient)
        if changed and summed:
            raise RuntimeError(
                "DataParallel: expected parameters that keep their dtype and device while .grad holds a sum, got one "
                f"of shape {list(gradient.shape)} that was changed; call zero_grad() after changing them"
            )
        return None if summed else gradient

    def _submit(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        self._engine.submit_bucket(number, gradients)

    def _begin_backward(self) -> None:
        self._backward_running = True
        self._backward_span = self._timeline.span("backward", row=COMPUTATION)
        self._backward_span.__enter__()
        # On CUDA the engine must note on which stream each becomes ready; a stepper looks for uses that are too early.
        watches = self._stepper is not None and self._stepper.watches
        self._engine.arrivals.counting = self._parameters_sent[0].is_cpu and not watches
        # Runs on this thread when the whole backward pass is done, before backward() returns.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._engine.arrivals.counting = False
        for number in self._engine.open_buckets():
            self._submit(number, [self._late(index) for index in self._engine.members(number)])
        self._backward_span.__exit__(None, None, None)
        try:
            if self._stepper is not None and not self._engine.check_finite:
                self._stepper.begin(self._engine.missing())
            else:
                self._sum_and_step()
        finally:
            self._backward_running = self._engine.failed
        self._buffers_may_differ = True
        self._timeline.instant("step", row=COMPUTATION)
        self._pace.step(None if self._stepper is None else self._stepper.order_of_need)

    def _sum_and_step(self) -> None:
        """All sums, and then the whole step of the optimizer, if it is ours."""
        missing = self._engine.missing()
        try:
            received = self._engine.flush()
        except NonFiniteError:
            self._settle_all({})
            self._buffers_may_differ = True
            self._pace.interrupt()
            raise
        self._settle_all(received)
        if self._stepper is not None:
            self._stepper.step_whole(missing)

    def _settle_all(self, received: Mapping[int, Tensor]) -> None:
        settle_all(self._parameters_sent)
        for index, gradient in received.items():
            self._parameters_sent[index].grad = settle(gradient, self._parameters_sent[index].grad)

    def _prepare_replan(self) -> None:
        if self._stepper is not None:
            self._stepper.prepare_replan()


def _is_sharded(parameter: Tensor) -> bool:
    group: Group | None = getattr(parameter, "hybridpar_group", None)
    return group is not None and group.size > 1


# For reports only: nothing that computes or communicates may look here.
_OPEN: weakref.WeakSet[DataParallel] = weakref.WeakSet()


def open_wrappers() -> list[DataParallel]:
    """All that are open in this process, for reports."""
    return sorted(_OPEN, key=id)


def _checked(reduction: str, named: Mapping[str, Tensor], bucket_bytes: int | None, plan: Plan | None) -> Plan:
    """The plan to begin with, if all arguments are right."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction: expected 'sum' or 'mean', got {reduction!r}")
    if not named:
        raise ValueError("DataParallel: expected parameters that require a gradient, got none; use the module bare")
    for name, parameter in named.items():
        if has_hooks(parameter):
            raise ValueError(
                f"DataParallel: expected a module that is in no DataParallel yet, got one whose {name} is: its "
                "gradient would be summed twice; close() the other one first"
            )
    if plan is None:
        return Plan(bucket_bytes)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {plan!r}; pass hp.Plan(bucket_bytes=...)")
    if bucket_bytes is not None:
        raise ValueError(f"expected bucket_bytes or plan, got both: {bucket_bytes} and {plan}; put it into the plan")
    return plan


def _check_same_model(module: nn.Module, replicated: Mapping[str, Tensor], group: Group) -> None:
    """Collective: all that is about to be broadcast, and what of it will be trained."""
    tensors = dict(replicated) | dict(module.named_buffers())
    frozen = {name for name, p in replicated.items() if not p.requires_grad}
    check_same_tensors(
        group,
        [f"{name} (frozen)" if name in frozen else name for name in tensors],
        [tensor.shape for tensor in tensors.values()],
        [tensor.dtype for tensor in tensors.values()],
    )


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """``state_dict`` names the wrapped module's tensors as if this one were not there."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
