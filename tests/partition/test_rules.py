"""Rules: names, the built-in ones, and what happens to a result that is not a partition."""

from __future__ import annotations

import contextlib
import io
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.partition import Layout, build_layout, get_rule, register_rule, rules


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test registers into a copy of the names."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


@given(st.integers(1, 50), st.integers(1, 50))
def test_even_gives_the_remainder_to_the_first_ranks(num_classes: int, num_ranks: int) -> None:
    if num_classes < num_ranks:
        num_classes, num_ranks = num_ranks, num_classes
    layout = build_layout("even", num_classes, num_ranks)
    owners = [rank for rank, part in enumerate(np.array_split(np.arange(num_classes), num_ranks)) for _ in part]
    assert layout == Layout.from_owners(owners, num_ranks)
    assert layout.describe()["kind"] == "contiguous"


def test_striped_deals_classes_out() -> None:
    assert build_layout("striped", 7, 3).locate(torch.arange(7))[0].tolist() == [0, 1, 2, 0, 1, 2, 0]


OWNERS = [1, 0, 2, 1, 1]


@pytest.mark.parametrize(
    "result",
    [
        OWNERS,
        tuple(OWNERS),
        np.array(OWNERS, dtype=np.uint8),
        torch.tensor(OWNERS),
        torch.tensor(OWNERS, dtype=torch.int32),
        [[1], [4, 0, 3], [2]],
        [np.array([1]), torch.tensor([0, 3, 4]), [2]],
        Layout.from_owners(OWNERS, 3),
    ],
)
def test_a_rule_may_return_owners_or_ids_or_a_layout(result: Any) -> None:
    layout = build_layout(lambda num_classes, num_ranks: result, 5, 3)
    assert layout == Layout.from_owners(OWNERS, 3)
    assert layout.class_ids(1).tolist() == [0, 3, 4]


def test_two_dimensional_ids_are_one_row_for_each_rank() -> None:
    layout = build_layout(lambda num_classes, num_ranks: np.arange(6).reshape(2, 3), 6, 2)
    assert layout == Layout.contiguous([3, 3])


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        ([0, 1, 2, 0], ValueError, "expected 5 owners from rule 'mine', got 4: class 4 is on no rank"),
        ([0, 1, 2, 0, 0, 0], ValueError, "expected 5 owners from rule 'mine', got 6"),
        ([], ValueError, "expected 5 owners from rule 'mine', got 0: class 0 is on no rank"),
        ([0, 1, 3, 0, 2], ValueError, "rule 'mine' to name ranks from 0 to 2, got rank 3 for class 2"),
        ([0, 1, 2, -1, 2], ValueError, "got rank -1 for class 3"),
        ([0, 0, 2, 0, 2], ValueError, "rule 'mine' to give every rank a class, got none on rank 1 of 3"),
        ([0.0, 1.0, 2.0, 0.0, 0.0], TypeError, "owners of rule 'mine' as integers, got float64"),
        ([[0, 1], [2, 3], [4, 1]], ValueError, "rule 'mine' to place every class once, got class 1 on ranks 0 and 2"),
        ([[0, 1], [2, 3, 3], [4]], ValueError, "rule 'mine' to place every class once, got class 3 twice on rank 1"),
        ([[0, 1], [2], [4]], ValueError, r"rule 'mine' to place every class, got class 3 .* on none of the 3 ranks"),
        ([[0, 1], [2, 3, 4], []], ValueError, "got none on rank 2 of 3"),
        ([[0, 1], [2, 3, 4]], ValueError, "class ids for each of 3 ranks from rule 'mine', got 2"),
        ([[0, 1], [2, 3], [5]], ValueError, r"class ids in \[0, 5\) from rule 'mine', got 5 on rank 2"),
        ([[0, 1], [2, 3], [-1]], ValueError, "got -1 on rank 2"),
        ([[0, 1], [2, 3], [4.0]], TypeError, "class ids of rule 'mine' as integers, got float64"),
        (Layout.contiguous([2, 2, 2]), ValueError, "rule 'mine' to place 5 classes on 3 ranks, got 6 classes on 3"),
        (Layout.contiguous([2, 3]), ValueError, "rule 'mine' to place 5 classes on 3 ranks, got 5 classes on 2"),
        (Layout.contiguous([2, 0, 3]), ValueError, "got none on rank 1 of 3"),
        (None, TypeError, "rule 'mine' to return a Layout, .* got a NoneType"),
        ("01201", TypeError, "got a str"),
    ],
)
def test_a_result_that_is_no_partition_is_named(result: Any, error: type[Exception], words: str) -> None:
    register_rule("mine")(lambda num_classes, num_ranks: result)
    with pytest.raises(error, match=words):
        build_layout("mine", 5, 3)


