"""The plain store: MXNet's KVStore on arrays of any library, with or without MXNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.agreement import check_same_settings, together
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.kvstore.arrays import Array, as_tensor, library_of, wait_to_read
from hybridpar.comm.kvstore.buffer import Buffer
from hybridpar.comm.kvstore.compression import Compression, TwoBit, compression
from hybridpar.comm.kvstore.default import default_group
from hybridpar.comm.kvstore.entry import Entry
from hybridpar.comm.kvstore.keys import new_pairs, pairs
from hybridpar.comm.kvstore.names import Kind, kind_of, op_of
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Reducer, name_of
from hybridpar.comm.kvstore.small import SmallArrays
from hybridpar.comm.kvstore.sparse import RowSparse, as_rows, is_sparse, row_numbers
from hybridpar.comm.kvstore.updater import TorchUpdater, Updater, describe_optimizer, updater_for, updater_of

_TOGETHER_BYTES = 4 << 20


def create(
    name: str = "local",
    group: Group | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    stall_seconds: float = 10.0,
) -> KVStore:
    """A new store with keys of its own. Collective for names that begin with ``dist``.

    Args:
        name: ``local`` or ``device`` combine the values of this process's devices only; ``dist_sync``,
            ``dist_device_sync`` (or ``dist_sync_device``), these followed by ``_hybridpar`` or ``_perseus``, those of
            all ranks. In any case.
        group: the ranks; None means all of the job, by one ``hybridpar.init()`` for all such stores of the process.
        timeout: seconds that a push may wait for the other ranks to push the same key.
        stall_seconds: a warning says which ranks have not pushed what others have, when they have waited for so long.

    Raises:
        ValueError: an unknown name.
    """
    kind = kind_of(name)
    if not kind.distributed:
        group = Group.alone()
    return KVStore(kind, default_group() if group is None else group, timeout, stall_seconds)


class KVStore:
    """Values by key, combined over devices and ranks. See ``create``, and docs/kvstore.md.

    ``push`` copies what it is given and returns at once; sums travel while the program goes on. ``pull`` waits for the
    pushes of its keys. Every rank holds all values, and applies the same updates to them.

    Wherever a key is taken, a list of keys is taken with a list of values; a value may be a list of arrays, one for
    each device, which are combined. One thread uses a store at a time.
    """

    def __init__(self, kind: Kind, group: Group, timeout: float, stall_seconds: float) -> None:
        self._kind, self._group = kind, group
        self._reducer = Reducer(group, timeout=timeout, stall_seconds=stall_seconds)
        self._entries: dict[Key, Entry] = {}
        self._small = SmallArrays(self._entries, self._reducer, _TOGETHER_BYTES)
        self._updater: Updater | None = None
        self._compression: Compression | None = None

    @property
    def type(self) -> str:
        """The name that the store was created by."""
        return self._kind.name

    @property
    def rank(self) -> int:
        return self._reducer.rank

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return self._reducer.size

    @property
    def local_rank(self) -> int:
        """Rank among those of this host."""
        return self._reducer.local_rank

    @staticmethod
    def is_capable(capability: str) -> bool:
        """True for ``"optimizer"``: ``set_optimizer`` works. Raises ValueError for anything else, as MXNet does."""
        if capability.lower() != "optimizer":
            raise ValueError(f"is_capable: expected 'optimizer', got {capability!r}")
        return True

    def init(self, key: Any, value: Any, param_only: bool | int = False) -> None:
        """Collective: new keys. The values of rank 0 count; the arrays stay as they are, ``pull`` gives what is stored.

        Args:
            key: int or str, one type in a store; or a list.
            value: an array of any shape; a row-sparse one for a key to which rows will be pushed.
            param_only: no updater and no compression for these keys: a push replaces the value.

        Raises:
            ValueError: a key is there already (on every rank).
            TypeError: int and str keys, or not an array (on every rank).
            CommunicationError: keys, shapes or dtypes differ between the ranks (on every rank).
        """
        entries = together(self._group, lambda: self._new_entries(key, value, not param_only))
        self._reducer.init_many([entry.key for entry in entries], [entry.stored for entry in entries])
        self._entries.update((entry.key, entry) for entry in entries)

    def push(self, key: Any, value: Any, priority: int = 0, *, op: object = "sum") -> None:
        """Add values over devices and ranks, and give the sum to the updater; without one it replaces what is stored.

        Every rank pushes the same keys, each as often as the others; in any order, where values are dense. Returns at
        once: values have been copied, and their arrays may be reused.

        Args:
            key, value: as for ``init``, and a list of arrays for a key means its value on several devices.
            priority: of what is ready everywhere the highest travels first.
            op: ``Op`` or its text: ``sum``, ``max``, ``min``, ``mean``, over devices and ranks. Rows: ``sum`` only.

        Raises:
            ValueError: an unknown key, another shape than initialised, or an unknown op.
            TypeError: another dtype, sparse where dense is expected or the reverse, or compression that does not fit.
            CommunicationError: this, or an earlier push, failed.
        """
        how = op_of(op)
        if how != "mean" and self._compression is None and (small := self._small.find(key, value)):
            self._small.push(small, self._updater, how, priority)
            return
        dense: list[tuple[Entry, list[Tensor]]] = []
        sparse: list[tuple[Entry, list[RowSparse]]] = []
        for one, values in pairs(key, value, "push"):
            entry = self._entry(one)
            self._check_terms(entry, how)
            if entry.sparse:
                sparse.append((entry, entry.rows(values, "push")))
            else:
                dense.append((entry, entry.dense(values, "push")))
        self._push_dense(dense, how, priority)
        for entry, rows in sparse:
            entry.settle(self._updater, wait=False)
            self._push_rows(entry, rows)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write what is stored into ``out``, after all pushes of these keys have arrived.

        Args:
            out: arrays of the keys' shapes; a list of them for a key fills each. Floating-point values are converted.
            priority: taken for MXNet's sake: what is stored is here already, and pushes have priorities of their own.
            ignore_sparse: leave sparse arrays in ``out`` as they are; otherwise they get all rows.

        Raises:
            ValueError: no ``out``, an unknown key, or another shape.
            TypeError: an array that cannot be written, or whole numbers for floating-point values or the reverse.
            CommunicationError: a push of one of these keys failed: names it and the rank that is lost or late.
        """
        if out is None:
            raise ValueError("pull: expected out, the arrays to be filled, got None")
        if (small := self._small.find(key, out)) and self._small.pull(small, self._updater, out):
            return
        dense: list[tuple[Entry, Array, Tensor]] = []
        sparse: list[tuple[Entry, Any]] = []
        for one, arrays in pairs(key, out, "pull"):
            entry = self._entry(one)
            for array in arrays:
                if not is_sparse(array):
                    dense.append((entry, array, entry.out(array, "pull")))
                elif not ignore_sparse:
                    entry.check_sparse_out(array, "pull")
                    sparse.append((entry, array))
        for entry, array, view in dense:
            entry.settle(self._updater)
            entry.write(array, view)
        for entry, array in sparse:
            entry.settle(self._updater)
            entry.write_rows(array, torch.arange(entry.stored.shape[0]))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, op: object = "sum") -> None:
        """``push``, then ``pull`` into ``out``, or into ``value`` itself. All keys travel before any is waited for."""
        self.push(key, value, priority, op=op)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Collective: ``init``, then ``pull`` into ``out``: the values of rank 0."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Write some rows of what is stored into ``out``, after all pushes of these keys have arrived.

        Args:
            key: initialised with a row-sparse value.
            out: row-sparse: RowSparse, sparse COO tensors or row_sparse NDArrays. They get just these rows.
            row_ids: for each ``out`` whole numbers [k], in any order, repeated ones count once; one array for all.

        Raises:
            ValueError: no ``out`` or ``row_ids``, not as many as each other, a row that is not there, an unknown key.
            TypeError: a dense key or ``out``.
        """
        if out is None or row_ids is None:
            raise ValueError("row_sparse_pull: expected out and row_ids, got None")
        asked = []
        for one, arrays in pairs(key, out, "row_sparse_pull"):
            entry = self._entry(one)
            for array in arrays:
                if not entry.sparse or not is_sparse(array):
                    raise TypeError(
                        f"row_sparse_pull of {name_of(one)}: expected a key and an out that are row-sparse, got a "
                        f"dense {'out' if entry.sparse else 'key'}; use pull"
                    )
                entry.check_sparse_out(array, "row_sparse_pull")
                asked.append((entry, array))
        sizes = [entry.stored.shape[0] for entry, _ in asked]
        for (entry, array), rows in zip(asked, row_numbers(row_ids, sizes, "row_sparse_pull"), strict=True):
            entry.settle(self._updater)
            entry.write_rows(array, rows)

    def set_optimizer(self, optimizer: Any) -> None:
        """Collective on ``dist`` stores: from now on this optimizer is applied to every push. On every rank alike.

        Args:
            optimizer: an ``mxnet.optimizer.Optimizer``; or a function that makes a torch optimizer from a list of
                parameters, for example ``functools.partial(torch.optim.SGD, lr=0.1)``: one is made for each key.

        Raises:
            TypeError: neither (on every rank).
            ValueError: the ranks' optimizers differ (on every rank).
        """
        updater = together(self._group, lambda: updater_for(optimizer))
        check_same_settings(self._group, "set_optimizer", {"optimizer": describe_optimizer(optimizer)})
        self._use(updater)

    def _set_updater(self, updater: Callable[[Key, Any, Any], object]) -> None:
        """From now on ``updater(key, gradient, stored)`` changes ``stored`` in place at every push.

        It runs on every rank, which must all do the same. It gets arrays of the library of the key's first value; rows
        as RowSparse, or as row_sparse NDArray. Gradients do not outlive the call.

        Raises:
            TypeError: it cannot be called.
        """
        self._use(updater_of(updater))

    @property
    def optimizers(self) -> Mapping[Key, torch.optim.Optimizer]:
        """The torch optimizer of each key that has been updated: change their ``param_groups`` to follow a schedule."""
        return self._updater.optimizers if isinstance(self._updater, TorchUpdater) else {}

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizers' states, which are the same on every rank, to a file.

        Args:
            dump_optimizer: with MXNet's optimizers: the optimizer, too. States of torch's always hold their settings.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self._settle_all()
        self._needed_updater("save_optimizer_states").save(fname, dump_optimizer)

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Read what ``save_optimizer_states`` wrote, on every rank. Torch states are read without unpickling code.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self._settle_all()
        self._needed_updater("load_optimizer_states").load(fname)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Collective on ``dist`` stores: compress what is pushed from now on; ``init`` and ``pull`` are not.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, as in MXNet; ``{"type": "fp16"}`` or
                ``{"type": "bf16"}`` between ranks.

        Raises:
            ValueError: an unknown type or parameter, or a store of this name does not compress (on every rank); the
                ranks' compressions differ (on every rank).
        """
        found = together(self._group, lambda: self._checked_compression(compression_params))
        if self._kind.distributed:
            self._reducer.use(found)
        for entry in self._entries.values():
            entry.forget_residuals()
        self._compression = found

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._reducer.barrier()

    _barrier = barrier

    def _send_command_to_servers(self, head: int, body: str) -> None:
        raise NotImplementedError(
            f"_send_command_to_servers({head}): expected servers, but there are none: every rank holds the whole "
            "store; call set_optimizer and set_gradient_compression on every rank"
        )

    def close(self) -> None:
        """End the store's threads; pushes that have not arrived fail, here and on the other ranks."""
        self._reducer.close()

    def __repr__(self) -> str:
        return f"KVStore({self.type!r}, rank={self.rank}, num_workers={self.num_workers}, keys={len(self._entries)})"

    def _new_entries(self, keys: Any, values: Any, updates: bool) -> list[Entry]:
        return [self._new_entry(one, array, updates) for one, array in new_pairs(keys, values, self._entries)]

    def _new_entry(self, key: Key, array: Array, updates: bool) -> Entry:
        sparse = is_sparse(array)
        wait_to_read(array)
        value = as_rows(array).to_dense() if sparse else as_tensor(array)
        if not self._kind.on_device:
            value = value.cpu()
        stored = torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
        return Entry(key, stored, sparse=sparse, updates=updates, library=library_of(array))

    def _entry(self, key: Key) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise ValueError(f"{name_of(key)} is not in the store: expected one that was initialised; call init first")
        return entry

    def _check_terms(self, entry: Entry, op: ReduceOp) -> None:
        """Raises before anything is sent if this key cannot be pushed so."""
        name, compressed = name_of(entry.key), self._compression_of(entry)
        if entry.sparse and op != "sum":
            raise ValueError(f"push of {name}: expected op 'sum' for row-sparse values, got {op!r}")
        if entry.sparse and compressed is not None:
            raise TypeError(f"push of {name}: expected dense values with {compressed}, got row-sparse ones")
        if compressed is not None and compressed.applies(name, entry.stored.dtype) and op not in ("sum", "mean"):
            raise ValueError(f"push of {name}: expected op 'sum' or 'mean' with {compressed}, got {op!r}")
        if op == "mean" and not entry.stored.is_floating_point():
            raise TypeError(f"push of {name}: expected floating-point values for 'mean', got {entry.stored.dtype}")

    def _compression_of(self, entry: Entry) -> Compression | None:
        return self._compression if entry.updates else None

    def _push_dense(self, pushes: Sequence[tuple[Entry, Sequence[Tensor]]], op: ReduceOp, priority: int) -> None:
        """Small values are sent together, so that the ranks agree once on them; what is large travels meanwhile."""
        held: list[tuple[Entry, Buffer]] = []
        held_bytes = 0
        for entry, values in pushes:
            entry.settle(self._updater, wait=False)
            compressed = self._compression_of(entry)
            if compressed is not None and self._kind.distributed:
                merged = entry.merged(values, op)
                future = self._reducer.submit(
                    entry.key, merged.tensor, op=op, priority=priority, compression=compressed
                )
                entry.await_sum(future, merged)
                continue
            merged = entry.merged(values, op) if compressed is None else entry.quantised(values, compressed, op)
            held.append((entry, merged))
            held_bytes += merged.tensor.nbytes
            if held_bytes >= _TOGETHER_BYTES:
                self._send(held, op, priority)
                held, held_bytes = [], 0
        if held:
            self._send(held, op, priority)

    def _send(self, merged: Sequence[tuple[Entry, Buffer]], op: ReduceOp, priority: int) -> None:
        keys, tensors = [entry.key for entry, _ in merged], [buffer.tensor for _, buffer in merged]
        awaited = self._reducer.send(keys, tensors, op=op, priority=priority)
        for (entry, buffer), one in zip(merged, awaited, strict=True):
            entry.await_sum(one, buffer)

    def _push_rows(self, entry: Entry, values: Sequence[RowSparse]) -> None:
        device = entry.stored.device
        indices = torch.cat([rows.indices.to(device) for rows in values])
        data = torch.cat([rows.values.to(device) for rows in values])
        entry.await_rows(self._reducer.rows(entry.key, indices, data))

    def _settle_all(self) -> None:
        for entry in self._entries.values():
            entry.settle(self._updater)

    def _use(self, updater: Updater) -> None:
        """What has been pushed before is for the updater of then."""
        self._settle_all()
        self._updater = updater

    def _needed_updater(self, operation: str) -> Updater:
        if self._updater is None:
            raise RuntimeError(f"{operation}: expected an optimizer in the store, got none; call set_optimizer first")
        return self._updater

    def _checked_compression(self, params: Mapping[str, Any]) -> Compression:
        found = compression(params)
        if not self._kind.distributed and not (self._kind.on_device and isinstance(found, TwoBit)):
            ways = "'2bit' on a store of name 'device', or a 'dist' store"
            raise ValueError(f"set_gradient_compression: expected {ways}, got {found} on {self.type!r}")
        return found
