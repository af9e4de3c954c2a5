"""A timeline of torch's own DistributedDataParallel, on the rows that hp.DataParallel has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import hybridpar as hp
from hybridpar.comm.timeline.trace import COMPUTATION

TRACK = "lane 0"
# DDP's state and bucket -> future of the bucket's sums.
CommunicationHook = Callable[[Any, Any], Any]


class RecordedDdp:
    """Watches a model through hooks.

    ``backward`` ends, and ``wait`` begins, when the last bucket is given to the process group: nothing is left to
    compute then. ``wait`` ends when the last bucket has come; what follows until the optimizer's step is ``unpack``.
    ``send`` spans do not overlap, however many buckets are on their way: each ends when one has come.

    Args:
        model: one without a communication hook.
        communication: the hook that it would have; ``allreduce_hook`` does what it does without one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        timeline: hp.Timeline,
        communication: CommunicationHook,
    ) -> None:
        self._timeline = timeline
        self._lock = Lock()  # buckets come on threads of the process group
        self._on_their_way, self._last_is_sent = 0, False
        self._open: dict[str, AbstractContextManager[None]] = {}
        model.register_comm_hook(None, _watched(self, communication))
        model.register_forward_pre_hook(lambda *_: self._begin("forward"))
        model.register_forward_hook(lambda *_: self._end("forward"))
        model.register_full_backward_pre_hook(lambda *_: self._begin("backward"))
        optimizer.register_step_pre_hook(lambda *_: self._gradients_are_there())

    def sent(self, is_last: bool) -> None:
        """A bucket was given to the process group."""
        with self._lock:
            if not self._on_their_way:
                self._begin("send", TRACK)
            self._on_their_way += 1
            if is_last:
                self._last_is_sent = True
                self._end("backward")
                self._begin("wait")

    def came(self) -> None:
        """A bucket has its sums."""
        with self._lock:
            self._end("send")
            self._on_their_way -= 1
            if self._on_their_way:
                self._begin("send", TRACK)
            elif self._last_is_sent:
                self._last_is_sent = False
                self._end("wait")
                self._begin("unpack")

    def _gradients_are_there(self) -> None:
        self._end("unpack")
        self._timeline.instant("step", row=COMPUTATION)

    def _begin(self, name: str, row: str = COMPUTATION) -> None:
        self._open[name] = self._timeline.span(name, row=row)
        self._open[name].__enter__()

    def _end(self, name: str) -> None:
        self._open.pop(name).__exit__(None, None, None)


def record_step(optimizer: Optimizer, timeline: hp.Timeline) -> None:
    """Record the optimizer's step, of a script that calls it."""
    spans: list[AbstractContextManager[None]] = []

    def begin(*_: Any) -> None:
        spans.append(timeline.span("optimizer", row=COMPUTATION))
        spans[-1].__enter__()

    def end(*_: Any) -> None:
        spans.pop().__exit__(None, None, None)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)


def _watched(recorder: RecordedDdp, communication: CommunicationHook) -> Any:
    # No annotations: DDP checks them, and expects classes.
    def watched(state, bucket):  # type: ignore[no-untyped-def]
        recorder.sent(bucket.is_last())

        def came(future):  # type: ignore[no-untyped-def]
            recorder.came()
            return future.value()

        return communication(state, bucket).then(came)

    return watched
