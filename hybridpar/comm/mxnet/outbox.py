"""Sends buffers: as functions of MXNet's engine that start when a buffer is filled, and end when the sum is in it.

# Note [errors surface]
A push that fails does so in three places, of which a script meets one whatever it does. The buffer carries the error
through MXNet's engine, over the updater and the pull, to the call that waits: ``asnumpy``, ``wait_to_read``,
``waitall`` raise it. The store remembers it, and every later call of the store raises it: MXNet itself tells of an
error only once, and what was stored is no longer the same on every rank, so a store that has failed stays failed. And
it is logged when it happens.

If an operator of this rank fails before a buffer is filled, the other ranks would wait for values that never come. So
the engine's word that it skipped a push ends the store's communication, and the other ranks fail too. That word comes
through the inbox: the array that the operator should have written may tell of its error a moment before the store.

# Note [small keys]
A function of the engine costs more than a small sum. So the keys of one call that lie side by side are sent by one
function, up to a megabyte of them: they leave when all of them are computed, and are there when all have arrived. Ranks
that push them in other calls, or in another order, meet all the same, as long as no rank computes one of them from the
sum of another one. Functions of which several have run when somebody looks are submitted together.

An operator of MXNet that copies costs as much as such a function. So the function copies a small value of one dimension
into the buffer itself; see Note [copies in plain order].

# Note [one push after the other]
Without an updater the pushes of a key take turns with two buffers, and nothing else would keep the second one, whose
value may be computed earlier, from leaving before the first. So a push also waits for what is stored by the one before.

# Note [forks]
Before a process forks (Gluon's DataLoader does), MXNet waits for its engine with the interpreter in its hands, which
whoever completes our functions needs. So Python waits for those first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from mxnet.base import MXNetError
from torch import Tensor

from hybridpar.comm.any_order.submission import Submission
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.kvstore.compression import Compression
from hybridpar.comm.kvstore.ending import AtEnd
from hybridpar.comm.kvstore.reducer import Key, ReduceOp, Reducer, Rows, name_of
from hybridpar.comm.mxnet.arrays import Buffer, NDArray
from hybridpar.comm.mxnet.engine import Arrival, Engine, StoreError, text_of

_LOG = logging.getLogger(__name__)
BYTES_TOGETHER = 1 << 20
_NOT_PLAIN = (
    "expected values in plain order, which a view of an array of several dimensions may lack; push a copy of it: "
)
_LAST_STEPS_SECONDS = 0.002  # in which threads of the engine come out of functions that have ended


@dataclass(eq=False, slots=True)
class Push:
    """One key, the buffer for its values, and how they travel.

    Attributes:
        source: the values, a plain array that the function copies; None where operators fill the buffer.
        after: what is stored so far, see Note [one push after the other]; None where the buffer is always the same.
        back: whether the result is copied into ``source``, too.
    """

    key: Key
    buffer: Buffer
    compression: Compression | None = None
    source: NDArray | None = None
    after: Buffer | None = None
    back: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    """What a function sends.

    Attributes:
        left: how many of its keys have not arrived.
        error: the first of those that never will.
    """

    pushes: Sequence[Push]
    op: ReduceOp
    priority: int
    number: int = 0  # of the function, once it has run
    left: int = 0
    error: BaseException | None = None


class Outbox:
    """What a store sends. See Note [errors surface], Note [forks], and Note [the last pushes] in kvstore.ending."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._unfilled: NDArray | None = None  # knows why it is, where an operator of this rank has failed
        self._closed = False
        self.engine = Engine(self._receive)
        # After the engine, so that it is called before the engine's own end.
        self._at_end = AtEnd(self.finish)
        os.register_at_fork(before=_BeforeFork(self))

    def send(self, pushes: Sequence[Push], *, op: ReduceOp, priority: int) -> None:
        """The values of all buffers, combined over the ranks, take their place. Returns at once.

        Everything that uses a buffer's array from now on waits for that, in MXNet's engine. See Note [small keys].
        """
        if len(pushes) == 1:
            self._send(pushes, op, priority)
            return
        held: list[Push] = []
        held_bytes = 0
        for push in pushes:
            if push.compression is not None:
                self._send([push], op, priority)
                continue
            held.append(push)
            held_bytes += push.buffer.nbytes
            if held_bytes >= BYTES_TOGETHER:
                self._send(held, op, priority)
                held, held_bytes = [], 0
        if held:
            self._send(held, op, priority)

    def _send(self, pushes: Sequence[Push], op: ReduceOp, priority: int) -> None:
        """As one function of the engine."""
        reads, writes, copied = list[int](), list[int](), list[int]()
        for push in pushes:
            buffer = push.buffer
            buffer.source = 0
            writes.append(buffer.handle)
            if push.after is not None:
                reads.append(push.after.handle)
            if push.source is not None:
                source = buffer.source = push.source.handle.value
                (writes if push.back else reads).append(source)
                copied += (source, buffer.address, buffer.nbytes)
        number = self.engine.push(
            _Load(pushes, op, priority), reads=reads, writes=writes, copied=copied, back=pushes[0].back,
            priority=priority, name="hybridpar push",
        )  # fmt: skip
        for push in pushes:
            push.buffer.number = number

    def _receive(self, arrived: Sequence[Arrival]) -> None:
        """Functions have run, so that their buffers are filled, or were skipped."""
        together: dict[ReduceOp, list[Arrival]] = {}
        for one in arrived:
            load: _Load = one.load
            if not one.ran:
                self._skipped(_name(load.pushes), load.pushes[0].buffer.array)
            elif one.problem:
                self._refuse([one], self._error(_NOT_PLAIN + one.problem, _name(load.pushes)))
            elif load.pushes[0].compression is not None:
                self._submit([one], load.op)
            else:
                together.setdefault(load.op, []).append(one)
        for op, ready in together.items():
            self._submit(ready, op)

    def _submit(self, ready: Sequence[Arrival], op: ReduceOp) -> None:
        """Their keys are all different, because a key has one push in the engine at a time."""
        pushes, priorities, loads = list[Push](), list[int](), list[_Load]()
        for one in ready:
            load: _Load = one.load
            load.number, load.left = one.number, len(load.pushes)
            pushes += load.pushes
            priorities += [load.priority] * load.left
            loads += [load] * load.left
        keys, tensors = [push.key for push in pushes], [push.buffer.tensor for push in pushes]
        try:
            if (compression := pushes[0].compression) is None:
                self._reducer.send(keys, tensors, op=op, priority=priorities, told=self._told, notes=loads)
            else:
                self._reducer.submit(
                    keys[0], tensors[0], op=op, priority=priorities[0], compression=compression
                ).add_done_callback(partial(self._arrived, ready[0].number))
        except BaseException as error:
            self._refuse(ready, error)

    def _refuse(self, functions: Sequence[Arrival], error: BaseException) -> None:
        self.fail(error)
        for one in functions:
            self.engine.complete(one.number, error)

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
            self._failure = text_of(error)
        _LOG.error("%s", error)

    def close(self) -> None:
        """What has not arrived fails, here and on the other ranks."""
        with self._lock:
            self._closed = True
        self._at_end.cancel()
        self._reducer.close()
        self.engine.stop(self._error("the store was closed", "what was on its way"))

    def _told(self, submissions: Sequence[Submission]) -> None:
        """Keys have arrived, or one has failed. A function ends with the last of its keys."""
        ended, failed = list[_Load](), list[_Load]()
        with self._lock:
            for submission in submissions:
                load: _Load = submission.note
                load.error = load.error or submission.error
                load.left -= 1
                if not load.left:
                    (ended if load.error is None else failed).append(load)
        if ended:
            self.engine.complete_all([load.number for load in ended])
        for load in failed:
            self._end(load.number, load.error)

    def _arrived(self, number: int, future: Future[Any]) -> None:
        self._end(number, future.exception())

    def _end(self, number: int, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        self.engine.complete(number, error)

    def _error(self, reason: str, name: str) -> CommunicationError:
        return CommunicationError(reason, rank=self._reducer.rank, operation="push", tensor=name)

    def _note(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)

    def _skipped(self, name: str, unfilled: NDArray) -> None:
        with self._lock:
            known = self._failure is not None or self._closed
        if known:
            return
        self._unfilled = unfilled
        self.fail(self._error("MXNet did not run it, because an operator failed before", name))
        # Closing joins threads, which must not wait for this one.
        threading.Thread(target=self._reducer.close, name="hybridpar-skipped", daemon=True).start()

    def finish(self, wait: bool) -> None:
        """At the end of the process."""
        if wait:
            self.await_idle()
        self._reducer.finish(wait)
        self.close()

    def await_idle(self) -> None:
        """Return when nothing that was sent is in MXNet's engine any more, whether it arrived or failed."""
        self.engine.wait_idle()


def _name(pushes: Sequence[Push]) -> str:
    """How errors name what one function sends."""
    first = name_of(pushes[0].key)
    return first if len(pushes) == 1 else f"{first} and {len(pushes) - 1} more"


class _BeforeFork:
    """Note [forks]."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._process = weakref.ref(outbox), os.getpid()

    def __call__(self) -> None:
        outbox = self._outbox()
        if outbox is not None and os.getpid() == self._process:
            outbox.await_idle()
            time.sleep(_LAST_STEPS_SECONDS)
