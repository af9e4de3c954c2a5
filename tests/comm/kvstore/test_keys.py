from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar.comm.kvstore.keys import pairs
from hybridpar.comm.kvstore.sparse import RowSparse

A, B, C, D = (np.full(2, float(value)) for value in range(4))
ROWS = RowSparse(np.array([0]), np.zeros((1, 2)), (3, 2))


def _same(found: list[tuple[Any, list[Any]]], expected: list[tuple[Any, list[Any]]]) -> bool:
    return [key for key, _ in found] == [key for key, _ in expected] and all(
        len(got) == len(wanted) and all(one is other for one, other in zip(got, wanted, strict=True))
        for (_, got), (_, wanted) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("keys", "values", "expected"),
    [
        (3, A, [(3, [A])]),
        ("w", A, [("w", [A])]),
        ("w", ROWS, [("w", [ROWS])]),
        (np.int64(3), A, [(3, [A])]),
        ("w", [A, B], [("w", [A, B])]),
        (["a", "b"], [A, B], [("a", [A]), ("b", [B])]),
        (("a", "b"), (A, B), [("a", [A]), ("b", [B])]),
        (["a", "b"], [[A, B], C], [("a", [A, B]), ("b", [C])]),
        ([5, 5, 7], [A, B, C], [(5, [A, B]), (7, [C])]),
        ([7, 5, 7], [A, [B, C], D], [(7, [A, D]), (5, [B, C])]),
        ([["a", "b"], "a"], [[A, B], C], [("a", [A, C]), ("b", [B])]),
        ([], [], []),
    ],
)
def test_all_shapes_of_a_call_give_each_key_once_with_all_its_values(keys: Any, values: Any, expected: Any) -> None:
    assert _same(pairs(keys, values, "push"), expected)


def test_keys_of_numpy_become_int() -> None:
    assert type(pairs(np.int32(3), A, "push")[0][0]) is int


@pytest.mark.parametrize(
    ("keys", "values", "error", "text"),
    [
        (["a", 1], [A, B], TypeError, "push: expected keys of one type in a call, got 'a' and 1"),
        ([1, ["b"]], [A, [B]], TypeError, "push: expected keys of one type in a call, got 1 and 'b'"),
        (["a", "b"], [A], ValueError, "push: expected as many values as keys, 2, got 1"),
        (["a", "b"], A, ValueError, "push: expected as many values as keys, 2, got one ndarray"),
        (2.5, A, TypeError, "push: expected int or str keys, got float"),
        (True, A, TypeError, "push: expected int or str keys, got bool"),
        (None, A, TypeError, "push: expected int or str keys, got NoneType"),
        (np.array([1]), A, TypeError, "push: expected int or str keys, got ndarray"),
        ("a", 3.0, TypeError, "push of key 'a': expected an array or a list of arrays, got float"),
        ("a", [A, 3.0], TypeError, "push of key 'a': expected arrays, got float"),
        ("a", [[A]], TypeError, "push of key 'a': expected arrays, got list"),
        ("a", [], ValueError, "push of key 'a': expected at least one array, got an empty list"),
    ],
)
def test_what_does_not_fit_together_raises(keys: Any, values: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        pairs(keys, values, "push")


def test_tensors_are_values_and_not_lists() -> None:
    tensor = torch.zeros(3, 2)
    assert _same(pairs("a", tensor, "push"), [("a", [tensor])])
