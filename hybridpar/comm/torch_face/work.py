"""Calls of a torch process group on one lane, in the order in which they are made, and the ``Work`` of each.

# Note [order of calls]
A lane runs one call at a time, in the same order on all ranks. An asynchronous call goes to the communication thread; a
blocking one runs on the caller's own thread if nothing is before it, which saves two changes of thread.

A callback on a future runs on the communication thread before the next call begins, and what it sends is sent at once.
So a callback that was set before any further call was made sends at the same place of the order on every rank, no
matter which thread ran it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.lane import describe
from hybridpar.comm.worker import Worker

_UNSET = timedelta(milliseconds=-1)  # torch's mark for "no time-out of its own"
_DRAIN_SECONDS = 30.0


class Options(Protocol):
    """What torch's options of all collectives have."""

    asyncOp: bool
    timeout: timedelta


class Calls:
    """The calls of one lane. See Note [order of calls].

    After a call has failed, this rank is out of step with the others, so all later calls fail.

    Args:
        group: whose lane it is; closed by ``close``.
        timeout: seconds that one collective may take; how long ``close`` waits at most.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._timeout = group, timeout
        self.lane = group._lane
        self._worker = Worker("hybridpar-process-group")
        self._thread: int | None = None
        self._turn, self._order = threading.Lock(), threading.Lock()
        self._begun = self._ended = 0
        self._failure: str | None = None
        self._closed = False
        self._process = os.getpid()

    def run(
        self,
        operation: str,
        options: Options,
        results: Sequence[Tensor],
        function: Callable[..., None],
        *arguments: Any,
    ) -> dist.Work:
        """``function(lane, *arguments)``, now or on the communication thread.

        Args:
            operation: its name in errors.
            options: say whether the caller waits, and how long at most.
            results: the tensors that it fills, which are the value of the work's future.

        Raises:
            CommunicationError: an earlier call failed, or a blocking one does.
        """
        if self._failure is not None or self._closed or os.getpid() != self._process:
            raise self._refusal(operation, results)
        blocking = not options.asyncOp and options.timeout == _UNSET
        if blocking and self._begun == self._ended and self._turn.acquire(blocking=False):
            return self._now(operation, results, function, arguments)
        if self.on_own_thread():
            self._turn.acquire()  # a callback: see the note
            return self._now(operation, results, function, arguments)
        work = LaneWork(self, operation, results, options.timeout)
        inference = torch.is_inference_mode_enabled()
        with self._order:
            self._begun += 1
            work.job = self._worker.submit(self._job, work, function, arguments, inference)
        return work

    def error(self, reason: str, operation: str, tensors: Sequence[Tensor]) -> CommunicationError:
        """The error of a call of this rank."""
        rank = self.lane.ranks[self.lane.rank]
        return CommunicationError(reason, rank=rank, operation=operation, tensor=named(tensors))

    def blame(self) -> str:
        """Which ranks are gone, as the start of a reason; nothing while all are there. Takes a moment."""
        watch = self._group.watch
        gone = watch.gone(self.lane.ranks) if watch is not None else {}
        return "; ".join(gone.values()) + ": " if gone else ""

    def abort(self, reason: str = "because the process group was aborted") -> None:
        """Make present and later calls fail. From any thread."""
        self._failure = self._failure or reason
        self.lane.abort(self._failure)

    def close(self) -> None:
        """Finish what was begun, then free the lane. What does not finish in time is aborted."""
        if self._closed:
            return
        self._closed = True
        last = self._worker.submit(lambda: None)
        self._worker.close()
        try:
            if not self.on_own_thread():
                last.exception(0.0 if self._failure is not None else min(self._timeout, _DRAIN_SECONDS))
        except TimeoutError:
            self.lane.abort("the process group was destroyed in the midst of a call")
        self._group.close()

    def on_own_thread(self) -> bool:
        """Whether the caller is a callback that runs on the communication thread."""
        return threading.get_ident() == self._thread

    def _refusal(self, operation: str, tensors: Sequence[Tensor]) -> Exception:
        if os.getpid() != self._process:
            return RuntimeError(
                f"{operation} in a forked child: expected the process that made the group; start workers with "
                "multiprocessing's spawn, or fork before init_process_group"
            )
        reason = "because the process group was destroyed" if self._failure is None else self._failure
        return self.error(f"not sent, {reason}", operation, tensors)

    def _now(
        self, operation: str, results: Sequence[Tensor], function: Callable[..., None], arguments: tuple[Any, ...]
    ) -> dist.Work:
        """On this thread, which holds the turn."""
        gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            function(self.lane, *arguments)
        except BaseException as error:
            self._failed(operation, error)
            raise
        finally:
            self._turn.release()
            torch._C._set_grad_enabled(gradients)
        return DoneWork(results)

    def _job(self, work: LaneWork, function: Callable[..., None], arguments: tuple[Any, ...], inference: bool) -> None:
        """On the communication thread."""
        self._thread = threading.get_ident()
        try:
            with self._turn, torch.inference_mode() if inference else torch.no_grad():
                if self._failure is not None:
                    raise self._refusal(work.operation, work.results)
                function(self.lane, *arguments)
        except BaseException as error:
            self._failed(work.operation, error)
            work.finish(error)
        else:
            work.finish(None)
        self._ended += 1  # only now, so that callbacks keep their place

    def _failed(self, operation: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = f"because an earlier {operation} failed: {error}"
            self.lane.abort(f"{type(error).__name__}: {error}")  # the others would wait for what cannot come


class DoneWork(dist.Work):
    """A call that is over."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        pass

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self._results))
        return future


