"""One key of the plain store: its value, and the pushes that have not been applied yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from hybridpar.comm.kvstore.arrays import Array, Library, as_tensor, wait_to_read, wait_to_write
from hybridpar.comm.kvstore.buffer import Buffer
from hybridpar.comm.kvstore.compression import Compression, Quantiser, TwoBit
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Rows, name_of
from hybridpar.comm.kvstore.sparse import RowSparse, as_rows, is_sparse, write_rows
from hybridpar.comm.kvstore.updater import Updater
from hybridpar.comm.lanes.lane import describe

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Awaited(Protocol):
    """A future, or what is like one."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Entry:
    """A key and what is stored for it.

    # Note [memory of a key]
    A push is copied into a buffer, because the caller may reuse the array at once, and summed there. Without an updater
    the sum replaces the stored value: the two change places, and nothing is copied. So a key that is pushed and pulled
    in turn has two tensors in all; one more for every push that is not pulled meanwhile.

    Args:
        stored: the value. It belongs to the entry.
        sparse: whether pushes are rows.
        updates: whether an updater, where there is one, is asked; otherwise pushes replace the value.
        library: of the value that the key was initialised with.
    """

    def __init__(self, key: Key, stored: Tensor, *, sparse: bool, updates: bool, library: Library) -> None:
        self.key, self.sparse, self.updates, self.library = key, sparse, updates, library
        self.shape = tuple(stored.shape)
        self._shape, self._dtype = stored.shape, stored.dtype
        self._stored = Buffer(stored)
        values = self._stored.values
        self.small_dtype = None if sparse or values is None else values.dtype
        self._pending: deque[tuple[Awaited, Buffer | None]] = deque()
        self._spare: list[Buffer] = []
        self._quantisers: list[Quantiser] = []

    @property
    def stored(self) -> Tensor:
        return self._stored.tensor

    def await_sum(self, awaited: Awaited, buffer: Buffer) -> None:
        """A dense push is on its way in a buffer of this entry."""
        self._pending.append((awaited, buffer))

    def await_rows(self, awaited: Future[Rows]) -> None:
        """A push of rows is on its way."""
        self._pending.append((awaited, None))

    def settle(self, updater: Updater | None, *, wait: bool = True) -> None:
        """Apply pushes in their order: all of them, or without ``wait`` those that have arrived.

        Raises:
            CommunicationError: one of them failed; it counts as applied.
        """
        pending = self._pending
        while pending and (wait or pending[0][0].done()):
            awaited, buffer = pending.popleft()
            result = awaited.result()
            if buffer is None:
                self._apply_rows(result, updater)
            else:
                self._apply(buffer, updater)

    def dense(self, values: Sequence[Array], what: str) -> list[Tensor]:
        """Views of values that are to be pushed to a dense key.

        Raises:
            TypeError: one of them is sparse, no array, or of another dtype.
            ValueError: one of them has another shape.
        """
        views = []
        for value in values:
            if is_sparse(value):
                raise TypeError(
                    f"{what} of {name_of(self.key)}: expected dense values, got a sparse one; initialise the key with "
                    "a row-sparse value, or push a dense one"
                )
            wait_to_read(value)
            views.append(self._checked(as_tensor(value), what))
        return views

    def rows(self, values: Sequence[Any], what: str) -> list[RowSparse]:
        """The rows of values that are to be pushed to a sparse key.

        Raises:
            TypeError: one of them is dense, or of another dtype.
            ValueError: one of them has another shape.
        """
        found = []
        for value in values:
            if not is_sparse(value):
                raise TypeError(
                    f"{what} of {name_of(self.key)}: expected row-sparse values, as it was initialised with, got a "
                    "dense one; use hybridpar.kvstore.RowSparse"
                )
            rows = as_rows(value)
            if rows.shape != tuple(self._shape):
                raise self._misfit(what, f"{rows}", ValueError)
            if rows.dtype != self._dtype:
                raise self._misfit(what, f"{rows}", TypeError)
            found.append(rows)
        return found

    def copied(self, values: npt.NDArray[Any]) -> Buffer:
        """A copy of values that are like ``Buffer.values``, of a small key."""
        buffer = self._buffer()
        buffer.fill(values)
        return buffer

    def merged(self, values: Sequence[Tensor], op: ReduceOp) -> Buffer:
        """A copy of the values of this rank's devices, combined."""
        buffer = self._buffer()
        tensor = buffer.tensor
        tensor.copy_(values[0])
        for value in values[1:]:
            _COMBINE[op](tensor, value.to(tensor.device), out=tensor)
        if op == "mean" and len(values) > 1:
            tensor.div_(len(values))
        return buffer

    def quantised(self, values: Sequence[Tensor], compression: Compression, op: ReduceOp) -> Buffer:
        """The values of the devices, combined after 2-bit compression of each, with a residual for each."""
        assert isinstance(compression, TwoBit)
        while len(self._quantisers) < len(values):
            self._quantisers.append(Quantiser(self.stored, compression.threshold))
        buffer = self._buffer()
        total = buffer.tensor.zero_()
        codes = torch.empty(total.numel(), dtype=total.dtype, device=total.device)
        for quantiser, value in zip(self._quantisers, values, strict=False):
            quantiser.codes(value.to(total.device).reshape(-1), 0, codes)
            total.view(-1).add_(codes, alpha=compression.threshold)
        if op == "mean":
            total.div_(len(values))
        return buffer

    def forget_residuals(self) -> None:
        """What earlier compressions have not sent is lost."""
        self._quantisers.clear()

    def out(self, array: Array, what: str) -> Tensor:
        """A view of an array into which the value is to be written.

        Raises:
            ValueError: it has another shape.
            TypeError: it cannot be written, or another dtype would change the values' kind.
        """
        view = as_tensor(array, write=True)
        if view.shape != self._shape:
            raise self._misfit(what, f"an out {describe(view)}", ValueError)
        if view.dtype != self._dtype and not (view.is_floating_point() and self.stored.is_floating_point()):
            raise self._misfit(what, f"an out {describe(view)}", TypeError)
        return view

    def write(self, array: Array, view: Tensor) -> None:
        """Copy the value into ``array``, of which ``view`` is one."""
        wait_to_write(array)
        view.copy_(self.stored)

    def write_small(self, out: npt.NDArray[Any]) -> None:
        """Copy the value of a small key into an array that is like ``Buffer.values``."""
        self._stored.copy_to(out)

    def write_rows(self, out: Any, indices: Tensor) -> None:
        """Copy the rows ``indices``, ascending, into a sparse ``out``."""
        write_rows(out, indices, self.stored.index_select(0, indices.to(self.stored.device)))

    def check_sparse_out(self, out: Any, what: str) -> None:
        """Raises ValueError for a sparse ``out`` of another shape, TypeError for one of another dtype."""
        rows = as_rows(out)
        if rows.shape != tuple(self._shape):
            raise self._misfit(what, f"an out {rows}", ValueError)
        if rows.dtype != self._dtype:
            raise self._misfit(what, f"an out {rows}", TypeError)

    def _apply(self, sum_: Buffer, updater: Updater | None) -> None:
        if updater is not None and self.updates:
            updater(self.key, sum_.tensor, self.stored, self.library)
        else:
            self._stored, sum_ = sum_, self._stored
        self._spare.append(sum_)

    def _apply_rows(self, result: Rows, updater: Updater | None) -> None:
        rows = RowSparse(*result, self.stored.shape)
        if updater is not None and self.updates:
            updater(self.key, rows, self.stored, self.library)
        else:
            self.stored.zero_()
            self.stored[rows.indices] = rows.values

    def _buffer(self) -> Buffer:
        return self._spare.pop() if self._spare else Buffer(torch.empty_like(self.stored))

    def _checked(self, view: Tensor, what: str) -> Tensor:
        if view.shape != self._shape:
            raise self._misfit(what, describe(view), ValueError)
        if view.dtype != self._dtype:
            raise self._misfit(what, describe(view), TypeError)
        return view

    def _misfit(self, what: str, got: str, kind: type[Exception]) -> Exception:
        return kind(f"{what} of {name_of(self.key)}: expected {describe(self.stored)}, as initialised, got {got}")
