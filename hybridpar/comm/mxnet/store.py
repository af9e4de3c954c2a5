"""The store for MXNet: a subclass of its own, whose pushes and pulls are functions of MXNet's engine.

# Note [no deadlock]
The ranks' engines run operators in different orders, so a push must not keep any thread waiting for another rank. It
is three things in MXNet's engine, in this order because of the buffer that they share: operators that copy the values
into it and add those of several devices; a function that hands it to the reducer and returns at once, while the
buffer stays taken until the sum has arrived; and the operators of the updater. (The function itself copies a value that
is small: Note [small keys].) A pull is a copy of what is stored. The
reducer combines what is ready everywhere, in any order. So no rank ever waits for a push while it holds back another
one. The updater is called by the script's thread, in program order, so that counts and schedules are the same on every
rank; its operators run when the sum is there.

# Note [rows wait]
How many rows a sum has is known when it arrives, and an NDArray must know when it is made. So a push of rows waits for
the script's own operators, travels while the script goes on, and is applied by the next call that needs the value of
its key: always at the same place of the program, so that every rank applies the same updates in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxnet

from hybridpar.comm.agreement import check_same_settings, together
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.kvstore.compression import Compression, compression
from hybridpar.comm.kvstore.default import default_group
from hybridpar.comm.kvstore.keys import pairs
from hybridpar.comm.kvstore.names import kind_of, op_of
from hybridpar.comm.kvstore.reducer import ReduceOp, Reducer
from hybridpar.comm.kvstore.updater import describe_optimizer
from hybridpar.comm.mxnet.engine import check_engine
from hybridpar.comm.mxnet.entry import Entry, Updater, updater_of
from hybridpar.comm.mxnet.operators import AnyArrays
from hybridpar.comm.mxnet.outbox import Outbox
from hybridpar.comm.mxnet.small import SmallArrays
from hybridpar.comm.mxnet.table import Table, check_dense, row_numbers
from hybridpar.comm.timeline.timeline import Timeline


def create(
    name: str = "dist_sync_hybridpar",
    *,
    group: Group | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    stall_seconds: float = 10.0,
    timeline: Timeline | None = None,
) -> KVStore:
    """A new store with keys of its own, as ``mx.kv.create(name)`` makes it, with settings. Collective.

    Args:
        name: ``dist_sync_hybridpar`` or another name of a store that communicates.
        group: the ranks; None means all of the job, by one ``hybridpar.init()`` for all stores of the process.
        timeout: seconds that a push may wait for the other ranks to push the same key.
        stall_seconds: a warning says which ranks have not pushed what others have, when they have waited for so long.
        timeline: records what travels when, but for rows.

    Raises:
        ValueError: an unknown name, or one of a store that does not communicate.
        RuntimeError: not MXNet 1.9, or on its engine for debugging.
    """
    return KVStore(name, group=group, timeout=timeout, stall_seconds=stall_seconds, timeline=timeline)


class KVStore(mxnet.kvstore.KVStore):  # type: ignore[misc]
    """Values by key, combined over devices and ranks, for MXNet's Trainer, Module and scripts.

    Every rank holds all values, and applies the same updates to them; there are no servers. ``push``, ``pull`` and
    ``pushpull`` of dense values return at once, and travel while MXNet computes: see Note [no deadlock]. For row-sparse
    ones see Note [rows wait]. Wherever a key is taken, a list of keys is taken with a list of values; a value may be a
    list of NDArrays, one for each device. One thread uses a store at a time.

    An error of the network surfaces as ``StoreError``, which is an MXNetError and a CommunicationError: in the call
    that waits for an array which depends on the push that failed (``asnumpy``, ``wait_to_read``, ``waitall``), and
    in every later call of this store. It says which rank and which key. Such a store cannot be used any more.

    Args:
        name, group, timeout, stall_seconds, timeline: see ``create``.
    """

    default_name = "dist_sync_hybridpar"

    def __init__(
        self,
        name: str | None = None,
        *,
        group: Group | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        stall_seconds: float = 10.0,
        timeline: Timeline | None = None,
    ) -> None:
        # Not the constructor of the base class, which takes a handle of MXNet's own store: there is none.
        kind = kind_of(self.default_name if name is None else name)
        if not kind.distributed:
            raise ValueError(f"expected a name with 'dist', got {kind.name!r}; MXNet has that one: mx.kv.create")
        check_engine()
        self._kind = kind
        self._group = default_group() if group is None else group
        self._reducer = Reducer(self._group, timeout=timeout, stall_seconds=stall_seconds, timeline=timeline)
        self._outbox = Outbox(self._reducer)
        self._table = Table()
        self._any = AnyArrays(self._table, self._outbox, self._settle)
        self._small = SmallArrays(self._table, self._outbox, self._settle)
        self._updater: Updater | None = None
        self._compression: Compression | None = None

    def __del__(self) -> None:
        """The base class would free a handle here."""

    @property
    def type(self) -> str:
        """The name that the store was created by. It holds ``dist`` and ``_sync``, by which Module knows it."""
        return self._kind.name

    @property
    def rank(self) -> int:
        return self._reducer.rank

    @property
    def num_workers(self) -> int:
        return self._reducer.size

    @property
    def local_rank(self) -> int:
        """Rank among those of this host."""
        return self._reducer.local_rank

    def is_capable(self, capability: str) -> bool:
        """True for ``"optimizer"``: optimizers run in the store. Raises ValueError for anything else, as MXNet does."""
        if capability.lower() != self.OPTIMIZER:
            raise ValueError(f"is_capable: expected {self.OPTIMIZER!r}, got {capability!r}")
        return True

    def init(self, key: Any, value: Any, param_only: bool | int = False) -> None:
        """Collective: new keys. The values of rank 0 count; the arrays stay as they are, ``pull`` gives what is stored.

        Args:
            key: int or str, one type in a store; or a list.
            value: an NDArray; a row_sparse one is stored with all its rows.
            param_only: no updater and no compression for these keys: a push replaces the value.

        Raises:
            ValueError: a key is there already (on every rank).
            TypeError: int and str keys, or not an NDArray (on every rank).
            CommunicationError: keys, shapes or dtypes differ between the ranks (on every rank).
        """
        self._outbox.check()
        with mxnet.autograd.pause():
            new = together(self._group, lambda: self._table.new(key, value, not param_only))
            self._reducer.init_many([entry.key for entry, _ in new], [buffer.tensor for _, buffer in new])
            for entry, _ in new:
                entry.begin()
            self._table.add([entry for entry, _ in new])

    def push(self, key: Any, value: Any, priority: int = 0, *, op: object = "sum") -> None:
        """Add values over devices and ranks, and give the sum to the updater; without one it replaces what is stored.

        Every rank pushes the same keys, each as often as the others. Where values are dense: in any order, and this
        returns at once.

        Args:
            key, value: as for ``init``, and a list of NDArrays for a key means its value on several devices.
            priority: of what is ready everywhere the highest travels first.
            op: ``hybridpar.kvstore.Op`` or its text: ``sum``, ``max``, ``min``, ``mean``, over devices and ranks.

        Raises:
            ValueError: an unknown key, another shape than initialised, an unknown op, or one but ``sum`` for rows, or
                ``max`` or ``min`` for compressed values.
            TypeError: another dtype, storage types mixed, or a dtype that is not compressed so.
            StoreError: an earlier push failed.
        """
        self._outbox.check()
        how = op_of(op)
        small = self._small.find(key, value, one_each=True) if self._goes_as_it_is(how) else None
        if small is None:
            self._any.push(pairs(key, value, "push"), self._updater, self._compression, how, priority)
        else:
            self._small.push(small, self._updater, how, priority)

    def _goes_as_it_is(self, how: ReduceOp) -> bool:
        """Whether nothing about a plain value of its key can be refused, and it needs no compression."""
        return how != "mean" and self._compression is None

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write what is stored into ``out``, after all pushes of these keys. Returns at once, but for rows.

        Args:
            out: an NDArray for each key, or a list of them, all of which are filled.
            priority: is not used: a copy has no need of it.
            ignore_sparse: leave row_sparse arrays as they are, with a warning; ``row_sparse_pull`` is for them.

        Raises:
            ValueError: ``out`` is None, an unknown key, or an array of another shape.
            TypeError: an array of another kind of dtype, or a row_sparse one that is not to be ignored.
            StoreError: a push failed.
        """
        if out is None:
            raise ValueError("pull: expected out, the arrays to be filled, got None")
        self._outbox.check()
        small = self._small.find(key, out, one_each=False)
        if small is None:
            self._any.pull(pairs(key, out, "pull"), ignore_sparse=ignore_sparse)
        else:
            self._small.pull(small)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, op: object = "sum") -> None:
        """``push``, then ``pull`` into ``out``, or into ``value`` itself.

        Raises:
            TypeError: row_sparse values, which MXNet does not take here either: use push and row_sparse_pull.
        """
        self._outbox.check()
        how = op_of(op)
        pushed = self._small.find(key, value, one_each=True) if self._goes_as_it_is(how) else None
        in_place = pushed is not None and len(pushed) == 1 and (out is None or out is value)
        if pushed is not None and in_place and pushed[0][0].is_replaced(self._updater):
            self._small.push(pushed, None, how, priority, in_place=True)
            return
        pulled = None if pushed is None else self._small.find(key, value if out is None else out, one_each=False)
        if pushed is None or pulled is None:
            values = pairs(key, value, "pushpull")
            outs = values if out is None else pairs(key, out, "pushpull")
            check_dense(values, "value")
            check_dense(outs, "out")
            self._any.push(values, self._updater, self._compression, how, priority)
            self._any.pull(outs, ignore_sparse=True)
        else:
            self._small.push(pushed, self._updater, how, priority)
            self._small.pull(pulled)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Collective: ``init``, then ``pull`` into ``out``: the values of rank 0."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Write some rows of what is stored into ``out``, after all pushes of these keys.

        Args:
            key: initialised with a row_sparse value.
            out: row_sparse NDArrays. They get just these rows.
            row_ids: for each ``out`` an NDArray of whole numbers [k], in any order, repeated ones count once; one
                NDArray for all.

        Raises:
            ValueError: no ``out`` or ``row_ids``, not as many as each other, a row that is not there, an unknown key.
            TypeError: a dense key or ``out``.
            StoreError: a push failed.
        """
        if out is None or row_ids is None:
            raise ValueError("row_sparse_pull: expected out and row_ids, got None")
        self._outbox.check()
        asked = self._table.sparse_outs(key, out)
        with mxnet.autograd.pause():
            numbers = row_numbers(row_ids, [entry.value.shape[0] for entry, _ in asked])
            for (entry, array), rows in zip(asked, numbers, strict=True):
                self._settle(entry)
                entry.write_rows(array, rows)

    def set_optimizer(self, optimizer: Any) -> None:
        """Collective: from now on this optimizer is applied to every push, by ``mxnet.optimizer.get_updater``.

        The object itself is used, so that what is set on it later counts: do that on every rank alike.

        Raises:
            TypeError: not an ``mxnet.optimizer.Optimizer`` (on every rank).
            ValueError: the ranks' optimizers have different settings (on every rank).
        """
        self._outbox.check()
        updater = together(self._group, lambda: updater_of(optimizer))
        check_same_settings(self._group, "set_optimizer", {"optimizer": describe_optimizer(optimizer)})
        self._set_updater(updater)

    def _set_updater(self, updater: Updater) -> None:
        """From now on ``updater(key, gradient, stored)`` changes ``stored`` in place at every push, on every rank.

        The thread that pushes calls it before the sum is there: what it does by MXNet's operators waits for that.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(updater):
            raise TypeError(
                f"_set_updater: expected a function of key, gradient and weight, got {type(updater).__name__}"
            )
        self.wait()  # pushes without it come first, see Note [one push after the other]
        self._updater = updater

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, which are the same on every rank, to a file, in MXNet's own format.

        Args:
            dump_optimizer: the optimizer, too.

        Raises:
            RuntimeError: there is no optimizer.
            StoreError: a push failed.
        """
        self._settle_all()
        Path(fname).write_bytes(self._needed_updater("save").get_states(dump_optimizer))

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Read what ``save_optimizer_states`` wrote, on every rank. As ever with MXNet, that is a pickle: trust it.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self._settle_all()
        self._needed_updater("load").set_states(Path(fname).read_bytes())

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Collective: compress what is pushed from now on, but for rows; ``init`` and ``pull`` are not.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, as in MXNet; ``{"type": "fp16"}`` or
                ``{"type": "bf16"}``.

        Raises:
            ValueError: an unknown type or parameter, or the ranks' differ (on every rank).
        """
        self._outbox.check()
        found = together(self._group, lambda: compression(compression_params))
        self._reducer.use(found)
        self._compression = found

    def wait(self) -> None:
        """Return when all that was pushed has arrived and been applied.

        Raises:
            StoreError: a push failed.
        """
        self._settle_all()
        for entry in self._table:
            entry.value.wait_to_read()
        self._outbox.check()

    def barrier(self) -> None:
        """Return when every rank has called.

        Raises:
            StoreError: a push failed before.
        """
        self._outbox.check()
        self._reducer.barrier()

    _barrier = barrier

    def close(self) -> None:
        """End the store's threads; pushes that have not arrived fail, here and on the other ranks: ``wait`` first."""
        self._outbox.close()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        raise NotImplementedError(
            f"_send_command_to_servers({head}): expected servers, but there are none: every rank holds the whole "
            "store; call set_optimizer and set_gradient_compression on every rank"
        )

    def __repr__(self) -> str:
        return f"KVStore({self.type!r}, rank={self.rank}, num_workers={self.num_workers}, keys={len(self._table)})"

    def _settle(self, entry: Entry) -> None:
        """Apply pushes of rows."""
        try:
            entry.settle(self._updater)
        except RuntimeError:
            self._outbox.check()  # which knows what failed first, where it was a push
            raise

    def _settle_all(self) -> None:
        self._outbox.check()
        for entry in self._table:
            self._settle(entry)

    def _needed_updater(self, operation: str) -> Any:
        if not isinstance(self._updater, mxnet.optimizer.Updater):
            raise RuntimeError(
                f"{operation}_optimizer_states: expected an optimizer in the store, got none; call set_optimizer first"
            )
        return self._updater