@given(st.lists(st.lists(st.integers(-1, 6), max_size=6), min_size=1, max_size=4))
def test_ids_pass_exactly_when_each_class_is_placed_once_and_no_rank_is_empty(ids_of: list[list[int]]) -> None:
    def rule(num_classes: int, num_ranks: int) -> list[list[int]]:
        return ids_of

    partition = sorted(c for ids in ids_of for c in ids) == list(range(6)) and all(ids_of)
    if partition:
        layout = build_layout(rule, 6, len(ids_of))
        assert [layout.class_ids(rank).tolist() for rank in range(len(ids_of))] == [sorted(ids) for ids in ids_of]
    else:
        with pytest.raises(ValueError, match="rule 'rule'"):
            build_layout(rule, 6, len(ids_of))


@pytest.mark.parametrize("rule", ["even", "striped", lambda num_classes, num_ranks: [0]])
def test_fewer_classes_than_ranks_are_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match="at least one class a rank, got 2 classes for 3 ranks; use at most 2 ranks"):
        build_layout(rule, 2, 3)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"got 'evne'; known are: even, striped\."):
        get_rule("evne")
    with pytest.raises(TypeError, match="name of a rule or a function"):
        get_rule(3)  # type: ignore[arg-type]


def test_a_name_is_given_once() -> None:
    @register_rule("mine")
    def mine(num_classes: int, num_ranks: int) -> list[int]:
        return [0] * num_classes

    assert get_rule("mine") is mine
    assert get_rule(mine) is mine
    with pytest.raises(ValueError, match="'mine', which is taken"):
        register_rule("mine")(lambda num_classes, num_ranks: [0])
    with pytest.raises(ValueError, match="'even', which is taken"):
        register_rule("even")(mine)


def test_the_rule_is_called_with_classes_and_ranks() -> None:
    calls = []

    def rule(num_classes: int, num_ranks: int) -> list[int]:
        calls.append((num_classes, num_ranks))
        return [c % num_ranks for c in range(num_classes)]

    build_layout(rule, 7, 2)
    assert calls == [(7, 2)]


def test_an_error_inside_a_rule_is_not_hidden() -> None:
    def rule(num_classes: int, num_ranks: int) -> list[int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_layout(rule, 7, 2)


def test_installed_packages_bring_rules_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = EntryPoints([EntryPoint("installed", "hybridpar.partition.rules:striped", rules.ENTRY_POINTS)])
    monkeypatch.setattr(rules, "entry_points", lambda group: installed.select(group=group))
    assert build_layout("installed", 5, 2) == Layout.striped(5, 2)
    with pytest.raises(ValueError, match="known are: even, installed, striped"):
        get_rule("other")


def python_blocks(name: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / name).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_documented_example_runs_and_prints_what_the_page_says() -> None:
    example, asking = python_blocks("partition.md")
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/partition.md", "exec"), names)
    page = (Path(__file__).parents[2] / "docs" / "partition.md").read_text()
    assert f"It prints `{printed.getvalue().strip()}`." in page
    assert names["layout"].sizes == (555_557, 277_777, 166_666)

    names["class_ids"] = torch.tensor([0, 555_556, 555_557, 999_999])
    exec(compile(asking, "docs/partition.md", "exec"), names)
    assert names["ranks"].tolist() == [0, 0, 1, 2]
    assert names["rows"].tolist() == [0, 555_556, 0, 166_665]
