"""Which gradients are sums over the ranks already.

# Note [sums are kept apart]
Plain PyTorch adds to the gradients that are there. After one synchronised backward pass they are sums over the
ranks; if a second pass added to them and the result were summed, the first part would count once for each rank.
So a gradient that holds a sum is marked, is put aside when backward is about to add to it, is the mark of the new
local gradient, and is added after that one has been summed. The marks live on the gradient tensors themselves:
zero_grad() at any moment drops both (with set_to_none=False, all but a sum that already waits under no_sync).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridpar.kernels import _native

_MARK = "hybridpar_sum"
_SUM = True  # survives copying


def is_sum(gradient: Tensor) -> bool:
    """Whether a gradient is nothing but a sum."""
    return getattr(gradient, _MARK, None) is _SUM


def put_aside(parameter: Tensor) -> Tensor | None:
    """Backward is about to add to ``.grad``, which is not None: the sum that is in it, or waits on it."""
    gradient = parameter.grad
    mark: Any = getattr(gradient, _MARK, None)
    if mark is not _SUM:
        # Backward with create_graph adds out of place: the next gradient is another tensor.
        return mark  # type: ignore[no-any-return]
    parameter.grad = None
    return gradient


def wait_on(gradient: Tensor | None, earlier: Tensor) -> None:
    """``earlier`` is a sum that is to be added when ``gradient``, which is local, has been summed."""
    if gradient is not None:  # else a hook of the user's has dropped it, and the sum with it, as zero_grad() would
        setattr(gradient, _MARK, earlier)


def settle(gradient: Tensor | None, earlier: Any = None) -> Tensor | None:
    """``gradient`` is a sum now; an earlier one that waits on it, or is given, is added."""
    if gradient is None:
        return None
    earlier = getattr(gradient, _MARK, None) if earlier is None else earlier
    if earlier is not None and earlier is not _SUM:
        gradient.add_(earlier)
    setattr(gradient, _MARK, _SUM)
    return gradient


def settle_all(parameters: Sequence[Tensor]) -> None:
    """All gradients of ``parameters`` are sums now."""
    for parameter in _native.mark_gradients(list(parameters), _MARK, _SUM):
        settle(parameter.grad)
