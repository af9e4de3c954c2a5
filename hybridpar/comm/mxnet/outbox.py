"""Sends buffers: as functions of MXNet's engine that start when a buffer is filled, and end when the sum is in it.

# Note [errors surface]
A push that fails does so in three places, of which a script meets one whatever it does. The buffer carries the error
through MXNet's engine, over the updater and the pull, to the call that waits: ``asnumpy``, ``wait_to_read``,
``waitall`` raise it. The store remembers it, and every later call of the store raises it: MXNet itself tells of an
error only once, and what was stored is no longer the same on every rank, so a store that has failed stays failed. And
it is logged when it happens.

If an operator of this rank fails before a buffer is filled, the other ranks would wait for values that never come. So
the engine's word that it skipped a push ends the store's communication, and the other ranks fail too.

# Note [small keys]
A function of the engine costs more than a small sum. So the keys of one call that lie side by side are sent by one
function, up to a megabyte of them: they leave when all of them are computed, and are there when all have arrived. Ranks
that push them in other calls, or in another order, meet all the same, as long as no rank computes one of them from the
sum of another one.

# Note [forks]
Before a process forks (Gluon's DataLoader does), MXNet waits for its engine with the interpreter in its hands, which
our functions in the engine need. So Python waits for those first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mxnet.base import MXNetError
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.kvstore.compression import Compression
from hybridpar.comm.kvstore.ending import AtEnd
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Reducer, Rows, name_of
from hybridpar.comm.mxnet import engine
from hybridpar.comm.mxnet.arrays import Buffer, NDArray
from hybridpar.comm.mxnet.engine import Completion, StoreError

_LOG = logging.getLogger(__name__)
_BYTES_TOGETHER = 1 << 20
_LAST_STEPS_SECONDS = 0.002  # in which threads of the engine come out of functions that have ended


@dataclass(frozen=True, slots=True)
class Push:
    """One key, the buffer with its values, and how they travel."""

    key: Key
    buffer: Buffer
    compression: Compression | None


class Outbox:
    """What a store sends. See Note [errors surface], Note [forks], and Note [the last pushes] in kvstore.ending."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._unfilled: NDArray | None = None  # knows why it is, where an operator of this rank has failed
        self._closed = False
        self._idle = threading.Condition()
        self._busy = 0  # functions that have not returned, and pushes that have not arrived
        self._at_end = AtEnd(self.finish)
        os.register_at_fork(before=_BeforeFork(self))

    def send(self, pushes: Iterable[Push], *, op: ReduceOp, priority: int) -> None:
        """The values of all buffers, combined over the ranks, take their place. Returns at once.

        Everything that uses a buffer's array from now on waits for that, in MXNet's engine. See Note [small keys].
        """
        held: list[Push] = []
        held_bytes = 0
        for push in pushes:
            if push.compression is not None:
                self._send([push], op, priority)
                continue
            held.append(push)
            held_bytes += push.buffer.tensor.nbytes
            if held_bytes >= _BYTES_TOGETHER:
                self._send(held, op, priority)
                held, held_bytes = [], 0
        if held:
            self._send(held, op, priority)

    def _send(self, pushes: Sequence[Push], op: ReduceOp, priority: int) -> None:
        """As one function of the engine."""

        def submit(completion: Completion) -> None:
            try:
                futures = self._submit(pushes, op, priority)
            except BaseException as error:
                self.fail(error)
                completion(error)
                self._end(2)
                return
            group = _Group(len(futures), lambda error: self._arrived(error, completion))
            for future in futures:
                future.add_done_callback(group.arrived)
            self._end()

        with self._idle:
            self._busy += 2
        first = name_of(pushes[0].key)
        name = first if len(pushes) == 1 else f"{first} and {len(pushes) - 1} more"
        engine.push(
            submit,
            writes=[push.buffer.array for push in pushes],
            skipped=lambda: self._skipped(name, pushes[0].buffer.array),
            priority=priority,
            name=f"hybridpar {name}",
        )

    def _submit(self, pushes: Sequence[Push], op: ReduceOp, priority: int) -> list[Future[Tensor]]:
        if len(pushes) > 1:
            keys, tensors = [push.key for push in pushes], [push.buffer.tensor for push in pushes]
            return self._reducer.submit_many(keys, tensors, op=op, priority=priority)
        (push,) = pushes
        tensor, compression = push.buffer.tensor, push.compression
        return [self._reducer.submit(push.key, tensor, op=op, priority=priority, compression=compression)]

    def send_rows(self, key: Key, indices: Tensor, rows: Tensor) -> Future[Rows]:
        """Sums of rows over the ranks. Returns at once; see ``Reducer.rows``."""
        future = self._reducer.rows(key, indices, rows)
        future.add_done_callback(self._note)
        return future

    def check(self) -> None:
        """Raises StoreError if anything has failed so far."""
        if self._failure is None:
            return
        unfilled, self._unfilled = self._unfilled, None
        if unfilled is not None:
            try:
                unfilled.wait_to_read()
            except MXNetError as error:
                self._failure += f": {error}"
        raise StoreError(self._failure)

    def fail(self, error: BaseException) -> None:
        """The first error counts."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = engine.text_of(error)
        _LOG.error("%s", error)

    def close(self) -> None:
        """What has not arrived fails, here and on the other ranks."""
        with self._lock:
            self._closed = True
        self._at_end.cancel()
        self._reducer.close()

    def _arrived(self, error: BaseException | None, completion: Completion) -> None:
        if error is not None:
            self.fail(error)
        completion(error)
        self._end()

    def _end(self, count: int = 1) -> None:
        with self._idle:
            self._busy -= count
            if self._busy == 0:
                self._idle.notify_all()

    def _note(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)

    def _skipped(self, name: str, unfilled: NDArray) -> None:
        self._end(2)
        with self._lock:
            known = self._failure is not None or self._closed
        if known:
            return
        self._unfilled = unfilled
        self.fail(
            CommunicationError(
                "MXNet did not run it, because an operator failed before",
                rank=self._reducer.rank,
                operation="push",
                tensor=name,
            )
        )
        # Closing joins threads, for which this one, MXNet's, must not wait.
        threading.Thread(target=self._reducer.close, name="hybridpar-skipped", daemon=True).start()

    def finish(self, wait: bool) -> None:
        """At the end of the process."""
        if wait:
            self.await_idle()
        self._reducer.finish(wait)
        self.close()

    def await_idle(self) -> None:
        """Return when nothing that was sent is in MXNet's engine any more, whether it arrived or failed."""
        with self._idle:
            self._idle.wait_for(lambda: self._busy == 0)


class _Group:
    """Calls ``done``, with the first error or None, when a number of futures are done."""

    def __init__(self, count: int, done: Callable[[BaseException | None], None]) -> None:
        self._count, self._done = count, done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def arrived(self, future: Future[Any]) -> None:
        error = future.exception()
        with self._lock:
            self._error = self._error or error
            self._count -= 1
            if self._count:
                return
        self._done(self._error)


class _BeforeFork:
    """Note [forks]."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._process = weakref.ref(outbox), os.getpid()

    def __call__(self) -> None:
        outbox = self._outbox()
        if outbox is not None and os.getpid() == self._process:
            outbox.await_idle()
            time.sleep(_LAST_STEPS_SECONDS)
