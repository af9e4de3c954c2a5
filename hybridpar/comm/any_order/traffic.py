"""The thread that communicates for an ``AnyOrderEngine``: what is ready everywhere is sent, again and again."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridpar.comm.any_order.outstanding import Outstanding
from hybridpar.comm.any_order.readiness import Agreement, Forecast, Readiness, Terms
from hybridpar.comm.any_order.sender import FLOATS, Sender
from hybridpar.comm.any_order.stalls import Inquiry, closers
from hybridpar.comm.any_order.submission import Submission
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import Lane

_LOG = logging.getLogger(__name__)
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Registered:
    """What may be submitted under one index."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Traffic:
    """The communication thread: agree, send, and again.

    # Note [end of the process]
    A thread that comes out of a library's call, or frees what the library holds, while the interpreter is going down
    takes the process with it. So the thread is told to end, and waited for, before that.
    """

    def __init__(
        self,
        outstanding: Outstanding,
        registered: Sequence[Registered],
        inquiry: Inquiry,
        control: Lane,
        data: Lane,
        sender: Sender,
    ) -> None:
        self.went_along: Callable[[int], None] | None = None
        self._outstanding, self._registered, self._inquiry = outstanding, registered, inquiry
        self._control, self._data = control, data
        self._readiness, self._forecast, self._sender = Readiness(control), Forecast(), sender
        self._over = False  # no rank will come to another negotiation
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hybridpar-any-order", daemon=True)

    def start(self) -> None:
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End now. Lets the thread come out of a call, and the other ranks know what cannot arrive."""
        if self._outstanding.close():
            self._data.abort()
        if self.is_current_thread():
            return
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():  # the others do not come to this rank's last negotiation
            self._control.abort()
            self._thread.join(_END_SECONDS)

    def _stop_at_exit(self) -> None:
        """Note [end of the process]."""
        if os.getpid() == self._process:
            if lost := len(self._outstanding.submissions()):
                _LOG.warning("%d submissions had not arrived when the process ended; call wait_all() before", lost)
            self.stop()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while (ready := self._outstanding.await_turn(self._forecast.expected)) is not None:
                self._turn(ready)
        except BaseException as error:
            reason = error.reason if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
            self._fail(reason, gave_up=not isinstance(error, CommunicationError))
        finally:
            self._outstanding.end()
            if self._outstanding.failure is None:
                self._leave()
            self._control.close()
            self._data.close()
            atexit.unregister(self._stop_at_exit)

    def _leave(self) -> None:
        """Note [leaving] in readiness.py."""
        self._inquiry.publish(None)  # whoever is left asks who it was
        if self._over:
            return
        try:
            self._readiness.agree({}, self._outstanding.registered, leaving=True)
        except CommunicationError as error:
            _LOG.info("the others were not told that this rank has closed its engine: %s", error)

    def give_up(self, reason: str) -> None:
        """From another thread."""
        self._fail(reason, gave_up=True)

    def _turn(self, ready: dict[int, Terms]) -> None:
        aside = self._outstanding.aside is not None
        agreement = self._readiness.agree(ready, self._outstanding.registered, aside=aside)
        if agreement.indices:
            self._send(agreement, aside=aside)
        else:
            self._outstanding.found_nothing(grown=agreement.grown)
        if agreement.last is not None:
            self._outstanding.come_back(agreement.last)
        if agreement.over:
            self._over = True
            if not self._outstanding.ended:
                reason = closers(self._inquiry.ask()) or "another rank left the engine"
                self._outstanding.fail(reason, gave_up=False)

    def _send(self, agreement: Agreement, *, aside: bool) -> None:
        self._forecast.saw(agreement.indices)
        stand_in = self._stand_in if aside else None
        taken = self._outstanding.take(agreement.indices, grown=agreement.grown, stand_in=stand_in)
        if not taken:
            self._data.abort()  # closed in this moment, when the others have begun to send
        for submission in taken:
            if dispute := agreement.disputes.get(submission.index):
                self._outstanding.refuse([submission], f"the ranks asked for different operations: {dispute}")
        agreed = [submission for submission in taken if submission.index not in agreement.disputes]
        for arrived in self._sender.send(agreed, self._readiness.terms, self._readiness.edition):
            self._outstanding.arrived(arrived)
        self._outstanding.travelled()

    def _stand_in(self, index: int) -> Submission:
        """For a tensor that only the others have submitted: values that change nothing."""
        known, terms, went_along = self._registered[index], self._readiness.terms[index], self.went_along
        value: float = 0
        if terms.op != "sum":
            limits = torch.finfo(known.dtype) if known.dtype in FLOATS else torch.iinfo(known.dtype)
            value = limits.min if terms.op == "max" else limits.max
            if known.dtype in FLOATS:
                value = math.copysign(math.inf, value)
        tensor = torch.full(known.shape, value, dtype=known.dtype, device=known.device)
        ready = torch.cuda.current_stream(known.device).record_event() if tensor.is_cuda else None

        def tell(stand_ins: Sequence[Submission]) -> None:
            if went_along is not None and stand_ins[0].error is None:
                went_along(index)

        return Submission(index, tensor, terms, 1.0, 0.0, ready, tell, self._outstanding.wait_for)

    def _fail(self, reason: str, *, gave_up: bool) -> None:
        if not gave_up and not self._outstanding.ended:
            reason += self._inquiry.reasons()
        if self._outstanding.fail(reason, gave_up=gave_up):
            self._control.abort()
            self._data.abort()
