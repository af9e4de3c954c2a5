"""Small plain arrays: functions of MXNet's engine copy them, and no operator is needed but for those of an updater.

See Note [small keys] in ``hybridpar.comm.mxnet.outbox``, and Note [copies in plain order] in its ``engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import mxnet

from hybridpar.comm.kvstore.keys import pairs
from hybridpar.comm.kvstore.reducer import Key, ReduceOp
from hybridpar.comm.mxnet.arrays import NDARRAY, NDArray
from hybridpar.comm.mxnet.entry import Entry, Updater
from hybridpar.comm.mxnet.outbox import Outbox
from hybridpar.comm.mxnet.table import Table

Given: TypeAlias = list[tuple[Key, list[Any]]]  # of a call: each key once, with all that was given for it
Found: TypeAlias = list[tuple[Entry, list[NDArray]]]

_NOTHING = nullcontext()


class SmallArrays:
    """Pushes and pulls of a store.

    Args:
        settle: applies the pushes of rows of an entry.
    """

    def __init__(self, table: Table, outbox: Outbox, settle: Callable[[Entry], None]) -> None:
        self._table, self._outbox, self._engine, self._settle = table, outbox, outbox.engine, settle

    def find(self, given: Given, *, one_each: bool) -> Found | None:
        """Entries and arrays; None if an array is not small, plain and like the value of its key.

        Args:
            one_each: None as well if there are several arrays for a key.

        Raises:
            ValueError: an unknown key.
        """
        found = []
        for key, arrays in given:
            entry = self._table[key]
            if not entry.is_small or (one_each and len(arrays) > 1):
                return None
            for array in arrays:
                if type(array) is not NDARRAY or not self._engine.is_plain(array, entry.value):
                    return None
            found.append((entry, arrays))
        return found

    def push(
        self, found: Found, updater: Updater | None, op: ReduceOp, priority: int, *, in_place: bool = False
    ) -> None:
        """One array of each key, uncompressed.

        Args:
            in_place: the sum is written into the array, too. For one key, whose value is replaced.
        """
        pushes = []
        for entry, (source,) in found:
            self._settle(entry)
            pushes.append(entry.push_of(source, updater, back=in_place))
        self._outbox.send(pushes, op=op, priority=priority)
        with _NOTHING if updater is None else mxnet.autograd.pause():
            for (entry, _), push in zip(found, pushes, strict=True):
                entry.apply(push.buffer, updater)

    def pull(self, found: Sequence[tuple[Entry, list[NDArray]]]) -> None:
        """Write what is stored into the arrays."""
        for entry, arrays in found:
            self._settle(entry)
            for array in arrays:
                entry.fill(array, self._engine)


def given_of(key: Any, value: Any, what: str) -> Given:
    """``pairs``, at once where there is little to look at."""
    if type(key) in (int, str):
        if type(value) is NDARRAY:
            return [(key, [value])]
        if type(value) is list and len(value) == 1 and type(value[0]) is NDARRAY:
            return [(key, value)]
    return pairs(key, value, what)
