"""DistributedOptimizer: any optimizer of torch's that steps with gradients averaged over the ranks.

# Note [a class of its own]
Scripts ask ``isinstance(optimizer, torch.optim.SGD)``, and learning-rate schedulers read and patch the optimizer they
are given. So the result is of a new class derived from that of the optimizer, and shares its parameter groups and
state with it; nothing is constructed again, so that classes with arguments of their own work, too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.horovod import asked
from hybridpar.comm.horovod.compression import Compression, check_compression
from hybridpar.comm.horovod.context import current
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set
from hybridpar.comm.horovod.reduce_op import ReduceOp
from hybridpar.comm.horovod.reducer import Reducer


class Distributed(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` puts before the class of an optimizer. Note [a class of its own]."""

    _reducer: Reducer | None
    _names: dict[nn.Parameter, str]
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks: for what changes them before ``step``, such as clipping.

        Use ``skip_synchronize`` around the ``step`` that follows.

        Raises:
            CommunicationError: a rank was lost or late, or has other gradients.
        """
        if self._reducer is not None:
            self._find_new(self._reducer)
            self._reducer.synchronize()
        self._synchronized = True

    def _find_new(self, reducer: Reducer) -> None:
        """Parameters of ``add_param_group``, and those that were frozen when the optimizer was made."""
        for place, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                if id(parameter) not in reducer.known and parameter.requires_grad:
                    reducer.add(parameter, self._names.get(parameter, f"parameter.{place}.{number}"))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block ``step`` takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many times backward runs before ``step``. Not between a backward and the step."""
        if self._reducer is not None:
            if self._reducer.under_way:
                raise ValueError("set_backward_passes_per_step: expected to be called after step(), before backward()")
            self._reducer.passes = _positive("backward_passes_per_step", passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's own, with the gradients of all ranks.

        Args:
            closure: computes gradients, and returns the loss; gradients are synchronized each time after it has run.

        Raises:
            CommunicationError: as ``synchronize``.
        """
        if closure is not None:
            return super().step(self._synchronizing(closure))
        if self._should_synchronize:
            if self._synchronized and not (self._reducer is not None and self._reducer.under_way):
                warnings.warn(
                    "step() after synchronize(): the gradients are not reduced again; call it inside "
                    "optimizer.skip_synchronize() to say so",
                    stacklevel=2,
                )
            else:
                self.synchronize()
        self._synchronized = False
        return super().step()

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            self._synchronized = False
            loss = closure()
            if self._should_synchronize and not self._synchronized:
                self.synchronize()
            self._synchronized = False
            return loss

        return synchronized

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own.

        Raises:
            AssertionError: between backward and ``step``: gradients are on their way.
        """
        if self._reducer is not None and self._reducer.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(); gradients are on their way, and would be changed under it"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's own; what backward has done since the last step is forgotten."""
        if self._reducer is not None:
            self._reducer.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer that steps with the gradients of all ranks, reduced while backward runs.

    Args:
        optimizer: any of torch's, or derived from it. The result is an instance of its class, and shares its parameter
            groups and state; do not step the one that was given any more.
        named_parameters: ``model.named_parameters()``: names, the same on all ranks. Without them parameters are
            numbered. May name more than the optimizer has, but not fewer.
        compression: the dtype of gradients on the way.
        backward_passes_per_step: how many times backward runs before ``step``; gradients are summed over them.
        op: Average or Sum (Min, Max, Product too, of what use they may be).
        gradient_predivide_factor: the average is divided by this before the sum, and by the rest after it. Here the sum
            is divided before in any case, see Note [one factor] in ``hybridpar.comm.horovod.reduce_op``.
        num_groups: Horovod's older name for ``groups``.
        groups: gradients that are sent when the last of them is ready: how many groups, or lists of parameters.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        process_set: the ranks. On others the optimizer steps alone.

    Raises:
        ValueError: names are not pairs, not unique, or leave out a parameter; factors or groups make no sense; not
            initialised.
        NotImplementedError: Adasum.
    """
    current()  # there must be ranks
    reduction = asked.reduction(None, op)
    if gradient_predivide_factor != 1 and reduction is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor: expected op hvd.Average with it, got another; leave it at 1.0")
    check_compression(compression)
    passes = _positive("backward_passes_per_step", backward_passes_per_step)
    names = _names(optimizer, named_parameters)
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    members = _groups(mine, groups if groups is not None else num_groups or None)
    name = type(optimizer).__name__
    made: Any = type(name, (Distributed, type(optimizer)), {"__module__": type(optimizer).__module__})
    result = object.__new__(made)
    # A scheduler made before may have put its own step into the instance, which would pass the class by.
    result.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    result._synchronized, result._should_synchronize, result._reducer = False, True, None
    result._names = names
    if process_set.included() and (process_set.size() or 0) > 1:
        result._reducer = Reducer(
            {parameter: names[parameter] for parameter in mine},
            members,
            compression=compression,
            passes=passes,
            op=reduction,
            factors=(1 / gradient_predivide_factor, float(gradient_predivide_factor)),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    return result


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    mine = [
        (f"{place}.{number}", parameter)
        for place, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {parameter: f"parameter.{name}" for name, parameter in mine}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters: expected pairs of a name and a parameter; pass model.named_parameters()")
    if twice := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(f"named_parameters: expected names that differ, got {', '.join(twice)} more than once")
    names = {parameter: name for name, parameter in pairs}
    missing = [(place, parameter) for place, parameter in mine if parameter not in names]
    if missing:
        place, parameter = missing[0]
        group, number = place.split(".")
        raise ValueError(
            f"named_parameters: expected a name for each parameter of the optimizer, got none for {len(missing)}, the "
            f"first of them number {number} of group {group}, {list(parameter.shape)}; pass those of the whole model"
        )
    return names


def _groups(parameters: list[nn.Parameter], groups: Any) -> list[list[nn.Parameter]]:
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups: expected a number from 1 on, or lists of parameters, got {groups}")
        count = min(groups, len(parameters))
        bounds = [len(parameters) * place // count for place in range(count + 1)] if count else []
        return [parameters[start:end] for start, end in pairwise(bounds)]
    lists = [list(group) for group in groups]
    everything = [parameter for group in lists for parameter in group]
    if not all(isinstance(parameter, Tensor) for parameter in everything):
        raise ValueError("groups: expected a number, or lists of parameters, got something else in a list")
    if len(set(everything)) != len(everything):
        raise ValueError("groups: expected each parameter at most once, got one twice")
    known = set(parameters)
    return [kept for group in lists if (kept := [parameter for parameter in group if parameter in known])]


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number from 1 on, got {value!r}")
    return value
