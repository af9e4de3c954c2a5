"""The keys of one store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mxnet
import numpy as np

from hybridpar.comm.kvstore.keys import new_pairs, pairs
from hybridpar.comm.kvstore.reducer import Key, name_of
from hybridpar.comm.mxnet.arrays import SPARSE, Buffer, NDArray, classic
from hybridpar.comm.mxnet.entry import Entry

Given: TypeAlias = list[tuple[Key, list[Any]]]  # of a call: each key once, with all that was given for it


class Table:
    """Entries by key."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}

    def __getitem__(self, key: Key) -> Entry:
        """Raises ValueError for a key that was not initialised."""
        entry = self._entries.get(key)
        if entry is None:
            raise ValueError(f"{name_of(key)} is not in the store: expected one that was initialised; call init first")
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[Entry]) -> None:
        """Made by ``new``."""
        self._entries |= {entry.key: entry for entry in entries}

    def sparse_outs(self, keys: Any, outs: Any) -> list[tuple[Entry, NDArray]]:
        """Of a call of row_sparse_pull, each out with its entry.

        Raises:
            ValueError: an unknown key, or an out of another shape.
            TypeError: a dense key or out.
        """
        found = []
        for key, arrays in pairs(keys, outs, "row_sparse_pull"):
            entry = self[key]
            for array in (entry.checked_out(array, "row_sparse_pull") for array in arrays):
                if not entry.sparse or array.stype != SPARSE:
                    raise TypeError(
                        f"row_sparse_pull of {name_of(key)}: expected a key and an out that are row_sparse, got a "
                        f"dense {'out' if entry.sparse else 'key'}; use pull"
                    )
                found.append((entry, array))
        return found

    def new(self, keys: Any, values: Any, updates: bool) -> list[tuple[Entry, Buffer]]:
        """Entries for new keys, and buffers with the values that were given for them.

        Raises:
            ValueError: a key is there already.
            TypeError: int and str keys, or not an NDArray.
        """
        made = []
        for key, value in new_pairs(keys, values, self._entries):
            array = classic(value, f"init of {name_of(key)}")
            buffer = Buffer(array)
            (array.tostype("default") if array.stype == SPARSE else array).copyto(buffer.array)
            buffer.array.wait_to_read()
            made.append((Entry(key, buffer, sparse=array.stype == SPARSE, updates=updates), buffer))
        return made


def check_dense(given: Sequence[tuple[Key, list[Any]]], what: str) -> None:
    """Raises TypeError where an array of a pushpull is row_sparse, or no NDArray."""
    for key, values in given:
        name = f"pushpull of {name_of(key)}"
        if any(classic(array, name).stype == SPARSE for array in values):
            raise TypeError(
                f"{name}: expected dense arrays, got a row_sparse {what}; use push, and pull or row_sparse_pull"
            )


def row_numbers(given: Any, sizes: Sequence[int]) -> list[NDArray]:
    """The rows that are asked for, ascending and none twice: int64 [k] for each of several tables.

    Args:
        given: an NDArray of whole numbers [k], or a list of them; one counts for all tables.
        sizes: rows of each table.

    Raises:
        TypeError: no NDArrays.
        ValueError: not one for each table, not whole numbers, or a row that is not there.
    """
    arrays = _flat(given)
    if len(arrays) == 1:
        arrays *= len(sizes)
    if len(arrays) != len(sizes):
        raise ValueError(f"row_sparse_pull: expected row_ids for each of {len(sizes)} outs, got {len(arrays)}")
    found = []
    for array, size in zip(arrays, sizes, strict=True):
        numbers = classic(array, "row_sparse_pull: row_ids").asnumpy().reshape(-1)
        rows = np.unique(numbers).astype(np.int64)
        if len(rows) == 0 or (rows != np.unique(numbers)).any() or not 0 <= rows[0] <= rows[-1] < size:
            bounds = f"{numbers.min()} to {numbers.max()}" if len(numbers) else "none"
            raise ValueError(f"row_sparse_pull: expected whole row_ids in [0, {size}), got {bounds}")
        found.append(mxnet.nd.array(rows, dtype=np.int64))
    return found


def _flat(given: Any) -> list[Any]:
    return [one for part in given for one in _flat(part)] if isinstance(given, list | tuple) else [given]
