"""An engine whose functions are Python functions, and how checks push them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybridpar.comm.mxnet.engine import Arrival, Engine


class Completion:
    """Completes one function."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, error: BaseException | None = None) -> bool:
        return ENGINE.complete(self._number, error)


class Functions:
    """Calls Python functions that were pushed, one after the other; what one raises completes it."""

    def receive(self, arrived: Sequence[Arrival]) -> None:
        for one in arrived:
            function, skipped = one.load
            if not one.ran:
                skipped()
                continue
            assert not one.problem
            try:
                function(Completion(one.number))
            except Exception as error:
                if not ENGINE.complete(one.number, error):
                    raise


FUNCTIONS = Functions()
ENGINE = Engine(FUNCTIONS.receive)


def handles(arrays: Sequence[Any]) -> list[int]:
    return [array.handle.value for array in arrays]


def push(
    function: Callable[[Completion], None],
    *,
    reads: Sequence[Any] = (),
    writes: Sequence[Any] = (),
    skipped: Callable[[], None] = lambda: None,
    priority: int = 0,
) -> int:
    return ENGINE.push((function, skipped), reads=handles(reads), writes=handles(writes), priority=priority)


def later(seconds: float, work: Callable[[], None]) -> Callable[[Completion], None]:
    """A function that completes after some time, on a thread of its own."""

    def function(completion: Completion) -> None:
        def run() -> None:
            time.sleep(seconds)
            work()
            completion()

        threading.Thread(target=run).start()

    return function


def raises(kind: type[BaseException], call: Callable[[], object], text: str = "") -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()
