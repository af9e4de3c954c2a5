"""One tensor on its way, and who hears of its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridpar.comm.any_order.readiness import Terms
from hybridpar.comm.errors import CommunicationError

_LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Submission:
    """One tensor on its way.

    Attributes:
        since: when it was submitted, by the clock of ``Outstanding``.
        ready: on CUDA: when the tensor holds its values.
        told: is told when the result is in place, or never will be; None where nobody is but who asks.
        note: whatever ``told`` needs to know.
        patient: whether it may wait for ever.
        wait: returns when these submissions are done. It may be called where ``told`` is not.
        is_done: whether the result is in place, or never will be, and who is to be told has been.
        error: why it never will be.
    """

    index: int
    tensor: Tensor
    terms: Terms
    scale: float
    since: float
    ready: torch.cuda.Event | None
    told: Told | None
    wait: Callable[[Iterable[Submission]], None]
    note: Any = None
    patient: bool = False
    is_done: bool = False
    error: CommunicationError | None = None

    def done(self) -> bool:
        """As of a future."""
        return self.is_done

    def result(self) -> Tensor:
        """As of a future: waits, and raises the error. Not on the communication thread."""
        if not self.is_done:
            self.wait((self,))
        if self.error is not None:
            raise self.error
        return self.tensor


# Called on the communication thread, perhaps also on one that closes or gives up, with submissions that have all
# arrived, or with one that has failed.
Told: TypeAlias = Callable[[Sequence[Submission]], object]


def tell(submissions: Iterable[Submission]) -> None:
    """Everybody of what has arrived, together where neighbours in the sequence tell the same."""
    for told, some in groupby(submissions, attrgetter("told")):
        if told is None:
            continue
        try:
            told(list(some))
        except Exception:
            # It is no reason why others should not hear of theirs.
            _LOG.exception("whoever was to be told of what has arrived failed")


def resolve(submissions: Sequence[Submission]) -> None:
    """A ``told`` where every note is a future of the tensor."""
    for submission in submissions:
        future: Future[Tensor] = submission.note
        if submission.error is None:
            future.set_result(submission.tensor)
        else:
            future.set_exception(submission.error)
