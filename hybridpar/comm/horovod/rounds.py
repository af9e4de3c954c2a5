"""What all ranks have asked for by name: found out in rounds, and done, on one thread.

# Note [any order of names]
Ranks may ask for different names first, from several threads, and for names that nobody has heard of. So a name is
settled in a round: every rank sends what it asks for and has not sent before, and all put these messages into equal
tables, which say what is complete, and in which order it is done. When to hold a round is agreed through an
``AnyOrderEngine``: a rank that has something to say, or waits for a name that others have not asked for yet, rings a
bell, a tensor of the engine. The engine finds out when all ranks have rung; each of them then holds one round, on one
thread and a lane of its own. So rounds, and what is done in them, have the same order on all ranks, while no rank's
program order matters. Nothing else decides: no clock, no rank's own history.

# Note [names that come again]
An allreduce by a name of the user's that is complete for the second time, with the same shape, dtype and factors, is
registered with the engine. From then on each rank gives it to the engine directly, and no round is needed: gradients
cost rounds in the first two steps only. Names made up by the face come once, and are never registered. A rank that
asks for a registered name in another way than the others would wait for ever, as they would. So what has been with the
engine for a second is named in a round, too, and when all have spoken, all are told. The engine's half is then made
whole by those who lack it, with values that nobody reads.

# Note [joined ranks]
A rank that joins waits for what it has asked for, and stands aside in the engine: there it goes along with whatever
the others send, bells included. In rounds it says that it has joined, and takes part in what the others do, with
values that change nothing; it learns shapes and dtypes from their messages. All ranks return in one negotiation.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group
from hybridpar.comm.horovod.execute import Executor, neutral
from hybridpar.comm.horovod.reduce_op import LANE_OPS, ReduceOp, Scaling
from hybridpar.comm.horovod.request import Operation, Request
from hybridpar.comm.horovod.table import Entry, Message, Table, Verdict
from hybridpar.comm.lanes.lane import Op
from hybridpar.comm.lanes.values import gather_json

_LOG = logging.getLogger(__name__)
_TICK_SECONDS = 1.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_SEEN, _REGISTERED = 1 << 16, 1 << 14
_END_SECONDS = 5.0
MADE_UP = ".noname."

Key = tuple[str, torch.dtype, tuple[int, ...], str, int, float, float, str]


@dataclass(frozen=True, slots=True)
class Registered:
    """How a reduction that the engine knows is given to it."""

    engine: AnyOrderEngine
    index: int
    op: Op
    factor: float
    scaling: Scaling
    request: Request


class Rounds:
    """The thread that holds rounds. Collective: construct it on all ranks, with equal arguments.

    Attributes:
        registered: reductions that need no round any more.
        failure: why nothing can be asked for any more.

    Args:
        group: the ranks. Nobody else may use it.
        flying: what this rank has asked for and not got back, by name; others add to it and take from it.
        timeout, stall_seconds: see ``Exchange``.
    """

    def __init__(self, group: Group, flying: Mapping[str, Operation], *, timeout: float, stall_seconds: float) -> None:
        self._group, self._flying = group, flying
        self._timeout, self._stall_seconds = timeout, stall_seconds
        self._warned_seconds = 0.0
        self.registered: dict[Key, Registered] = {}
        self.failure: str | None = None
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._lock = threading.Lock()
        self._news: list[Operation] = []
        self._announced: dict[str, Operation] = {}
        self._rung, self._joined, self._holds_round = False, False, False
        self._tick_seconds = min(_TICK_SECONDS, timeout / 4)
        self._tick_at, self._ring_at = 0.0, math.inf
        self._asides: dict[str, Future[int]] = {}
        self._lane = group.new_lane()
        self._executor, self._table = Executor(self._lane), Table(group.ranks)
        self._engines = {"cpu": AnyOrderEngine(group, timeout=timeout, stall_seconds=stall_seconds)}
        (self._bell,) = self._engines["cpu"].register(["a call by name"], [torch.empty(1, dtype=torch.uint8)])
        self._signals: queue.SimpleQueue[bool | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hybridpar-horovod", daemon=True)
        self._thread.start()

    # Other threads

    def ask(self, operation: Operation) -> None:
        """Have it done as soon as all ranks have asked for it.

        Raises:
            CommunicationError: there was a failure before.
        """
        with self._lock:
            if self.failure is not None:
                raise self.error(operation, self.failure)
            self._news.append(operation)
        self._ring()

    def join(self) -> Future[int]:
        """Note [joined ranks]. Nothing of this rank is in flight. The future gives the rank that joined last."""
        with self._lock:
            if self.failure is not None:
                raise CommunicationError(self.failure, rank=self._job_rank, operation="join", tensor="nothing")
            self._joined = True
            self._asides = {kind: self._step_aside(engine) for kind, engine in self._engines.items()}
            return self._asides["cpu"]

    def wait_for_return(self) -> None:
        """All engines have let this rank come back."""
        for future in list(self._asides.values()):
            future.result()

    def close(self) -> None:
        """End the thread and free the communicators. What is in flight fails, here and on the other ranks."""
        waited_for = self._holds_round or not self._signals.empty()
        self._fail("Horovod's face was shut down on this rank", abort=waited_for)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    def error(self, operation: Operation, reason: str) -> CommunicationError:
        """For what this rank has asked for."""
        kind = operation.request.kind
        return CommunicationError(reason, rank=self._job_rank, operation=kind, tensor=operation.name)

    @property
    def _job_rank(self) -> int:
        return self._group.ranks[self._group.rank]

    def _ring(self) -> None:
        """Note [any order of names]. The bell has no time-out of its own: names have."""
        with self._lock:
            if self._rung or self.failure is not None:
                return
            self._rung = True
        try:
            bell = self._engines["cpu"].submit(self._bell, torch.zeros(1, dtype=torch.uint8), op="max", patient=True)
        except (CommunicationError, RuntimeError) as error:
            self._signals.put(error)
        else:
            bell.add_done_callback(lambda done: self._signals.put(done.exception() or self._joined))

    def _step_aside(self, engine: AnyOrderEngine) -> Future[int]:
        if engine is not self._engines["cpu"]:
            return engine.step_aside()
        future = engine.step_aside(lambda index: self._signals.put(True) if index == self._bell else None)
        future.add_done_callback(lambda done: self._return())
        return future

    def _return(self) -> None:
        """On the engine's thread, before it agrees on anything else: from here on this rank does not join rounds."""
        self._joined = False

    # The thread

    @torch.no_grad()
    def _run(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(self._group.local_rank % torch.cuda.device_count())
        try:
            while self.failure is None:
                try:
                    signal = self._signals.get(timeout=max(0.0, min(self._tick_at, self._ring_at) - time.monotonic()))
                except queue.Empty:
                    signal = None
                if isinstance(signal, BaseException):
                    raise signal
                if signal is not None:
                    self._holds_round = True
                    self._hold_round(joined=signal)
                    self._holds_round = False
                self._look_at_the_clock()
        except BaseException as error:
            reason = error.reason if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
            self._fail(reason)
        finally:
            for engine in self._engines.values():
                engine.close()
            self._lane.close()

    def _hold_round(self, *, joined: bool) -> None:
        with self._lock:
            news, self._news = self._news, []
            self._rung = False
            self._announced |= {operation.name: operation for operation in news}
        message = Message(
            joined,
            {one.name: Entry(one.request, one.own, one.problem) for one in news},
            {one.name: one.request for one in self._late()},
        )
        everyone = [Message.read(values) for values in gather_json(self._lane, message.values())]
        verdicts = self._table.absorb(everyone)
        good = [verdict for verdict in verdicts if not verdict.problem]
        self._refuse([verdict for verdict in verdicts if verdict.problem], joined=joined)
        self._register(good)
        for verdict in good:
            self._do(verdict)
        self._plan_to_ring(fruitful=bool(verdicts))

    def _plan_to_ring(self, *, fruitful: bool) -> None:
        """Where names of this rank are still open: at once, or a share of the time later that the last one has waited.

        Ranks that wait for different names would else hold rounds without end.
        """
        self._ring_at = math.inf
        if self._announced:
            now = time.monotonic()
            youngest = max(one.since for one in self._announced.values())
            pause = 0.0 if fruitful else min(max((now - youngest) / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            self._ring_at = now + pause

    def _late(self) -> list[Operation]:
        """What the engine has had for so long that another rank may have asked for something else."""
        before = time.monotonic() - _TICK_SECONDS / 2
        flying = list(self._flying.values())
        return [one for one in flying if one.direct and one.since < before and not one.future.done()]

    def _refuse(self, verdicts: list[Verdict], *, joined: bool) -> None:
        """Every rank that asked is told. Note [names that come again]."""
        for verdict in verdicts:
            if self._group.rank in verdict.waits:
                late = self._flying[verdict.name]
                late.refused = self.error(late, verdict.problem)
        if any(verdict.waits for verdict in verdicts):
            # No result may arrive where it is not yet known that it is none.
            self._lane.barrier()
        for verdict in verdicts:
            if verdict.waits and self._group.rank not in verdict.waits and not joined:
                request = next(iter(verdict.waits.values()))
                known = self.registered[_key(verdict.name, request)]
                known.engine.submit(known.index, neutral(request), op=known.op)
            # Last: whoever hears of it may ask again at once, and that must not be taken for the other half.
            mine = self._announced.pop(verdict.name, None)
            if mine is not None:
                mine.fail(self.error(mine, verdict.problem))

    def _register(self, verdicts: list[Verdict]) -> None:
        """Note [names that come again]. Collective where there is something to register, which all ranks know."""
        again: dict[str, list[tuple[Key, Request]]] = {}
        for verdict in verdicts:
            request = verdict.request
            if request.kind != "allreduce" or ReduceOp(request.op) not in LANE_OPS or MADE_UP in verdict.name:
                continue
            key = _key(verdict.name, request)
            if key in self._seen and len(self.registered) < _REGISTERED:
                again.setdefault(request.device, []).append((key, request))
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        for kind, found in again.items():
            self._register_on(kind, found)

    def _register_on(self, kind: str, found: list[tuple[Key, Request]]) -> None:
        if kind not in self._engines:
            self._add_engine(kind)
        engine = self._engines[kind]
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # Examples of the right shapes, without the memory.
        examples = [torch.empty((), dtype=one.torch_dtype, device=device).expand(one.shape) for _, one in found]
        indices = engine.register([key[0] for key, _ in found], examples)
        for (key, request), index in zip(found, indices, strict=True):
            scaling = request.scaling(self._group.size)
            # Whole numbers cannot be scaled by the engine.
            factor = scaling.before if request.torch_dtype.is_floating_point else 1.0
            self.registered[key] = Registered(engine, index, LANE_OPS[ReduceOp(request.op)], factor, scaling, request)

    def _add_engine(self, kind: str) -> None:
        engine = AnyOrderEngine(self._group, timeout=self._timeout, stall_seconds=self._stall_seconds)
        with self._lock:
            self._engines[kind] = engine
            if self._joined:
                self._asides[kind] = self._step_aside(engine)

    def _do(self, verdict: Verdict) -> None:
        mine = self._announced.pop(verdict.name, None)
        if verdict.request.kind == "task":
            assert mine is not None and mine.task is not None
            try:
                mine.arrive(mine.task())
            except (ValueError, TypeError) as error:
                mine.fail(error)
            return
        result = self._executor.run(verdict, mine)
        if mine is not None:
            mine.arrive(result)

    def _look_at_the_clock(self) -> None:
        """Names have waited for some time longer."""
        now = time.monotonic()
        if now >= self._ring_at:
            self._ring_at = math.inf
            self._ring()
        if now < self._tick_at:
            return
        self._tick_at = now + self._tick_seconds
        if self._late():
            self._ring()
        with self._lock:
            waiting = [*self._announced.values(), *self._news]
        if not waiting:
            self._warned_seconds = 0.0
            return
        oldest = min(waiting, key=lambda one: one.since)
        seconds = now - oldest.since
        alone = f"asked for by rank {self._job_rank}; not all others have asked for anything since"
        told = self._table.who(oldest.name) or alone
        if seconds >= self._timeout:
            raise self.error(oldest, f"time-out of {self._timeout:g} s: {told}")
        if seconds >= max(self._stall_seconds, 2 * self._warned_seconds):
            self._warned_seconds = seconds
            _LOG.warning("%s: waited for %.0f s: %s", oldest.name, seconds, told)

    def _fail(self, reason: str, *, abort: bool = True) -> None:
        """Nothing more can be asked for, and nothing in flight will come.

        Args:
            abort: whether other ranks may wait for this one in a round.
        """
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            lost = [*self._announced.values(), *self._news]
            self._announced, self._news = {}, []
        for operation in lost:
            operation.fail(self.error(operation, reason))
        for engine in self._engines.values():
            engine.close()
        if abort:
            self._lane.abort(reason)
        self._signals.put(None)


def _key(name: str, request: Request) -> Key:
    factors = request.prescale, request.postscale
    return name, request.torch_dtype, request.shape, request.device, request.op, *factors, request.detail
