"""Ranks that agree: on an error that only some of them have, and on settings that all must share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group

Result = TypeVar("Result")

# What other ranks raise for an error of that class or of one derived from it, the most special first; anything else
# becomes a RuntimeError that names it.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, OSError, PermissionError, FileNotFoundError)
}


def together(group: Group, work: Callable[[], Result]) -> Result:
    """Collective: do ``work`` on every rank; if it fails on one of them, every rank raises.

    Args:
        work: must not itself communicate.
    """
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    raise_together(group, problem)
    return result


def raise_together(group: Group, error: Exception | None) -> None:
    """Collective: if any rank has an error, every rank raises that of the first such rank."""
    reports = group.all_gather_json(None if error is None else _report(error))
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    kind, text, tensor = reports[failed[0]]
    if kind == NonFiniteError.__name__:
        ranks = tuple(rank for rank in failed if reports[rank][0] == kind)
        raise NonFiniteError(tensor, ranks, text)
    if error is not None and group.rank == failed[0]:
        raise error
    if kind not in _KINDS:
        raise RuntimeError(f"rank {failed[0]}: {kind}: {text}")
    raise _KINDS[kind](f"rank {failed[0]}: {text}")


def check_same_settings(group: Group, what: str, settings: dict[str, Any]) -> None:
    """Collective. Raises ValueError on every rank, naming the first setting that differs and the ranks' values."""
    for rank, theirs in enumerate(everyone := group.all_gather_json(settings)):
        for name, first in everyone[0].items():
            if theirs[name] != first:
                raise ValueError(
                    f"{what}: expected the same {name} on every rank, got {first} on rank 0 and {theirs[name]} on "
                    f"rank {rank}; construct it with equal arguments everywhere"
                )


def _report(error: Exception) -> tuple[str, str, str]:
    if isinstance(error, NonFiniteError):
        return NonFiniteError.__name__, error.detail, error.tensor
    known = (kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind)
    return next(known, type(error).__name__), str(error), ""
