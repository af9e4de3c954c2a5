"""``DataParallel``: a replicated module whose gradients are summed over the ranks while backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.agreement import check_same_settings, raise_together
from hybridpar.comm.buckets import check_same_tensors
from hybridpar.comm.coalesce import broadcast_tensors
from hybridpar.comm.engine import DEFAULT_BUCKET_BYTES, Engine
from hybridpar.comm.group import Group


class DataParallel(nn.Module):
    """Wraps a module that every rank holds whole.

    All ranks start with rank 0's parameters and buffers. At the end of every ``backward()`` outside ``no_sync()``
    each ``.grad`` holds the sum of what the ranks computed (see "sum everywhere" in the head's documentation), so
    the user's optimizer stays as it is. Gradients already there are kept, as in plain PyTorch: what was summed before
    is not summed again. Parameters that no rank used keep ``grad = None``; those that only other ranks used receive
    a gradient. Parameters of sharded heads inside the module are left alone, and so are those that require no gradient
    when the module is wrapped.

    ``state_dict`` is that of the wrapped module, without a prefix.

    Args:
        module: any module with dense gradients.
        group: the ranks.
        reduction: ``"sum"``, or ``"mean"`` for scripts whose loss is the mean over the local batch.
        bucket_bytes: gradients travel in buckets of up to this many bytes.
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before the first training forward,
            and before the first one after each synchronised backward. Those in between, as when several forward passes
            share one backward, leave them alone, because autograd may have saved them.

    Raises:
        ValueError: reduction is neither; the module has nothing to train, or is in a ``DataParallel`` already; or the
            ranks were given different settings (on every rank).
        CommunicationError: the ranks hold different models (on every rank, naming the first tensor that differs).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group,
        reduction: Literal["sum", "mean"] = "sum",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.group, self._broadcasts_buffers = module, group, broadcast_buffers
        replicated = {name: p for name, p in module.named_parameters() if not _is_sharded(p)}
        named = {name: p for name, p in replicated.items() if p.requires_grad}
        _check_same_model(module, replicated, group)
        raise_together(group, _problem(reduction, named))
        settings = {"reduction": reduction, "bucket_bytes": bucket_bytes, "broadcast_buffers": broadcast_buffers}
        check_same_settings(group, "DataParallel", settings)
        self._parameters_sent = list(named.values())
        self._frozen = {name: p for name, p in replicated.items() if not p.requires_grad}
        scale = 1.0 / group.size if reduction == "mean" else 1.0
        self._engine = Engine(group, bucket_bytes=bucket_bytes, scale=scale)
        # Gradients become ready from the last layer to the first.
        self._engine.register(list(named), self._parameters_sent, range(len(named) - 1, -1, -1))
        broadcast_tensors([*replicated.values(), *module.buffers()], group)
        self._synchronise = True
        self._backward_running = False
        self._buffers_may_differ = True
        self._set_aside: dict[int, Tensor] = {}
        # A hook on the tensor would also run for torch.autograd.grad, which does not touch .grad. The tensor does not
        # keep its accumulator alive.
        self._accumulators = [get_gradient_edge(parameter).node for parameter in self._parameters_sent]
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(self._parameters_sent):
            before, after = _Hook(self._before_accumulation, index), _Hook(self._after_accumulation, index)
            self._hooks.append(self._accumulators[index].register_prehook(before))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(after))
        weakref.finalize(self, _remove, self._hooks)
        module.__dict__[_KEEPER] = _Keeper(self)
        # Only where this module is a part of another one: load_state_dict below goes to the wrapped module at once.
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward.

        Raises:
            RuntimeError: training cannot go on: the last backward pass failed, ``close`` was called, or a parameter
                requires a gradient only since the module was wrapped.
        """
        if self._backward_running:
            raise RuntimeError("the last backward pass failed on this rank, so the ranks are out of step; start again")
        if torch.is_grad_enabled() and self.training:
            self._check_hooked()
            if self._synchronise and self._broadcasts_buffers and self._buffers_may_differ:
                self.broadcast_buffers()
                self._buffers_may_differ = False
        return self.module(*args, **kwargs)

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
        _remove(self._hooks)
        self.module.__dict__.pop(_KEEPER, None)
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

    def _before_accumulation(self, index: int, _: Any) -> None:
        """Note [sums are kept apart]: what is a sum already must not be summed again with what backward adds."""
        parameter = self._parameters_sent[index]
        if parameter.grad is None:
            return
        if getattr(parameter.grad, _SUMMED, False):
            self._set_aside[index], parameter.grad = parameter.grad, None
        elif (earlier := getattr(parameter.grad, _EARLIER, None)) is not None:
            # Backward with create_graph adds out of place: the next gradient is another tensor.
            self._set_aside[index] = earlier

    def _after_accumulation(self, index: int, parameter: Tensor) -> None:
        if index in self._set_aside:
            setattr(parameter.grad, _EARLIER, self._set_aside.pop(index))
        if not self._synchronise:
            return
        if not self._backward_running:
            self._backward_running = True
            # Runs on this thread when the whole backward pass is done, before backward() returns.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        self._engine.submit(index, self._gradient(index))

    def _gradient(self, index: int) -> Tensor:
        gradient = self._parameters_sent[index].grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise TypeError(f"DataParallel: expected dense gradients, got {gradient.layout}; use sparse=False")
        return gradient

    def _finish_backward(self) -> None:
        for index, parameter in enumerate(self._parameters_sent):
            # Accumulated under no_sync, but not touched by this last backward pass.
            local = parameter.grad is not None and not getattr(parameter.grad, _SUMMED, False)
            if local and not self._engine.submitted(index):
                self._engine.submit(index, self._gradient(index))
        received = self._engine.flush()
        for index, parameter in enumerate(self._parameters_sent):
            if index in received:
                earlier, parameter.grad = parameter.grad, received[index]
            else:
                earlier = getattr(parameter.grad, _EARLIER, None)
            if earlier is not None and parameter.grad is not None:
                parameter.grad.add_(earlier)
            if parameter.grad is not None:
                setattr(parameter.grad, _SUMMED, True)
                setattr(parameter.grad, _EARLIER, None)
        self._backward_running, self._buffers_may_differ = False, True


# Note [sums are kept apart]
# Plain PyTorch adds to the gradients that are there. After one synchronised backward pass they are sums over the
# ranks; if a second pass added to them and the result were summed, the first part would count once for each rank.
# So a gradient that holds a sum is marked, is put aside when backward is about to add to it, hangs on the new local
# gradient, and is added after that one has been summed. The marks live on the gradient tensors themselves:
# zero_grad() at any moment drops both (with set_to_none=False, all but a sum that already waits under no_sync).
_SUMMED, _EARLIER = "hybridpar_summed", "hybridpar_earlier"


def _is_sharded(parameter: Tensor) -> bool:
    group: Group | None = getattr(parameter, "hybridpar_group", None)
    return group is not None and group.size > 1


# Note [life of a wrapper]
# Gradients must be summed for as long as the module is trained, even where only the module is kept. But a hook that
# refers to its wrapper closes a cycle through C++, which Python's garbage collector cannot see: the engine's thread
# would never end. So hooks refer to it weakly, and the module keeps it, by a cycle that the collector sees.
_KEEPER = "_hybridpar_keeper"


class _Keeper:
    """Note [life of a wrapper]. Copies and pickles of the module come without the wrapper, as they have no hooks."""

    def __init__(self, owner: DataParallel | None) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[type[_Keeper], tuple[None]]:
        return _Keeper, (None,)


class _Hook:
    """Note [life of a wrapper]. A method and its first argument, for autograd to call."""

    def __init__(self, method: Callable[[int, Any], None], index: int) -> None:
        self._method, self._index = weakref.WeakMethod(method), index

    def __call__(self, value: Any) -> None:
        method = self._method()
        assert method is not None, "hooks are removed when their owner is dropped"
        method(self._index, value)


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def _is_wrapped(parameter: Tensor) -> bool:
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, _Hook) for hook in hooks.values())


def _problem(reduction: str, named: Mapping[str, Tensor]) -> ValueError | None:
    """What is wrong with the arguments. Returned, for all ranks to raise it together."""
    if reduction not in ("sum", "mean"):
        return ValueError(f"reduction: expected 'sum' or 'mean', got {reduction!r}")
    if not named:
        return ValueError("DataParallel: expected parameters that require a gradient, got none; use the module bare")
    for name, parameter in named.items():
        if _is_wrapped(parameter):
            return ValueError(
                f"DataParallel: expected a module that is in no DataParallel yet, got one whose {name} is: its "
                "gradient would be summed twice; close() the other one first"
            )
    return None


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
