"""What fails on one rank fails on all of them, with the same kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hybridpar as hp
from hybridpar.comm.agreement import check_same_settings, raise_together, together
from tests.head.cases import errors_of
from tests.ranks import run_threads


def test_results_are_each_ranks_own_where_nothing_fails() -> None:
    assert run_threads(3, lambda group: together(group, lambda: group.rank * 10)) == [0, 10, 20]
    assert run_threads(2, lambda group: raise_together(group, None)) == [None, None]


ERRORS: dict[str, tuple[Exception, type[Exception]]] = {
    "value": (ValueError("expected 1, got 2"), ValueError),
    "type": (TypeError("expected 1, got 2"), TypeError),
    "os": (OSError("expected 1, got 2"), OSError),
    "not-found": (FileNotFoundError("expected 1, got 2"), FileNotFoundError),
    "permission": (PermissionError("expected 1, got 2"), PermissionError),
    "os-subclass": (NotADirectoryError("expected 1, got 2"), OSError),
    "value-subclass": (json.JSONDecodeError("expected 1, got 2", "", 0), ValueError),
    "other": (KeyError("expected 1, got 2"), RuntimeError),
}


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("failing", [{0}, {2}, {1, 2}], ids=str)
def test_an_error_of_one_rank_is_raised_on_all(what: str, failing: set[int]) -> None:
    raised, kind = ERRORS[what]

    def work(group: Any) -> None:
        def part() -> None:
            if group.rank in failing:
                raise raised

        together(group, part)

    errors = errors_of(3, work)
    first = min(failing)
    assert errors[first] is raised
    for rank in {0, 1, 2} - {first}:
        error = errors[rank]
        assert type(error) is kind
        assert f"rank {first}: " in str(error) and "expected 1, got 2" in str(error)


def test_the_group_goes_on_after_an_error() -> None:
    def work(group: Any) -> int:
        with pytest.raises(OSError, match="full"):
            raise_together(group, OSError("full") if group.rank == 1 else None)
        return int(together(group, lambda: group.rank))

    assert run_threads(2, work) == [0, 1]


def test_an_operating_system_error_arrives_as_one(tmp_path: Path) -> None:
    """A folder cannot be made below a file."""
    (tmp_path / "file").touch()

    def work(group: Any) -> None:
        together(group, lambda: (tmp_path / "file" / "folder").mkdir() if group.rank == 0 else None)

    assert all(isinstance(error, OSError) for error in errors_of(2, work))


def test_non_finite_values_are_named_with_all_their_ranks() -> None:
    def work(group: Any) -> None:
        bad = group.rank in (1, 2)
        raise_together(group, hp.NonFiniteError("features", (group.rank,), f"{group.rank} values") if bad else None)

    errors = errors_of(4, work)
    assert all(isinstance(error, hp.NonFiniteError) for error in errors)
    for rank in (0, 2, 3):
        error = errors[rank]
        assert isinstance(error, hp.NonFiniteError) and error.ranks == (1, 2) and error.detail == "1 values"


def test_settings_that_differ_are_named_on_every_rank() -> None:
    def work(group: Any) -> None:
        check_same_settings(group, "Thing", {"size": 3})
        check_same_settings(group, "Thing", {"size": 3, "colour": "red" if group.rank < 2 else "blue"})

    for error in errors_of(3, work):
        assert type(error) is ValueError
        assert "Thing: expected the same colour on every rank, got red on rank 0 and blue on rank 2" in str(error)
