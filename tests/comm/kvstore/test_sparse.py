from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridpar.comm.kvstore.sparse import RowSparse, as_rows, is_sparse, row_numbers, write_rows


def test_rows_that_repeat_are_added() -> None:
    rows = RowSparse(np.array([2, 0, 2], np.int32), np.array([[1.0, 2], [3, 4], [5, 6]]), (4, 2))
    assert rows.to_dense().tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]
    assert rows.indices.dtype == torch.int64 and repr(rows) == "RowSparse(3 rows of [4, 2], torch.float64)"


@pytest.mark.parametrize(
    ("indices", "values", "shape", "error", "text"),
    [
        ([0.0], [[1.0]], (2, 1), TypeError, "expected whole numbers as indices, got float64"),
        ([0, 1], [[1.0]], (2, 1), ValueError, r"expected indices \[k\] and values \['k', 1\] of a table \[2, 1\]"),
        ([0], [[1.0, 2.0]], (2, 1), ValueError, r"got int64\[1\] and float64\[1, 2\]"),
        ([2], [[1.0]], (2, 1), ValueError, r"expected row indices in \[0, 2\), got 2 to 2"),
        ([-1], [[1.0]], (2, 1), ValueError, r"got -1 to -1"),
        ([0], [1.0], (), ValueError, "of a table"),
    ],
)
def test_rows_that_do_not_fit_a_table_raise(
    indices: list[float], values: list[object], shape: tuple[int, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        RowSparse(np.array(indices), np.array(values), shape)


def test_sparse_tensors_of_torch_are_rows() -> None:
    dense = torch.tensor([[0.0, 0], [1, 0], [0, 2]])
    tensor = dense.to_sparse(1)
    assert is_sparse(tensor) and not is_sparse(dense) and not is_sparse(np.zeros(2))
    assert as_rows(tensor).to_dense().tolist() == dense.tolist()
    out = torch.zeros(3, 2).to_sparse(1)
    write_rows(out, torch.tensor([0, 2]), torch.tensor([[5.0, 6], [7, 8]]))
    assert out.to_dense().tolist() == [[5, 6], [0, 0], [7, 8]]


def test_a_tensor_that_is_sparse_in_every_element_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a sparse COO tensor with one sparse dimension.*use RowSparse"):
        as_rows(torch.eye(3).to_sparse())


def test_row_numbers_are_sorted_once_each_and_one_list_serves_all() -> None:
    found = row_numbers(np.array([3, 1, 3], np.int32), [4, 5], "pull")
    assert [one.tolist() for one in found] == [[1, 3], [1, 3]]
    assert [one.tolist() for one in row_numbers([[torch.tensor([0])], np.array([2])], [1, 3], "pull")] == [[0], [2]]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (np.array([0.5]), TypeError, r"pull: expected whole numbers \[k\] as row_ids, got float64\[1\]"),
        (np.array([[1]]), TypeError, r"got int64\[1, 1\]"),
        (np.array([4]), ValueError, r"pull: expected row indices in \[0, 4\), got 4 to 4"),
        ([np.array([1])] * 3, ValueError, "pull: expected row_ids for each of 2 outs, got 3"),
    ],
)
def test_row_numbers_that_do_not_fit_raise(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        row_numbers(given, [4, 4], "pull")
