"""Ranks that agree: on an error that only some of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group

Result = TypeVar("Result")

# What other ranks raise for an error of that name; anything else becomes a RuntimeError that names it.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, OSError, PermissionError, FileNotFoundError)
}


def together(group: Group, work: Callable[[], Result]) -> Result:
    """Collective: do ``work`` on every rank; if it fails on one of them, every rank raises.

    Args:
        work: must not itself communicate. Its ValueError, TypeError and OSError are shared.
    """
    problem: Exception | None = None
    try:
        result = work()
    except (OSError, ValueError, TypeError) as error:
        problem = error
    raise_together(group, problem)
    return result


def raise_together(group: Group, error: Exception | None) -> None:
    """Collective: if any rank has an error, every rank raises that of the first such rank."""
    reports = group.all_gather_json(None if error is None else _report(error))
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    if error is not None and group.rank == failed[0]:
        raise error
    kind, text = reports[failed[0]]
    if kind == NonFiniteError.__name__:
        ranks = tuple(rank for rank in failed if reports[rank][0] == kind)
        raise NonFiniteError("features", ranks, text)
    if kind not in _KINDS:
        raise RuntimeError(f"rank {failed[0]}: {kind}: {text}")
    raise _KINDS[kind](f"rank {failed[0]}: {text}")


def _report(error: Exception) -> tuple[str, str]:
    return type(error).__name__, error.detail if isinstance(error, NonFiniteError) else str(error)
