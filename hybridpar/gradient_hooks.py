"""Hooks around the moment in which autograd adds to a parameter's gradient.

# Note [life of a wrapper]
Gradients must be summed for as long as the module is trained, even where only the module is kept. But a hook that
refers to its wrapper closes a cycle through C++, which Python's garbage collector cannot see: the engine's thread
would never end. So hooks refer to it weakly, and the module keeps it, by a cycle that the collector sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

_KEEPER = "_hybridpar_keeper"


class GradientHooks:
    """Calls two methods of a wrapper for every gradient: before backward adds to ``.grad``, and after it did.

    Args:
        module: keeps the wrapper alive.
        parameters: whose gradients.
        before: method of the wrapper, called with an index into ``parameters`` and the parameter.
        after: the same.
        always: False: ``before`` is only called where there is a gradient to add to.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Tensor],
        before: Callable[[int, Tensor], None],
        after: Callable[[int, Tensor], None],
        *,
        always: bool = False,
    ) -> None:
        self._module = module
        # A hook on the tensor would also run for torch.autograd.grad, which does not touch .grad. The tensor does not
        # keep its accumulator alive.
        self._accumulators = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            prehook = _before(before, index, parameter, always)
            self._handles.append(self._accumulators[index].register_prehook(prehook))
            self._handles.append(parameter.register_post_accumulate_grad_hook(_after(after, index)))
        owner = before.__self__  # type: ignore[attr-defined]
        weakref.finalize(owner, _remove, self._handles)
        module.__dict__[_KEEPER] = _Keeper(owner)

    def __bool__(self) -> bool:
        """Whether they are there still."""
        return bool(self._handles)

    def remove(self) -> None:
        """Take them away, and let go of the module."""
        _remove(self._handles)
        self._module.__dict__.pop(_KEEPER, None)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is watched already."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return any(getattr(hook, "__qualname__", "").startswith(_after.__qualname__) for hook in hooks.values())


class _Keeper:
    """Note [life of a wrapper]. Copies and pickles of the module come without the wrapper, as they have no hooks."""

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[type[_Keeper], tuple[None]]:
        return _Keeper, (None,)


# Autograd calls these a thousand times in a step of a large model: closures are the fastest that Python has.
# Note [life of a wrapper]: they hold its class's function and refer to itself weakly; it takes them away when it goes.


def _before(method: Any, index: int, parameter: Tensor, always: bool) -> Callable[[Any], None]:
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(_: Any) -> None:
        if always or parameter.grad is not None:
            function(owner(), index, parameter)

    return call


def _after(method: Any, index: int) -> Callable[[Tensor], None]:
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(parameter: Tensor) -> None:
        function(owner(), index, parameter)

    return call


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()
