"""Rules: functions that choose a Layout, by name or as objects, and the checks of what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hybridpar.partition.layout import Layout, as_integers, owner_dtype

Integers: TypeAlias = "Sequence[int] | npt.NDArray[Any] | torch.Tensor"
# A layout; or the owner (rank) of each class; or, for each rank, the ids of its classes in any order.
Partition: TypeAlias = "Layout | Integers | Sequence[Integers]"

ENTRY_POINTS = "hybridpar.partition_rules"

# The names are the only state of this module; what they stand for never changes once taken.
_RULES: dict[str, Rule] = {}


class Rule(Protocol):
    """Chooses where classes live. Called once on every rank, with the same arguments; must return the same."""

    def __call__(self, num_classes: int, num_ranks: int, /) -> Partition: ...


R = TypeVar("R", bound=Rule)


def register_rule(name: str) -> Callable[[R], R]:
    """Decorator that gives a rule a name. Raises ValueError where the name is taken."""

    def register(rule: R) -> R:
        if _RULES.setdefault(name, rule) is not rule:
            raise ValueError(f"expected a new rule name, got {name!r}, which is taken; choose another")
        return rule

    return register


def get_rule(rule: str | Rule) -> Rule:
    """The rule of that name, registered here or by an installed package's entry point; a rule itself is returned.

    Raises:
        ValueError: no rule has the name; the error lists those that exist.
        TypeError: neither a name nor something that can be called.
    """
    if not isinstance(rule, str):
        if not callable(rule):
            raise TypeError(f"expected the name of a rule or a function of (class count, ranks), got {rule!r}")
        return rule
    if rule in _RULES:
        return _RULES[rule]
    plugins = entry_points(group=ENTRY_POINTS)
    if rule in plugins.names:
        loaded: Rule = plugins[rule].load()
        return _RULES.setdefault(rule, loaded)
    known = ", ".join(sorted({*_RULES, *plugins.names}))
    raise ValueError(
        f"expected a known partition rule, got {rule!r}; known are: {known}. "
        "Import the module that registers yours first, or pass the rule itself"
    )


def build_layout(rule: str | Rule, num_classes: int, num_ranks: int) -> Layout:
    """Call a rule and check its result: every class on exactly one rank, every rank with at least one class.

    Raises:
        ValueError: fewer classes than ranks, or a result that breaks the above; the error names the rule, the first
            class that is wrong and the ranks involved.
        TypeError: the result is not a `Partition`.
    """
    if num_ranks < 1 or num_classes < num_ranks:
        raise ValueError(
            f"expected at least one class a rank, got {num_classes} classes for {num_ranks} ranks; "
            f"use at most {max(num_classes, 1)} ranks or more classes"
        )
    choose = get_rule(rule)
    name = f"rule {rule!r}" if isinstance(rule, str) else f"rule {getattr(rule, '__name__', type(rule).__name__)!r}"
    layout = _as_layout(choose(num_classes, num_ranks), num_classes, num_ranks, name)
    if (layout.num_classes, layout.num_ranks) != (num_classes, num_ranks):
        raise ValueError(
            f"expected {name} to place {num_classes} classes on {num_ranks} ranks, "
            f"got {layout.num_classes} classes on {layout.num_ranks} ranks"
        )
    if 0 in layout.sizes:
        raise ValueError(
            f"expected {name} to give every rank a class, got none on rank {layout.sizes.index(0)} of {num_ranks}; "
            "give it one, or use fewer ranks"
        )
    return layout


@register_rule("even")
def even(num_classes: int, num_ranks: int) -> Layout:
    """Contiguous ranges of equal size, one class more on the first `num_classes % num_ranks` ranks; no padding."""
    share, extra = divmod(num_classes, num_ranks)
    return Layout.contiguous([share + (rank < extra) for rank in range(num_ranks)])


@register_rule("striped")
def striped(num_classes: int, num_ranks: int) -> Layout:
    """Class c on rank c % num_ranks: spreads classes whose frequency falls with their id."""
    return Layout.striped(num_classes, num_ranks)


def _as_layout(result: Partition, num_classes: int, num_ranks: int, name: str) -> Layout:
    if isinstance(result, Layout):
        if type(result).__module__ != Layout.__module__:
            raise TypeError(
                f"expected {name} to return a layout made by Layout.contiguous, .striped or .from_owners, "
                f"got a {type(result).__name__}; return the owners of the classes instead"
            )
        return result
    if not isinstance(result, (Sequence, np.ndarray, torch.Tensor)) or isinstance(result, (str, bytes)):
        raise TypeError(
            f"expected {name} to return a Layout, the owner of each class, or the class ids of each rank, "
            f"got a {type(result).__name__}"
        )
    if len(result) and np.ndim(result[0]) > 0:
        return _from_class_ids(
            [as_integers(ids, f"class ids of {name}") for ids in result], num_classes, num_ranks, name
        )
    owners = as_integers(result, f"owners of {name}")
    if len(owners) != num_classes:
        where = f"class {len(owners)} is on no rank" if len(owners) < num_classes else "the last ones are not classes"
        raise ValueError(f"expected {num_classes} owners from {name}, got {len(owners)}: {where}")
    if not (owners.min() >= 0 and owners.max() < num_ranks):
        first = int(np.flatnonzero((owners < 0) | (owners >= num_ranks))[0])
        raise ValueError(
            f"expected {name} to name ranks from 0 to {num_ranks - 1}, got rank {owners[first]} for class {first}"
        )
    return Layout.from_owners(owners, num_ranks)


def _from_class_ids(ids_of: list[npt.NDArray[Any]], num_classes: int, num_ranks: int, name: str) -> Layout:
    if len(ids_of) != num_ranks:
        raise ValueError(f"expected class ids for each of {num_ranks} ranks from {name}, got {len(ids_of)} arrays")
    nobody = num_ranks
    owners = np.full(num_classes, nobody, dtype=owner_dtype(num_ranks + 1))
    for rank, ids in enumerate(ids_of):
        bad = np.flatnonzero((ids < 0) | (ids >= num_classes))
        if len(bad):
            raise ValueError(f"expected class ids in [0, {num_classes}) from {name}, got {ids[bad[0]]} on rank {rank}")
        taken = ids[owners[ids] != nobody]
        if len(taken):
            first = int(taken.min())
            raise ValueError(
                f"expected {name} to place every class once, got class {first} on ranks {owners[first]} and {rank}"
            )
        owners[ids] = rank
    missing = np.flatnonzero(owners == nobody)
    if sum(map(len, ids_of)) != num_classes - len(missing):
        first, rank = min((_first_doubled(ids), rank) for rank, ids in enumerate(ids_of) if _first_doubled(ids) >= 0)
        raise ValueError(f"expected {name} to place every class once, got class {first} twice on rank {rank}")
    if len(missing):
        raise ValueError(
            f"expected {name} to place every class, got class {missing[0]} (and {len(missing) - 1} others) "
            f"on none of the {num_ranks} ranks"
        )
    return Layout.from_owners(owners, num_ranks)


def _first_doubled(ids: npt.NDArray[Any]) -> int:
    """The smallest id that occurs twice, or -1."""
    ordered = np.sort(ids)
    doubled = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(doubled[0]) if len(doubled) else -1
