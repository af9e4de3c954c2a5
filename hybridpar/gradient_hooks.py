"""Hooks around the moment in which autograd adds to a parameter's gradient.

# Note [life of a wrapper]
Gradients must be summed for as long as the module is trained, even where only the module is kept. But a hook that
refers to its wrapper closes a cycle through C++, which Python's garbage collector cannot see: the engine's thread
would never end. So hooks refer to it weakly, and the module keeps it, by a cycle that the collector sees.

# Note [one hook for each]
Autograd needs about a microsecond to call a hook, and a large model has a thousand parameters. Only the hook in front
can prevent that backward adds to a gradient. So it is the one that all parameters have, and it counts, in compiled
code: for most gradients of an ordinary backward pass, those that have no earlier one and leave their bucket incomplete,
that is all there is to do. Python, which would run with cold caches between gradients, is called for the others. The
hook behind is added to those of which somebody must know when they are done, which are the last ones of their buckets.
It can be added from the hook in front: autograd looks for it when it has accumulated.

# Note [other accumulators]
The hook in front belongs to the parameter's accumulator, and torch gives the parameter another one when its dtype or
device changes. The hook behind belongs to the parameter itself. So that a change does not go unnoticed, some parameters
are followed from the beginning, and gradients that came without the hook in front are looked into.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hybridpar.kernels import _native

_KEEPER = "_hybridpar_keeper"
# On accumulators, whose metadata are copied and saved with nothing.
_WATCHED = "hybridpar"


class GradientHooks:
    """Calls methods of a wrapper around the accumulation of every gradient.

    Args:
        module: keeps the wrapper alive.
        parameters: whose gradients.
        before: method of the wrapper, called with an index into ``parameters`` and the parameter when backward is
            about to add to its ``.grad``.
        after: the same, once it has; for parameters that were given to ``follow``.
        arrivals: while it is ``counting``, gradients of which nothing else must be known are added to it without a call
            of ``before``: see Note [one hook for each].
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Tensor],
        before: Callable[[int, Tensor], None],
        after: Callable[[int, Tensor], None],
        arrivals: _native.Arrivals,
    ) -> None:
        self._module, self._parameters, self._arrivals = module, parameters, arrivals
        self._owner = weakref.ref(before.__self__)  # type: ignore[attr-defined]
        self._after = after.__func__  # type: ignore[attr-defined]
        self._before = _before(self._owner, before.__func__)  # type: ignore[attr-defined]
        # A hook on the tensor would also run for torch.autograd.grad, which does not touch .grad. The tensor does not
        # keep its accumulator alive.
        self._accumulators = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles: list[RemovableHandle] = []
        self._followed = [False] * len(parameters)
        for index in range(len(parameters)):
            self._watch(index)
        owner = self._owner()
        self._remove = weakref.finalize(owner, _remove, self._handles, self._accumulators)
        module.__dict__[_KEEPER] = _Keeper(owner)

    def follow(self, index: int) -> None:
        """From now on ``after`` is called for a parameter. In ``before``: for the accumulation at hand already."""
        if not self._followed[index]:
            self._followed[index] = True
            hook = _after(self._owner, self._after, index)
            self._handles.append(self._parameters[index].register_post_accumulate_grad_hook(hook))

    def renew(self, index: int) -> bool:
        """Note [other accumulators]: whether the parameter has another one, which is watched from now on."""
        parameter = self._parameters[index]
        if not parameter.requires_grad or get_gradient_edge(parameter).node is self._accumulators[index]:
            return False
        self._accumulators[index] = get_gradient_edge(parameter).node
        self._watch(index)
        return True

    def _watch(self, index: int) -> None:
        node = self._accumulators[index]
        hook = self._arrivals.hook(index, self._parameters[index], self._before)
        self._handles.append(node.register_prehook(hook))
        _metadata(node)[_WATCHED] = True

    def __bool__(self) -> bool:
        """Whether they are there still."""
        return self._remove.alive

    def remove(self) -> None:
        """Take them away, and let go of the module."""
        self._remove()
        self._module.__dict__.pop(_KEEPER, None)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is watched already."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    followed = any(getattr(hook, "__qualname__", "").startswith(_after.__qualname__) for hook in hooks.values())
    return followed or _WATCHED in _metadata(get_gradient_edge(parameter).node)


def _metadata(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata  # torch's stub takes it for a method
    return found


class _Keeper:
    """Note [life of a wrapper]. Copies and pickles of the module come without the wrapper, as they have no hooks."""

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[type[_Keeper], tuple[None]]:
        return _Keeper, (None,)


# Note [one hook for each]: as little of its own as can be for each parameter, since the caches are full of gradients.
# Note [life of a wrapper]: they hold its class's function and refer to itself weakly; it takes them away when it goes.


def _before(owner: Callable[[], Any], function: Callable[[Any, int, Tensor], None]) -> Callable[[int, Tensor], None]:
    def call(index: int, parameter: Tensor) -> None:
        function(owner(), index, parameter)

    return call


def _after(
    owner: Callable[[], Any], function: Callable[[Any, int, Tensor], None], index: int
) -> Callable[[Tensor], None]:
    def call(parameter: Tensor) -> None:
        function(owner(), index, parameter)

    return call


def _remove(hooks: list[RemovableHandle], accumulators: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
    for node in accumulators:
        _metadata(node).pop(_WATCHED, None)
