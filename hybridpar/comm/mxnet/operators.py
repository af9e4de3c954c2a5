"""Arrays of any kind: pushes and pulls by operators of MXNet, and of rows. See Note [no deadlock] in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mxnet

from hybridpar.comm.kvstore.compression import Compression
from hybridpar.comm.kvstore.reducer import ReduceOp, name_of
from hybridpar.comm.mxnet.arrays import SPARSE, NDArray, merged_rows
from hybridpar.comm.mxnet.entry import Entry, Updater
from hybridpar.comm.mxnet.outbox import Outbox
from hybridpar.comm.mxnet.table import Given, Table

_LOG = logging.getLogger(__name__)


class AnyArrays:
    """Pushes and pulls of a store.

    Args:
        settle: applies the pushes of rows of an entry.
    """

    def __init__(self, table: Table, outbox: Outbox, settle: Callable[[Entry], None]) -> None:
        self._table, self._outbox, self._settle = table, outbox, settle
        self._warned = False

    def push(
        self, given: Given, updater: Updater | None, compression: Compression | None, op: ReduceOp, priority: int
    ) -> None:
        """Raises as ``KVStore.push``, before anything is sent."""
        with mxnet.autograd.pause():
            pushes = []
            for key, values in given:
                entry = self._table[key]
                arrays, sparse = entry.checked(values, "push")
                compressed = compression if entry.updates and not sparse else None
                entry.check_terms(sparse, op, compressed)
                pushes.append((entry, arrays, sparse, compressed))
            dense = []
            for entry, arrays, sparse, compressed in pushes:
                if sparse:
                    entry.await_rows(self._outbox.send_rows(entry.key, *merged_rows(arrays)))
                    continue
                self._settle(entry)
                dense.append((entry, entry.merge(arrays, op, compressed, updater)))
            self._outbox.send([push for _, push in dense], op=op, priority=priority)
            for entry, push in dense:
                entry.apply(push.buffer, updater)

    def pull(self, given: Given, *, ignore_sparse: bool) -> None:
        """Raises as ``KVStore.pull``, before anything is written."""
        with mxnet.autograd.pause():
            pulls = []
            for key, outs in given:
                entry = self._table[key]
                arrays = [entry.checked_out(array, "pull") for array in outs]
                pulls.append((entry, [array for array in arrays if not self._is_ignored(array, entry, ignore_sparse)]))
            for entry, arrays in pulls:
                self._settle(entry)
                for array in arrays:
                    entry.write(array)

    def _is_ignored(self, array: NDArray, entry: Entry, ignore: bool) -> bool:
        if array.stype != SPARSE:
            return False
        if not ignore:
            raise TypeError(f"pull of {name_of(entry.key)}: expected a dense out; use row_sparse_pull for others")
        if not self._warned:
            self._warned = True
            _LOG.warning("pull of %s: a row_sparse out is left as it is; use row_sparse_pull", name_of(entry.key))
        return True
