"""Gradients on their way: what a DistributedOptimizer sends while backward runs, and waits for before it steps.

# Note [who reduces when]
A gradient is sent as soon as backward has accumulated it, the last of ``backward_passes_per_step`` times, or when the
last of those that go with it is ready. It is written on another thread when its average arrives, so nobody may touch
it until ``synchronize``. What no backward has touched on this rank is sent as zeros then, since other ranks may have
touched it.

# Note [gradients that share memory]
Torch may leave in ``grad`` a view of what the running backward still reads for other gradients, or of another
parameter's gradient: that of ``x.view(1, n) + parameter.view(1, n)`` is. A sum that is written there would spoil those.
So what shares its memory is copied before it is sent, and written when backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.horovod.bundles import Bundle, plan_bundles
from hybridpar.comm.horovod.collectives import sparse_allreduce_async
from hybridpar.comm.horovod.exchange import Exchange
from hybridpar.comm.horovod.process_sets import ProcessSet
from hybridpar.comm.horovod.reduce_op import ReduceOp
from hybridpar.comm.horovod.request import Operation

Wait = Callable[[], Tensor]


class Reducer:
    """Gradients of some parameters on their way.

    Args:
        names: of the parameters, the same on all ranks.
        groups: parameters that are sent when the last of them is ready. Without any, small ones are bundled.
    """

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        groups: Sequence[Sequence[nn.Parameter]],
        *,
        compression: Any,
        passes: int,
        op: ReduceOp,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names = {parameter: f"allreduce.{name}" for parameter, name in names.items()}
        self._compression, self._op, self._factors = compression, op, factors
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._bundles = [] if groups else plan_bundles(names, compression)
        self._bundle_of = {parameter: bundle for bundle in self._bundles for parameter in bundle.parameters}
        self._alone = [parameter for parameter in names if parameter not in self._bundle_of]
        self._group_of = {parameter: tuple(group) for group in groups for parameter in group}
        self.known = {id(parameter) for parameter in names}
        self.passes = passes
        self._passes_left: dict[nn.Parameter, int] = {}
        self._waits: dict[nn.Parameter, Operation | Wait] = {}
        self._sent: dict[nn.Parameter, tuple[Tensor, Any]] = {}
        # An optimizer that is no longer used must not send: parameters do not keep it alive.
        self._hook = _Hook(self)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._hook) for parameter in names]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    @property
    def under_way(self) -> bool:
        """Whether a backward has run since the last ``synchronize``."""
        return bool(self._passes_left)

    def add(self, parameter: nn.Parameter, name: str) -> None:
        """One more parameter, on all ranks. It is sent alone; in this step, when the others are waited for."""
        self._names[parameter] = f"allreduce.{name}"
        self._alone.append(parameter)
        self.known.add(id(parameter))
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))

    def reset(self) -> None:
        """Forget what backward has done; what was sent is waited for."""
        waits = [*self._waits.values(), *(bundle.operation for bundle in self._bundles if bundle.operation)]
        for wait in waits:
            self._result(wait)
        self._clear()

    def synchronize(self) -> None:
        """Note [who reduces when]. Gradients are those of all ranks afterwards.

        Raises:
            CommunicationError: a rank was lost or late, or has other gradients.
        """
        try:
            for bundle in self._bundles:
                if bundle.operation is None:
                    self._send_bundle(bundle)
            for parameter in self._alone:
                if parameter not in self._waits:
                    self._send(parameter)
            self._take_all()
        finally:
            self._clear()

    @torch.no_grad()
    def _take_all(self) -> None:
        """Raises the first failure when all have been waited for: until then results are written somewhere."""
        failure: Exception | None = None
        bundles = [partial(self._take_bundle, bundle) for bundle in self._bundles]
        alone = [partial(self._take, parameter) for parameter in self._waits]
        for take in (*bundles, *alone):
            try:
                take()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _clear(self) -> None:
        self._passes_left.clear()
        self._waits.clear()
        self._sent.clear()
        for bundle in self._bundles:
            bundle.reset()

    def ready(self, parameter: nn.Parameter) -> None:
        """A backward has accumulated its gradient."""
        left = self._passes_left.get(parameter, self.passes) - 1
        if left < 0:
            raise AssertionError(
                f"{self._names[parameter]}: gradients were computed more than backward_passes_per_step "
                f"({self.passes}) times before step() or synchronize(); raise it to accumulate gradients locally"
            )
        self._passes_left[parameter] = left
        if left:
            return
        bundle = self._bundle_of.get(parameter)
        if bundle is not None:
            bundle.missing.discard(parameter)
            if not bundle.missing:
                self._send_bundle(bundle)
            return
        group = self._group_of.get(parameter)
        if group is None:
            self._send(parameter)
        elif all(self._passes_left.get(member) == 0 for member in group):
            for member in group:
                self._send(member)

    @torch.no_grad()
    def _send_bundle(self, bundle: Bundle) -> None:
        bundle.operation = self._exchange.all_reduce(
            bundle.name, bundle.packed(), self._op, *self._factors, detail=bundle.detail
        )

    @torch.no_grad()
    def _send(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, name = parameter.grad, self._names[parameter]
        if grad.layout != torch.strided:
            if not self._sparse_as_dense:
                self._waits[parameter] = sparse_allreduce_async(grad, name, self._op, self._process_set)
                return
            grad = grad.to_dense()
        sent, context = self._compression.compress(grad)
        if _shares_memory(sent):  # Note [gradients that share memory]
            sent = sent.clone()
        self._sent[parameter] = sent, context
        self._waits[parameter] = self._exchange.all_reduce(name, sent, self._op, *self._factors)

    def _result(self, wait: Operation | Wait) -> Tensor:
        if isinstance(wait, Operation):
            result: Tensor = self._exchange.finished(wait)
            return result
        return wait()

    def _take_bundle(self, bundle: Bundle) -> None:
        assert bundle.operation is not None
        self._exchange.finished(bundle.operation)
        bundle.unpack()

    def _take(self, parameter: nn.Parameter) -> None:
        result = self._result(self._waits[parameter])
        grad = parameter.grad
        assert grad is not None
        if parameter in self._sent:
            sent, context = self._sent[parameter]
            if sent is grad:
                return
            result = self._compression.decompress(result, context)
        if grad.layout == torch.strided:
            grad.copy_(result)
        else:
            parameter.grad = result if result.layout != torch.strided else result.to_sparse()

    @property
    def _exchange(self) -> Exchange:
        return self._process_set.exchange


def _shares_memory(tensor: Tensor) -> bool:
    """Whether other tensors use its memory: one holder is the tensor, one the storage that is asked."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)


class _Hook:
    """Tells a reducer, as long as there is one."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)

    def __call__(self, parameter: Any) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.ready(parameter)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
