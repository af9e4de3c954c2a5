"""Small plain arrays: functions of MXNet's engine copy them, and no operator is needed but for those of an updater.

See Note [small keys] in ``hybridpar.comm.mxnet.outbox``, and Note [copies in plain order] in its ``engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import mxnet

from hybridpar.comm.kvstore.reducer import ReduceOp
from hybridpar.comm.mxnet.arrays import NDARRAY, NDArray
from hybridpar.comm.mxnet.entry import Entry, Updater
from hybridpar.comm.mxnet.outbox import Outbox
from hybridpar.comm.mxnet.table import Table

Found: TypeAlias = list[tuple[Entry, NDArray]]

_NOTHING = nullcontext()
_KEYS = {int, str}


class SmallArrays:
    """Pushes and pulls of a store.

    Args:
        settle: applies the pushes of rows of an entry.
    """

    def __init__(self, table: Table, outbox: Outbox, settle: Callable[[Entry], None]) -> None:
        self._table, self._outbox, self._engine, self._settle = table, outbox, outbox.engine, settle

    def find(self, key: Any, value: Any, *, one_each: bool) -> Found | None:
        """Each array of a call, with the entry of its key; None if one is not small, plain and like the key's value.

        Args:
            key, value: as they were given. What takes longer to understand than this is not looked at: None.
            one_each: None as well if there are several arrays for a key.

        Raises:
            ValueError: an unknown key.
        """
        if type(key) in _KEYS:
            if type(value) is NDARRAY:
                entry = self._table[key]
                return [(entry, value)] if self._is_small(entry, value) else None
            arrays = value if type(value) is list else [value]
            if one_each and len(arrays) != 1:
                return None
            keys = [key] * len(arrays)
        elif type(key) is list and type(value) is list and len(key) == len(value):
            keys, arrays = key, value
            if set(map(type, keys)) not in ({int}, {str}) or (one_each and len(set(keys)) != len(keys)):
                return None
        else:
            return None
        found = []
        for one, array in zip(keys, arrays, strict=True):
            if type(array) is list and len(array) == 1:
                array = array[0]
            entry = self._table[one]
            if not self._is_small(entry, array):
                return None
            found.append((entry, array))
        return found or None

    def _is_small(self, entry: Entry, array: Any) -> bool:
        return type(array) is NDARRAY and entry.is_small and entry.is_plain(array, self._engine)

    def push(
        self, found: Found, updater: Updater | None, op: ReduceOp, priority: int, *, in_place: bool = False
    ) -> None:
        """One array of each key, uncompressed.

        Args:
            in_place: the sum is written into the array, too. For one key, whose value is replaced.
        """
        pushes = []
        for entry, source in found:
            self._settle(entry)
            pushes.append(entry.push_of(source, updater, back=in_place))
        self._outbox.send(pushes, op=op, priority=priority)
        with _NOTHING if updater is None else mxnet.autograd.pause():
            for (entry, _), push in zip(found, pushes, strict=True):
                entry.apply(push.buffer, updater)

    def pull(self, found: Found) -> None:
        """Write what is stored into the arrays."""
        for entry, array in found:
            self._settle(entry)
            entry.fill(array, self._engine)
