"""Row-sparse values: some rows of a table, the others zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.kvstore.arrays import Array, as_tensor, is_mxnet, mxnet_module, wait_to_read
from hybridpar.comm.lanes.lane import describe


class RowSparse:
    """Some rows of a table [n, ...]; all others are zero.

    Pass it to ``init`` and ``push``, and as ``out`` to ``row_sparse_pull``, which replaces its rows.

    Args:
        indices: int [k], of the rows, in any order; repeated ones are added.
        values: [k, ...], in their order.
        shape: of the table.

    Attributes:
        indices: int64 tensor [k].
        values: tensor [k, ...].
        shape: tuple.

    Raises:
        TypeError: indices are not whole numbers.
        ValueError: the shapes do not fit together, or an index is not in [0, n).
    """

    def __init__(self, indices: Array, values: Array, shape: Sequence[int]) -> None:
        rows, data = as_tensor(indices), as_tensor(values)
        if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise TypeError(f"RowSparse: expected whole numbers as indices, got {describe(rows)}")
        self.shape = tuple(int(extent) for extent in shape)
        self.indices, self.values = rows.to(torch.int64), data
        if not self.shape or rows.dim() != 1 or tuple(data.shape) != (len(rows), *self.shape[1:]):
            raise ValueError(
                f"RowSparse: expected indices [k] and values {['k', *self.shape[1:]]} of a table {list(self.shape)}, "
                f"got {describe(rows)} and {describe(data)}"
            )
        check_range("RowSparse", self.indices, self.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def to_dense(self) -> Tensor:
        """The table [n, ...]."""
        table = self.values.new_zeros(self.shape)
        return table.index_add_(0, self.indices, self.values)

    def __repr__(self) -> str:
        return f"RowSparse({len(self.indices)} rows of {list(self.shape)}, {self.dtype})"


def check_range(what: str, indices: Tensor, rows: int) -> None:
    """Raises ValueError for an index that is not in [0, rows)."""
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
        raise ValueError(
            f"{what}: expected row indices in [0, {rows}), got {int(indices.min())} to {int(indices.max())}"
        )


def is_sparse(value: Any) -> bool:
    """Whether ``value`` holds rows: a RowSparse, a sparse tensor, or an MXNet NDArray that is not dense."""
    if isinstance(value, RowSparse):
        return True
    if isinstance(value, Tensor):
        return value.layout is not torch.strided
    return is_mxnet(value) and value.stype != "default"


def as_rows(value: Any) -> RowSparse:
    """The rows of a sparse value, without a copy where its library allows that.

    Raises:
        TypeError: a sparse value that does not consist of whole rows.
    """
    if isinstance(value, RowSparse):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.sparse_coo or value.sparse_dim() != 1:
            raise TypeError(
                f"expected a sparse COO tensor with one sparse dimension, got {value.layout} of shape "
                f"{list(value.shape)}; use RowSparse, or to_sparse(1)"
            )
        value = value.detach().coalesce()
        return RowSparse(value.indices()[0], value.values(), value.shape)
    if value.stype != "row_sparse":
        raise TypeError(f"expected a row_sparse NDArray, got {value.stype}; use tostype('row_sparse')")
    parts = value.indices, value.data
    for part in parts:
        wait_to_read(part)
    return RowSparse(as_tensor(parts[0]), as_tensor(parts[1]), value.shape)


def write_rows(out: Any, indices: Tensor, values: Tensor) -> None:
    """Replace the rows of a sparse value.

    Args:
        out: RowSparse, sparse COO tensor, or row_sparse NDArray.
        indices: int64 [k], ascending, none twice.
        values: [k, ...].
    """
    if isinstance(out, RowSparse):
        out.indices, out.values = indices, values.to(out.values.dtype)
    elif isinstance(out, Tensor):
        rows = torch.sparse_coo_tensor(indices[None], values, out.shape, is_coalesced=True, check_invariants=False)
        with torch.no_grad():
            out.copy_(rows)  # not of detach(): a sparse tensor gets other parts, which only it would know
    else:
        nd = mxnet_module("mxnet.ndarray")
        data, rows_nd = (nd.from_dlpack(part.__dlpack__()) for part in (values, indices))
        nd.sparse.row_sparse_array((data, rows_nd), shape=out.shape, ctx=out.context, dtype=out.dtype).copyto(out)
        out.wait_to_read()


def row_numbers(given: Any, sizes: Sequence[int], what: str) -> list[Tensor]:
    """The rows that are asked for, ascending and none twice: int64 [k] for each of several tables.

    Args:
        given: an array of whole numbers [k], or a list of them, which may be nested; one array counts for all tables.
        sizes: rows of each table.
        what: names the call in errors.

    Raises:
        TypeError: not whole numbers.
        ValueError: not one array for each table, or a row that is not there.
    """
    arrays = _flat(given)
    if len(arrays) == 1:
        arrays *= len(sizes)
    if len(arrays) != len(sizes):
        raise ValueError(f"{what}: expected row_ids for each of {len(sizes)} outs, got {len(arrays)}")
    found = []
    for array, size in zip(arrays, sizes, strict=True):
        wait_to_read(array)
        rows = as_tensor(array)
        if rows.is_floating_point() or rows.dim() != 1:
            raise TypeError(f"{what}: expected whole numbers [k] as row_ids, got {describe(rows)}")
        check_range(what, rows, size)
        found.append(torch.unique(rows.to(torch.int64)))
    return found


def _flat(given: Any) -> list[Any]:
    return [one for part in given for one in _flat(part)] if isinstance(given, list | tuple) else [given]
