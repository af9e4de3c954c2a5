"""A communication thread: runs collectives of one lane in the order in which they were submitted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Worker:
    """One daemon thread with an ordered queue.

    concurrent.futures' own pool is not used because the interpreter waits for its threads at exit: a rank that fails
    would hang there until the collective that its peers left runs into the time-out.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # The thread holds the queue, not the worker, so that an abandoned worker is collected and its thread ends.
        threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` after all that was submitted before, and return at once."""
        future: Future[Any] = Future()
        self._queue.put((future, function, arguments))
        return future

    def close(self) -> None:
        """End the thread when its queue is empty."""
        self._finalizer()


@torch.no_grad()
def _run(queue: SimpleQueue[_Job | None]) -> None:
    while (job := queue.get()) is not None:
        future, function, arguments = job
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        # A waiting thread must not keep the last job's tensors alive.
        del job, future, function, arguments
