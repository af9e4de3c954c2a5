"""What the plain and the MXNet store share: values of keys, combined over the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hybridpar.comm.agreement import check_same_settings, raise_together
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.submission import Submission, Told
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.kvstore.compression import Coder, Compression
from hybridpar.comm.kvstore.ending import AtEnd
from hybridpar.comm.kvstore.row_sums import Rows as Rows  # part of what a reducer gives
from hybridpar.comm.kvstore.row_sums import RowSums, coalesced, synchronize
from hybridpar.comm.lanes.lane import Op, describe
from hybridpar.comm.timeline.timeline import Timeline

Key = int | str
ReduceOp = Literal["sum", "max", "min", "mean"]
_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


class Reducer:
    """Combines the values of keys over the ranks of a group.

    Collective: construct it on all ranks. Every reducer has keys of its own.

    Args:
        group: the ranks. Its own collectives serve ``init``, ``use`` and ``barrier``.
        stall_seconds: a warning says which ranks have not pushed what others have, when they have waited for so long.
        timeout: seconds that a submission may wait for the other ranks to submit the same.
        timeline: records what travels when, but for rows.

    Attributes:
        rank, size, local_rank: of the group.
    """

    def __init__(
        self,
        group: Group,
        *,
        stall_seconds: float = 10.0,
        timeout: float = DEFAULT_TIMEOUT,
        timeline: Timeline | None = None,
    ) -> None:
        self._group = group
        self.rank, self.size, self.local_rank = group.rank, group.size, group.local_rank
        self._engine = AnyOrderEngine(group, stall_seconds=stall_seconds, timeout=timeout, timeline=timeline)
        self._rows = RowSums(group.new_lane())
        self._keys: dict[Key, _Key] = {}
        self._compressions: list[Compression] = []
        # After what it is made of, so that it is called before them.
        self._at_end = AtEnd(self.finish)

    def init(self, key: Key, tensor: Tensor) -> None:
        """Collective: ``init_many`` of one key."""
        self.init_many([key], [tensor])

    def init_many(self, keys: Sequence[Key], tensors: Sequence[Tensor]) -> None:
        """Collective: announce keys, and overwrite their tensors by those of rank 0.

        Args:
            keys: all new, the same on every rank and in the same order.
            tensors: of each key: any shape, strides and dtype that can be sent, the same on all ranks, all on one
                device.

        Raises:
            ValueError: a key is known already, or comes twice; there is not one tensor for each key (on every rank).
            CommunicationError: the ranks' keys, shapes or dtypes differ: names key, ranks and shapes (on every rank).
            TypeError: a dtype cannot be sent (on every rank).
        """
        raise_together(self._group, self._refused(keys, tensors))
        names = [name_of(key) for key in keys]
        indices = self._engine.register(names, tensors)
        for key, index, tensor in zip(keys, indices, tensors, strict=True):
            self._keys[key] = _Key(key, index, tensor.shape, tensor.dtype, tensor.device)
        for compression in self._compressions:
            self._add_coders(compression, keys)
        for tensor in tensors:
            values = tensor.detach().contiguous()
            self._group.broadcast(values)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)

    def use(self, compression: Compression) -> None:
        """Collective: from now on values may be submitted with ``compression``, of keys new and old.

        What a key keeps from step to step for a compression (MXNet's residual) starts at zero here, once.

        Raises:
            ValueError: the ranks' compressions differ (on every rank).
        """
        check_same_settings(self._group, "compression", {"compression": repr(compression)})
        if compression not in self._compressions:
            self._compressions.append(compression)
            self._add_coders(compression, list(self._keys))

    def submit(
        self,
        key: Key,
        tensor: Tensor,
        *,
        op: ReduceOp = "sum",
        priority: int = 0,
        compression: Compression | None = None,
    ) -> Future[Tensor]:
        """Combine this key's value over the ranks. Returns at once; from any thread, in any order.

        The n-th submission of a key meets the n-th on every other rank. The tensor is overwritten by the result: leave
        its memory alone until the future is done. Callbacks of the future run on the communication thread: they may
        submit, but must not wait.

        Args:
            tensor: of the shape, dtype and device of ``init``.
            op: the same on every rank. ``mean`` is the sum over the ranks divided by their number.
            priority: of what is ready everywhere the highest goes first.
            compression: one that was announced with ``use``; for ``sum`` and ``mean``. Keys whose values are as narrow
                as its wire format travel uncompressed.

        Returns:
            A future of ``tensor``. It raises CommunicationError, naming key and rank, if a rank is lost or late, or if
            the ranks asked for different operations.

        Raises:
            ValueError: an unknown key; shape, device, op, priority or compression are not as described.
            TypeError: ``mean`` of whole numbers, or a compression that does not fit the dtype.
            CommunicationError: something has failed before.
            RuntimeError: the reducer is closed.
        """
        if compression is not None:
            known = self._known(key)
            self._check_op(key, tensor, op)
            coded = self._submit_coded(known, tensor, op, priority, compression)
            if coded is not None:
                return coded
        return self.submit_many([key], [tensor], op=op, priority=priority)[0]

    def submit_many(
        self, keys: Sequence[Key], tensors: Sequence[Tensor], *, op: ReduceOp = "sum", priority: int | Sequence[int] = 0
    ) -> list[Future[Tensor]]:
        """``submit`` of several keys, none of them twice, uncompressed. Where all ranks do so, they travel together.

        Args:
            priority: of all, or one for each.

        Raises:
            As ``submit``, before anything is submitted.
        """
        indices, how, scale = self._terms(keys, tensors, op)
        return self._engine.submit_many(indices, tensors, op=how, scale=scale, priority=priority)

    def send(
        self,
        keys: Sequence[Key],
        tensors: Sequence[Tensor],
        *,
        op: ReduceOp = "sum",
        priority: int | Sequence[int] = 0,
        told: Told | None = None,
        notes: Sequence[Any] = (),
    ) -> list[Submission]:
        """``submit_many``, without the cost of a future for each of many small tensors: ``AnyOrderEngine.send``."""
        indices, how, scale = self._terms(keys, tensors, op)
        return self._engine.send(indices, tensors, op=how, scale=scale, priority=priority, told=told, notes=notes)

    def rows(self, key: Key, indices: Tensor, values: Tensor) -> Future[Rows]:
        """Sum rows over the ranks, each rank naming its own. Returns at once.

        Every rank calls this for the same keys in the same order: see Note [rows travel in program order] in
        ``hybridpar.comm.kvstore.row_sums``.

        Args:
            key: its value has the shape [n, ...].
            indices: int64 [k] in [0, n), in any order, repeated ones are added; k may be 0 and differ between ranks.
            values: [k, ...], of the key's dtype; CPU or the key's device.

        Returns:
            A future of (indices int64 [m] ascending: those of any rank, values [m, ...]): new tensors, on the device of
            ``values``, the same on every rank. Rows are added in rank order. It raises CommunicationError if a rank is
            lost or sent rows of another key.

        Raises:
            ValueError: an unknown key, or indices or values that do not fit.
            TypeError: dtypes are not as described.
            RuntimeError: the reducer is closed.
        """
        known = self._known(key)
        _check_rows(known, indices, values)
        names = [name_of(other) for other in self._keys]
        return self._rows.submit(known.index, names, *coalesced(indices, values))

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._group.barrier()

    def finish(self, wait_for_others: bool) -> None:
        """At the end of the process: Note [the last pushes] in ``hybridpar.comm.kvstore.ending``."""
        if wait_for_others:
            self._engine.wait_outstanding()
            wait(self._rows.outstanding())

    def close(self) -> None:
        """End the threads and free the communicators; what is outstanding fails, here and on the other ranks."""
        self._at_end.cancel()
        self._engine.close()
        self._rows.close()

    def _refused(self, keys: Sequence[Key], tensors: Sequence[Tensor]) -> Exception | None:
        if len(keys) != len(tensors):
            return ValueError(f"init: expected one value for each key, got {len(tensors)} for {len(keys)} keys")
        seen: set[Key] = set()
        for key in keys:
            if key in self._keys or key in seen:
                return ValueError(f"{name_of(key)} is initialised already; every key is initialised once")
            seen.add(key)
        return None

    def _known(self, key: Key) -> _Key:
        known = self._keys.get(key)
        if known is None:
            raise ValueError(f"{name_of(key)} is not known: expected a key that was initialised; call init first")
        return known

    def _terms(self, keys: Sequence[Key], tensors: Sequence[Tensor], op: ReduceOp) -> tuple[list[int], Op, float]:
        """Indices, operation and scale for the engine."""
        indices = [self._known(key).index for key in keys]
        if op == "mean":
            for key, tensor in zip(keys, tensors, strict=True):
                self._check_op(key, tensor, op)
            return indices, "sum", 1 / self.size
        self._check_op(keys[0], tensors[0], op)
        return indices, op, 1.0

    def _check_op(self, key: Key, tensor: Tensor, op: ReduceOp) -> None:
        if op not in _OPS:
            raise ValueError(f"{name_of(key)}: expected op 'sum', 'max', 'min' or 'mean', got {op!r}")
        if op == "mean" and not tensor.is_floating_point():
            raise TypeError(f"{name_of(key)}: expected floating-point values for 'mean', got {describe(tensor)}")

    def _add_coders(self, compression: Compression, keys: Sequence[Key]) -> None:
        """Collective: what travels for a compressed key is a tensor of its own to the engine."""
        coded = []
        for key in keys:
            known = self._keys[key]
            try:
                applies = compression.applies(name_of(key), known.dtype)
            except TypeError:
                continue  # submit raises it: a key that is never pushed does not matter
            if applies:
                example = torch.empty(known.shape, dtype=known.dtype, device=known.device)
                coded.append((known, compression.coder(example, self.size)))
        examples = [torch.empty(coder.numel, dtype=coder.dtype, device=known.device) for known, coder in coded]
        indices = self._engine.register([f"{name_of(known.key)} as {compression}" for known, _ in coded], examples)
        for index, (known, coder) in zip(indices, coded, strict=True):
            known.coded[compression] = _Coded(index, coder)

    def _submit_coded(
        self, known: _Key, tensor: Tensor, op: ReduceOp, priority: int, compression: Compression
    ) -> Future[Tensor] | None:
        """None where the values travel as they are."""
        name = name_of(known.key)
        if compression not in self._compressions:
            raise ValueError(f"{name}: expected a compression that was announced with use(), got {compression}")
        if op not in ("sum", "mean"):
            raise ValueError(f"{name}: expected op 'sum' or 'mean' with {compression}, got {op!r}")
        if tensor.shape != known.shape or tensor.dtype != known.dtype or tensor.device != known.device:
            expected = describe(torch.empty(known.shape, dtype=known.dtype, device="meta"))
            raise ValueError(
                f"{name}: expected {expected} on {known.device} as initialised, got {describe(tensor)} on "
                f"{tensor.device}"
            )
        if not compression.applies(name, known.dtype):
            return None
        return known.coded[compression].submit(self._engine, tensor, 1 / self.size if op == "mean" else 1.0, priority)


@dataclass(slots=True)
class _Coded:
    """One key under one compression, and memory for what travels."""

    index: int
    coder: Coder
    spare: list[Tensor] = field(default_factory=list)

    def submit(self, engine: AnyOrderEngine, tensor: Tensor, factor: float, priority: int) -> Future[Tensor]:
        tensor = tensor.detach()
        words = (
            self.spare.pop()
            if self.spare
            else torch.empty(self.coder.numel, dtype=self.coder.dtype, device=tensor.device)
        )
        self.coder.encode(tensor, words)
        result: Future[Tensor] = Future()
        result.set_running_or_notify_cancel()

        def decode(arrived: Future[Tensor]) -> None:
            error = arrived.exception()
            try:
                if error is None:
                    self.coder.decode(words, tensor)
                    if factor != 1:
                        tensor.mul_(factor)
                    synchronize(tensor)
                    self.spare.append(words)
            except Exception as failure:
                error = failure
            if error is None:
                result.set_result(tensor)
            else:
                result.set_exception(error)

        engine.submit(self.index, words, priority=priority).add_done_callback(decode)
        return result


@dataclass(slots=True)
class _Key:
    """A key that was initialised."""

    key: Key
    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    coded: dict[Compression, _Coded] = field(default_factory=dict)


def _check_rows(known: _Key, indices: Tensor, values: Tensor) -> None:
    name, shape = name_of(known.key), list(known.shape)
    if not shape:
        raise ValueError(f"{name}: expected a value with rows, got a key without dimensions")
    if indices.dtype != torch.int64 or values.dtype != known.dtype:
        kind = str(known.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected int64 indices and {kind} rows, got {describe(indices)} and "
                        f"{describe(values)}")  # fmt: skip
    if indices.dim() != 1 or list(values.shape) != [len(indices), *shape[1:]]:
        raise ValueError(
            f"{name}: expected indices [k] and rows {['k', *shape[1:]]}, got {list(indices.shape)} and "
            f"{list(values.shape)}"
        )
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < shape[0]:
        raise ValueError(
            f"{name}: expected indices in [0, {shape[0]}), got {int(indices.min())} to {int(indices.max())}"
        )


def name_of(key: Hashable) -> str:
    """How errors name a key: ``key 3``, ``key 'weight'``."""
    return f"key {key!r}"