class LaneWork(dist.Work):
    """A call that was given to the communication thread."""

    job: Future[None]

    def __init__(self, calls: Calls, operation: str, results: Sequence[Tensor], limit: timedelta) -> None:
        super().__init__()
        self._calls, self.operation, self.results, self._limit = calls, operation, results, limit
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._futures: list[torch.futures.Future[Any]] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the call is over.

        Args:
            timeout: how long at most. The call goes on after that, unless it had a time-out of its own.

        Raises:
            CommunicationError: the call failed, or did not end in time.
        """
        if not self._done:
            self._sleep(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _sleep(self, timeout: timedelta | None) -> None:
        if self._calls.on_own_thread():
            raise RuntimeError(f"{self.operation}: a callback waited for a call that cannot begin before it returns")
        limits = [
            limit.total_seconds() for limit in (timeout, self._limit) if limit is not None and limit > timedelta(0)
        ]
        try:
            self.job.exception(min(limits, default=None))
        except TimeoutError:
            reason = f"it has not ended within {min(limits):g} s"
            if self._limit.total_seconds() == min(limits):
                self._calls.abort(f"because an earlier {self.operation} failed: {reason}")
            raise self._calls.error(reason, self.operation, self.results) from None

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that the call filled."""
        self.wait()
        return list(self.results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Completed with the tensors that the call filled, or with its error. See Note [order of calls]."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        # What the callback raises is an error for C++ too, where Future.set_exception's would pass for a value.
        value = future.then(torch.futures.Future.value)
        with self._lock:
            if not self._done:
                self._futures.append(future)
                return value
        self._complete(future)
        return value

    def finish(self, error: BaseException | None) -> None:
        """The call is over. Called once, on the communication thread."""
        with self._lock:
            self._error, self._done = error, True
        for future in self._futures:
            self._complete(future)
        self._futures.clear()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(list(self.results))
        else:
            future.set_exception(self._error)


class TorchWork(dist.Work):
    """A call that one of torch's own backends runs, whose errors say which rank, operation and tensor they are of."""

    def __init__(self, work: dist.Work, calls: Calls, operation: str, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._calls, self._operation, self._tensors = work, calls, operation, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's own.

        Raises:
            CommunicationError: the call failed, or did not end in time.
        """
        try:
            return self._work.wait() if not timeout else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> CommunicationError:
        return self._calls.error(f"{self._calls.blame()}{error}", self._operation, self._tensors)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> list[Tensor]:
        """The tensors that the call filled."""
        self.wait()
        return self._work.result()

    def source_rank(self) -> int:
        """The rank from which ``recv_anysource`` received."""
        return self._work._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Torch's own, whose error is a ``CommunicationError``."""

        def value(future: torch.futures.Future[Any]) -> Any:
            try:
                return future.value()
            except RuntimeError as error:
                raise self._failure(error) from error

        return self._work.get_future().then(value)


def named(tensors: Sequence[Tensor]) -> str:
    """How errors name what a call sent."""
    if not tensors:
        return "nothing"
    return describe(tensors[0]) + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
