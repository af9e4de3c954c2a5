"""Handles: numbers that stand for calls on their way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.comm.horovod.exchange import Exchange
from hybridpar.comm.horovod.request import Operation


class Call:
    """One operation, and what is done to its result on the thread that waits for it."""

    def __init__(self, exchange: Exchange, operation: Operation, then: Callable[[Any], Any] | None = None) -> None:
        self._exchange, self._operation, self._then = exchange, operation, then

    def first(self) -> Call:
        """The same call, of whose results only the first counts."""
        return Call(self._exchange, self._operation, lambda results: results[0])

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._operation.future.done()

    def result(self) -> Any:
        """When it is there. Raises CommunicationError."""
        result = self._exchange.finished(self._operation)
        return result if self._then is None else self._then(result)


class Calls:
    """Several that are waited for together."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return all(call.done() for call in self._calls)

    def result(self) -> list[Any]:
        """In order. All of them are waited for, then the first failure is raised."""
        results, failure = [], None
        for call in self._calls:
            try:
                results.append(call.result())
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return results


class Handles:
    """The calls of this process that have not been waited for."""

    def __init__(self) -> None:
        self._calls: dict[int, Call | Calls] = {}
        self._numbers = itertools.count()

    def add(self, call: Call | Calls) -> int:
        """A handle of the call."""
        handle = next(self._numbers)
        self._calls[handle] = call
        return handle

    def done(self, handle: int) -> bool:
        """Raises ValueError if there is no such handle."""
        if handle not in self._calls:
            raise ValueError(
                f"poll: expected a handle that was not synchronized yet, got {handle!r}; poll before you synchronize"
            )
        return self._calls[handle].done()

    def result(self, handle: int) -> Any:
        """Waits. None where there is no such handle, or it was waited for before, as in Horovod."""
        call = self._calls.pop(handle, None)
        return None if call is None else call.result()

    def clear(self) -> None:
        """Forget them."""
        self._calls.clear()


HANDLES = Handles()


def poll(handle: int) -> bool:
    """Whether ``synchronize`` of this handle returns at once.

    Raises:
        ValueError: there is no such handle, or it was synchronized before.
    """
    return HANDLES.done(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous call.

    Returns:
        Its result: a tensor; a list of them for grouped calls; a pair for alltoall. None for a handle that was
        synchronized before.

    Raises:
        CommunicationError: a rank was lost or late, or the ranks asked for different things.
    """
    if callable(handle):  # of sparse_allreduce_async
        return handle()
    return HANDLES.result(handle)
