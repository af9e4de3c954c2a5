"""Small plain arrays: pushes and pulls of the plain store with little to do for each key.

All that can be refused is looked for first, in a few comparisons; a call in which anything is out of the ordinary goes
the way of all others, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridpar.comm.kvstore.buffer import small_values
from hybridpar.comm.kvstore.entry import Entry
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Reducer
from hybridpar.comm.kvstore.updater import Updater

Found: TypeAlias = list[tuple[Entry, npt.NDArray[Any]]]


class SmallArrays:
    """Pushes and pulls of a store."""

    def __init__(self, entries: Mapping[Key, Entry], reducer: Reducer, together_bytes: int) -> None:
        self._entries, self._reducer, self._together_bytes = entries, reducer, together_bytes

    def find(self, keys: Any, arrays: Any) -> Found | None:
        """Entries, and the arrays that were given for them in one dimension.

        Returns:
            None unless it is one array for each key, none of them twice, and each array is a NumPy array or a tensor on
            the CPU with just the shape and dtype of its key, which is small and dense.
        """
        if type(keys) is not list:
            keys, arrays = [keys], [arrays]
        elif type(arrays) is not list or len(arrays) != len(keys):
            return None
        found = []
        for key, array in zip(keys, arrays, strict=True):
            entry = self._entries.get(key) if type(key) is int or type(key) is str else None
            if entry is None or entry.small_dtype is None:
                return None
            values = small_values(array, entry.shape, entry.small_dtype)
            if values is None:
                return None
            found.append((entry, values))
        return found if len(found) == 1 or len(set(keys)) == len(found) else None

    def push(self, found: Found, updater: Updater | None, op: ReduceOp, priority: int) -> None:
        """Not for ``mean``, nor with compression."""
        start, nbytes = 0, 0
        for end, (_, values) in enumerate(found, 1):
            nbytes += values.nbytes
            if end == len(found) or nbytes >= self._together_bytes:
                self._push_together(found[start:end], updater, op, priority)
                start, nbytes = end, 0

    def _push_together(self, found: Found, updater: Updater | None, op: ReduceOp, priority: int) -> None:
        keys, tensors, buffers = [], [], []
        for entry, values in found:
            entry.settle(updater, wait=False)
            buffer = entry.copied(values)
            keys.append(entry.key)
            tensors.append(buffer.tensor)
            buffers.append(buffer)
        awaited = self._reducer.send(keys, tensors, op=op, priority=priority)
        for (entry, _), one, buffer in zip(found, awaited, buffers, strict=True):
            entry.await_sum(one, buffer)

    def pull(self, found: Found, updater: Updater | None, outs: Any) -> bool:
        """Write what is stored. False, before anything is written, if an array may not be written.

        Args:
            outs: one array or a list of them, as they were given.
        """
        if not all(values.flags.writeable for _, values in found):
            return False
        for entry, values in found:
            entry.settle(updater)
            entry.write_small(values)
        increment_version([out for out in _listed(outs) if type(out) is Tensor])
        return True


def _listed(arrays: Any) -> Sequence[Any]:
    return arrays if type(arrays) is list else [arrays]
