"""Arrays of MXNet: buffers that torch sees too, values of several devices as one, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mxnet
import numpy as np
import torch
from torch import Tensor

from hybridpar.comm.kvstore.arrays import as_tensor, library_array
from hybridpar.comm.kvstore.reducer import ReduceOp, Rows

NDArray: TypeAlias = Any  # mxnet.nd.NDArray; mxnet has no annotations
NDARRAY: type = mxnet.nd.NDArray

SPARSE = "row_sparse"
_SMALL_BYTES = 1 << 20


def classic(value: Any, what: str) -> NDArray:
    """``value`` as the NDArray that MXNet's operators of old take; one of ``mxnet.np`` shares its memory.

    Raises:
        TypeError: not an array of MXNet, or of a storage type other than default and row_sparse.
    """
    if isinstance(value, mxnet.np.ndarray):
        return value.as_nd_ndarray()
    if not isinstance(value, mxnet.nd.NDArray):
        raise TypeError(
            f"{what}: expected an MXNet NDArray, got {type(value).__name__}; use hybridpar.kvstore for others"
        )
    if value.stype not in ("default", SPARSE):
        raise TypeError(f"{what}: expected a dense or row_sparse NDArray, got {value.stype}; use tostype('row_sparse')")
    return value


def describe(array: NDArray) -> str:
    """Kind, dtype and shape, for error messages."""
    kind = "row_sparse " if array.stype == SPARSE else ""
    return f"{kind}{np.dtype(array.dtype).name}{list(array.shape)}"


class Buffer:
    """An NDArray in the memory of this host, and a tensor over the same memory.

    Attributes:
        array: dense. MXNet's engine orders who uses the memory.
        tensor: for functions of the engine that have the array.
        handle: of the array.
        address, nbytes: of the memory.
        number: of the function that was the last one to write it, see ``Outbox``; 0 where it was an operator.
        source: handle of the array that this function copies; 0 where it copies none, or there is no such function.
        is_small: whether functions of the engine copy it, rather than operators; see Note [copies in plain order].
    """

    def __init__(self, like: NDArray) -> None:
        self.array = mxnet.nd.zeros(like.shape, ctx=mxnet.cpu(), dtype=like.dtype)
        # Only now is there memory; it stays where it is, in plain order, since nothing but copies is written into it.
        self.array.wait_to_read()
        self.handle: int = self.array.handle.value
        self.tensor = as_tensor(self.array)
        self.address, self.nbytes = self.tensor.data_ptr(), self.tensor.nbytes
        self.number, self.source = 0, 0
        self.is_small = self.array.ndim == 1 and 0 < self.nbytes <= _SMALL_BYTES

    def merge(self, values: Sequence[NDArray], op: ReduceOp) -> None:
        """Write the values of several devices, combined. Returns at once."""
        array = self.array
        values[0].copyto(array)
        for value in values[1:]:
            other = value.as_in_context(array.context)
            if op == "max":
                mxnet.nd.maximum(array, other).copyto(array)
            elif op == "min":
                mxnet.nd.minimum(array, other).copyto(array)
            else:
                array += other
        if op == "mean" and len(values) > 1:
            array /= len(values)


def merged_rows(values: Sequence[NDArray]) -> Rows:
    """The rows of several devices, one after the other. Waits until they have been computed.

    Args:
        values: row_sparse [n, ...].

    Returns:
        Indices int64 [k], in any order, some perhaps twice; rows [k, ...].
    """
    indices, rows = [], []
    for value in values:
        # Both wait until the value is there.
        numbers, data = value.indices, value.data
        for part in (numbers, data):
            part.wait_to_read()
        indices.append(as_tensor(numbers.as_in_context(mxnet.cpu())).to(torch.int64))
        rows.append(as_tensor(data.as_in_context(mxnet.cpu())))
    if len(values) == 1:
        return indices[0], rows[0]
    return torch.cat(indices), torch.cat(rows)


def rows_array(indices: Tensor, rows: Tensor, shape: Sequence[int]) -> NDArray:
    """A row_sparse NDArray of these rows (ascending, none twice), which are copied."""
    if len(indices) == 0:
        return mxnet.nd.sparse.zeros(SPARSE, tuple(shape), dtype=dtype_name(rows))
    parts = from_torch(rows), from_torch(indices)
    array = mxnet.nd.sparse.row_sparse_array(parts, shape=tuple(shape), dtype=dtype_name(rows))
    array.wait_to_read()  # before the tensors may go
    return array


def full_rows(dense: NDArray) -> NDArray:
    """The same values as a row_sparse NDArray with all rows, zero ones too, as MXNet's optimizers ask of weights."""
    rows = mxnet.nd.arange(dense.shape[0], dtype="int64")
    return mxnet.nd.sparse.row_sparse_array((dense, rows), shape=dense.shape, dtype=dense.dtype)


def from_torch(tensor: Tensor) -> NDArray:
    """An NDArray over the memory of a tensor (of a copy, where it is not contiguous), which it keeps alive.

    Nobody orders who uses that memory: the tensor must hold its values, and be left alone while MXNet may use it.
    """
    return library_array(tensor.detach().contiguous(), "mxnet")


def dtype_name(tensor: Tensor) -> str:
    """The dtype of a tensor as MXNet takes it."""
    return str(tensor.dtype).removeprefix("torch.")
