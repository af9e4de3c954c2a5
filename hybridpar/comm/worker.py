"""A communication thread: runs collectives of one lane in the order in which they were submitted.

# Note [jobs at the end of the process]
A thread that asks for the interpreter's lock inside a library's C++ while the interpreter goes down ends the process
with SIGABRT. Lanes end their waits in time, but a job that has come out of one runs on: it tells other lanes, frees
tensors. So the end of the process waits for jobs, after the lanes have ended their waits, and begins no other.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_END_SECONDS = 2.0


class Worker:
    """One daemon thread with an ordered queue.

    When a job has failed, this rank's collectives are out of step with its peers', and one more could be taken for
    another of the same size. So no later job runs: all of them fail.

    concurrent.futures' own pool is not used because the interpreter waits for its threads at exit: a rank that fails
    would hang there until the collective that its peers left runs into the time-out.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # The thread holds the queue, not the worker, so that an abandoned worker is collected and its thread ends.
        threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Worker:
        """Itself: a copied module sends on the same thread."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a communication thread cannot be pickled; save state_dict(), or use hybridpar.checkpoint")

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` after all that was submitted before, and return at once.

        Raises:
            RuntimeError: the worker is closed.
        """
        future: Future[Any] = Future()
        self.submit_for(future, function, *arguments)
        return future

    def submit_for(self, future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
        """As ``submit``, with a future that there is already."""
        self.check_open()
        self._queue.put((future, function, arguments))

    def check_open(self) -> None:
        """Raises RuntimeError where ``submit`` would."""
        if not self._finalizer.alive:
            raise RuntimeError(f"{self._name}: expected an open communication thread, got one that was closed")

    def close(self) -> None:
        """End the thread when its queue is empty."""
        self._finalizer()


_RUNNING: set[int] = set()  # threads inside a job
_ENDING = threading.Event()


def _await_jobs() -> None:
    """Note [jobs at the end of the process]."""
    _ENDING.set()
    end = time.monotonic() + _END_SECONDS
    while _RUNNING - {threading.get_ident()} and time.monotonic() < end:
        time.sleep(0.001)


# What was made last is finalized first: lanes, and threads that wait for others, before this.
weakref.finalize(Worker, _await_jobs)
os.register_at_fork(after_in_child=_RUNNING.clear)


@torch.no_grad()
def _run(queue: SimpleQueue[_Job | None]) -> None:
    # Text only: the exception would keep its frames alive, and with them the worker's owner.
    failure: str | None = None
    thread = threading.get_ident()
    while (job := queue.get()) is not None:
        future, function, arguments = job
        _RUNNING.add(thread)
        try:
            if _ENDING.is_set():
                raise RuntimeError("not sent, because the process ends")
            if failure is not None:
                raise RuntimeError(
                    f"not sent, because an earlier operation of this communication thread failed: {failure}"
                )
            future.set_result(function(*arguments))
        except BaseException as error:
            failure = failure or f"{type(error).__name__}: {error}"
            future.set_exception(error)
        # A waiting thread must not keep the last job's tensors alive.
        del job, future, function, arguments
        _RUNNING.discard(thread)
