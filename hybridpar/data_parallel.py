"""``DataParallel``: a replicated module whose gradients are summed over the ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridpar.comm.coalesce import broadcast_tensors
from hybridpar.comm.engine import DEFAULT_BUCKET_BYTES, Engine
from hybridpar.comm.group import Group


class DataParallel(nn.Module):
    """Wraps a module that every rank holds whole.

    All ranks start with rank 0's parameters and buffers. At the end of every ``backward()`` outside ``no_sync()``
    each ``.grad`` holds the sum of what the ranks computed (see "sum everywhere" in the head's documentation), so
    the user's optimizer stays as it is. Gradients already there are kept, as in plain PyTorch: what was summed before
    is not summed again. Parameters that no rank used keep ``grad = None``; those that only other ranks used receive
    a gradient. Parameters of sharded heads inside the module are left alone.

    ``state_dict`` is that of the wrapped module, without a prefix.

    Args:
        module: any module with dense gradients.
        group: the ranks.
        reduction: ``"sum"``, or ``"mean"`` for scripts whose loss is the mean over the local batch.
        bucket_bytes: gradients travel in buckets of up to this many bytes.
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before each training forward.

    Raises:
        ValueError: reduction is neither; or the module has nothing to train.
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
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction: expected 'sum' or 'mean', got {reduction!r}")
        self.module, self.group, self._broadcasts_buffers = module, group, broadcast_buffers
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and not _is_sharded(p)}
        if not named:
            raise ValueError("DataParallel: expected parameters that require a gradient, got none; use the module bare")
        self._parameters_sent = list(named.values())
        scale = 1.0 / group.size if reduction == "mean" else 1.0
        self._engine = Engine(group, bucket_bytes=bucket_bytes, scale=scale)
        # Gradients become ready from the last layer to the first.
        self._engine.register(list(named), self._parameters_sent, range(len(named) - 1, -1, -1))
        replicated = [p for p in module.parameters() if not _is_sharded(p)]
        broadcast_tensors([*replicated, *module.buffers()], group)
        self._synchronise = True
        self._backward_running = False
        self._set_aside: dict[int, Tensor] = {}
        for index, parameter in enumerate(self._parameters_sent):
            parameter.register_hook(partial(self._before_accumulation, index))
            parameter.register_post_accumulate_grad_hook(partial(self._after_accumulation, index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._backward_running:
            raise RuntimeError("the last backward pass failed on this rank, so the ranks are out of step; start again")
        if torch.is_grad_enabled() and self.training and self._synchronise and self._broadcasts_buffers:
            self.broadcast_buffers()
        return self.module(*args, **kwargs)

    def broadcast_buffers(self) -> None:
        """Collective: give every rank rank 0's buffers, for example before an evaluation that the ranks share."""
        broadcast_tensors(self.module.buffers(), self.group)

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
        """The wrapped module's."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def close(self) -> None:
        """Free the engine. Collective where the library demands it."""
        self._engine.close()

    def _before_accumulation(self, index: int, _: Tensor) -> None:
        """Note [sums are kept apart]: what is a sum already must not be summed again with what backward adds."""
        parameter = self._parameters_sent[index]
        if parameter.grad is not None and getattr(parameter.grad, _SUMMED, False):
            self._set_aside[index], parameter.grad = parameter.grad, None

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
        self._backward_running = False


# Note [sums are kept apart]
# Plain PyTorch adds to the gradients that are there. After one synchronised backward pass they are sums over the
# ranks; if a second pass added to them and the result were summed, the first part would count once for each rank.
# So a gradient that holds a sum is marked, is put aside when backward is about to add to it, hangs on the new local
# gradient, and is added after that one has been summed. The marks live on the gradient tensors themselves:
# zero_grad() at any moment drops both.
_SUMMED, _EARLIER = "hybridpar_summed", "hybridpar_earlier"


def _is_sharded(parameter: Tensor) -> bool:
    group: Group | None = getattr(parameter, "hybridpar_group", None)
    return group is not None and group.size > 1
