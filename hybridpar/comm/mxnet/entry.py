"""One key of the MXNet store: its value, and the pushes of rows that have not been applied yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mxnet
import numpy as np

from hybridpar.comm.kvstore.compression import Compression
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Rows, name_of
from hybridpar.comm.mxnet.arrays import SPARSE, Buffer, NDArray, classic, describe, full_rows, rows_array
from hybridpar.comm.mxnet.engine import Engine
from hybridpar.comm.mxnet.outbox import Push

Updater = Callable[[Any, Any, Any], object]


def updater_of(optimizer: Any) -> Updater:
    """MXNet's own updater. Raises TypeError for what is not one of its optimizers."""
    if not isinstance(optimizer, mxnet.optimizer.Optimizer):
        raise TypeError(
            f"set_optimizer: expected an mxnet.optimizer.Optimizer, got {type(optimizer).__name__}; "
            "use mx.optimizer.create"
        )
    updater: Updater = mxnet.optimizer.get_updater(optimizer)
    return updater


class Entry:
    """A key and what is stored for it.

    # Note [memory of a key]
    The sum of a push is made in a buffer. Without an updater it replaces the stored value: the two change places, and
    nothing is copied. Whoever still reads the old value does so before the next push may write it; MXNet's engine sees
    to that.

    Args:
        first: what holds the stored value.
        sparse: whether the value was row-sparse, so that it is stored with all its rows, as MXNet's servers do it.
        updates: whether an updater, where there is one, is asked; otherwise pushes replace the value.
    """

    def __init__(self, key: Key, first: Buffer, *, sparse: bool, updates: bool) -> None:
        self.key, self.sparse, self.updates = key, sparse, updates
        self._stored, self._spare = first, None if sparse else Buffer(first.array)
        self.dtype = first.tensor.dtype
        self.value: NDArray = first.array
        self.is_small = first.is_small and not sparse
        self._pending: deque[Future[Rows]] = deque()

    def begin(self) -> None:
        """The first buffer holds the value of rank 0."""
        if self.sparse:
            self.value = full_rows(self._stored.array)
            self.value.wait_to_read()
            del self._stored

    def checked(self, values: Sequence[Any], what: str) -> tuple[list[NDArray], bool]:
        """The values of a push, and whether they are rows.

        Raises:
            TypeError: no NDArray, another dtype, dense and row-sparse ones mixed, dense ones for a row-sparse key.
            ValueError: another shape.
        """
        name = f"{what} of {name_of(self.key)}"
        arrays = [classic(value, name) for value in values]
        sparse = arrays[0].stype == SPARSE
        for array in arrays:
            if (array.stype == SPARSE) != sparse or (self.sparse and not sparse):
                expected = "row_sparse values" if self.sparse else "values of one storage type"
                raise TypeError(f"{name}: expected {expected}, got {', '.join(map(describe, arrays))}")
            if array.shape != self.value.shape:
                raise ValueError(f"{name}: expected {describe(self.value)} as initialised, got {describe(array)}")
            if np.dtype(array.dtype) != np.dtype(self.value.dtype):
                raise TypeError(f"{name}: expected {describe(self.value)} as initialised, got {describe(array)}")
        return arrays, sparse

    def checked_out(self, out: Any, what: str) -> NDArray:
        """An array that is to be filled.

        Raises:
            TypeError: no NDArray, or floating-point numbers into whole ones or the reverse.
            ValueError: another shape.
        """
        name = f"{what} of {name_of(self.key)}"
        array = classic(out, name)
        if array.shape != self.value.shape:
            raise ValueError(f"{name}: expected an out like {describe(self.value)}, got {describe(array)}")
        kinds = {np.dtype(one.dtype).kind for one in (array, self.value)}
        if len(kinds) > 1 and "f" in kinds:
            raise TypeError(f"{name}: expected an out like {describe(self.value)}, got {describe(array)}")
        return array

    def check_terms(self, sparse: bool, op: ReduceOp, compression: Compression | None) -> None:
        """What cannot be pushed so is refused before anything is sent.

        Raises:
            ValueError: the op does not go with rows or with the compression.
            TypeError: the compression or the op does not go with the dtype.
        """
        name = f"push of {name_of(self.key)}"
        if sparse and op != "sum":
            raise ValueError(f"{name}: expected op 'sum' for row_sparse values, got {op!r}")
        dtype = self.dtype
        if compression is not None and compression.applies(name, dtype) and op not in ("sum", "mean"):
            raise ValueError(f"{name}: expected op 'sum' or 'mean' with {compression}, got {op!r}")
        if op == "mean" and not dtype.is_floating_point:
            raise TypeError(f"{name}: expected floating-point values for 'mean', got {describe(self.value)}")

    def push_of(self, source: NDArray, updater: Updater | None, *, back: bool = False) -> Push:
        """Of one plain array, which is copied when it has been computed."""
        assert self._spare is not None
        return Push(self.key, self._spare, None, source, self._after(updater), back)

    def merge(
        self, values: Sequence[NDArray], op: ReduceOp, compression: Compression | None, updater: Updater | None
    ) -> Push:
        """Of the values of this rank's devices, which operators write into the buffer."""
        assert self._spare is not None
        self._spare.merge(values, op)
        return Push(self.key, self._spare, compression, None, self._after(updater))

    def _after(self, updater: Updater | None) -> Buffer | None:
        """Note [one push after the other] in the outbox."""
        return self._stored if self.is_replaced(updater) and not self.sparse else None

    def is_replaced(self, updater: Updater | None) -> bool:
        """Whether what is pushed replaces the value, rather than being given to the updater."""
        return updater is None or not self.updates

    def apply(self, buffer: Buffer, updater: Updater | None) -> None:
        """What is in the buffer, once it is there, is a new gradient, or the new value. Returns at once."""
        if updater is not None and self.updates:
            self._operators_write()
            updater(self.key, buffer.array, self.value)
            return
        self._stored, self._spare = buffer, self._stored
        self.value = buffer.array

    def _operators_write(self) -> None:
        if not self.sparse:
            self._stored.number = 0

    def await_rows(self, future: Future[Rows]) -> None:
        """A push of rows is on its way."""
        self._pending.append(future)

    def settle(self, updater: Updater | None) -> None:
        """Wait for pushes of rows, and apply them in order.

        Raises:
            RuntimeError: one of them failed; a CommunicationError, where it was the first.
        """
        while self._pending:
            gradient = rows_array(*self._pending.popleft().result(), self.value.shape)
            self._operators_write()
            if updater is not None and self.updates:
                updater(self.key, gradient, self.value)
            elif self.sparse:
                self.value = full_rows(gradient.tostype("default"))
            else:
                gradient.tostype("default").copyto(self.value)

    def is_plain(self, array: NDArray, engine: Engine) -> bool:
        """Whether functions of the engine can copy between an array and the value, which is small."""
        return engine.is_plain(array.handle.value, self._stored.handle)

    def fill(self, out: NDArray, engine: Engine) -> None:
        """Copy the value into a plain array. Returns at once."""
        stored, handle = self._stored, out.handle.value
        # What was pushed is in use until the sum is there.
        number = 0 if handle == stored.source else stored.number
        engine.fill(handle, stored.handle, stored.address, stored.nbytes, number)

    def write(self, out: NDArray) -> None:
        """Copy the value. Returns at once."""
        (self.value.tostype("default") if self.sparse else self.value).copyto(out)

    def write_rows(self, out: NDArray, rows: NDArray) -> None:
        """Copy these rows (int64, ascending, none twice) into a row_sparse ``out``. Returns at once."""
        mxnet.nd.sparse.retain(self.value, rows).copyto(out)
