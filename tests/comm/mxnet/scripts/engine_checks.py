"""Functions of MXNet's engine: order, overlap, errors, lifetime."""

from __future__ import annotations

import gc
import io
import logging
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

import hybridpar.comm.mxnet  # noqa: F401

# isort: split
import mxnet as mx

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.kvstore.arrays import as_tensor
from hybridpar.comm.mxnet.engine import Engine, StoreError, check_engine
from tests.comm.mxnet.scripts import checks
from tests.comm.mxnet.scripts.engine_calls import (
    Completion,
    Functions,
    handles,
    later,
    push,
    raises,
)


def check_an_operator_after_a_function_sees_what_it_wrote() -> None:
    array = mx.nd.ones((4,))
    view = as_tensor(array)
    began = time.monotonic()
    push(later(0.2, lambda: view.fill_(7)), writes=[array])
    doubled = array * 2
    assert time.monotonic() - began < 0.1, "the call waited"
    assert doubled.asnumpy().tolist() == [14] * 4
    assert time.monotonic() - began > 0.2


def check_a_function_runs_after_the_operators_that_write_what_it_reads() -> None:
    array = mx.nd.zeros((1000, 1000))
    view = as_tensor(array)
    for _ in range(20):
        array += 1
    seen: list[float] = []
    done = threading.Event()

    def look(completion: Completion) -> None:
        seen.append(float(view.min()))
        completion()
        done.set()

    push(look, reads=[array])
    array += 1  # waits for the function
    assert done.wait(20)
    assert seen == [20]
    assert array.asnumpy().min() == 21


def check_functions_on_one_array_run_in_the_order_of_their_pushes() -> None:
    array, order = mx.nd.zeros((2,)), []
    for number in range(20):
        push(later(0.001 * (number % 3), lambda number=number: order.append(number)), writes=[array], priority=number)
    array.wait_to_read()
    assert order == list(range(20))


def check_other_operators_go_on_while_a_function_waits() -> None:
    """More functions than the engine has workers of any kind."""
    held = [mx.nd.ones((2,)) for _ in range(40)]
    waiting: list[Completion] = []
    for array in held:
        push(waiting.append, writes=[array])
    other = mx.nd.ones((300, 300))
    for _ in range(10):
        other = mx.nd.dot(other, other) / 300
    assert other.asnumpy().shape == (300, 300)
    deadline = time.monotonic() + 10
    while len(waiting) < len(held) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(waiting) == len(held)
    for completion in reversed(waiting):
        completion()
    mx.nd.waitall()


def check_an_error_surfaces_at_asnumpy_through_operators_and_copies() -> None:
    array, out = mx.nd.ones((2,)), mx.nd.zeros((2,))
    error = CommunicationError("rank 1 is gone", rank=0, operation="all_reduce", tensor="key 'w'")
    push(lambda completion: completion(error), writes=[array])
    (array * 2 + 1).copyto(out)
    with pytest.raises(StoreError, match="rank 0: all_reduce of key 'w' failed: rank 1 is gone") as caught:
        out.asnumpy()
    assert isinstance(caught.value, mx.base.MXNetError) and isinstance(caught.value, CommunicationError)
    assert (caught.value.rank, caught.value.operation, caught.value.tensor) == (0, "all_reduce", "key 'w'")
    assert caught.value.reason == "rank 1 is gone"


def check_an_error_surfaces_at_wait_to_read_and_at_waitall() -> None:
    for wait in (lambda array: array.wait_to_read(), lambda _: mx.nd.waitall()):
        array = mx.nd.ones((2,))
        error = CommunicationError("late", rank=3, operation="rows", tensor="key 1")
        push(lambda completion, error=error: threading.Thread(target=completion, args=(error,)).start(), writes=[array])
        raises(StoreError, lambda wait=wait, array=array: wait(array), "rank 3: rows of key 1 failed: late")


def check_an_exception_in_a_function_surfaces_as_what_it_was() -> None:
    def fails(_: Completion) -> None:
        raise ValueError("expected 1, got 2")

    array = mx.nd.ones((2,))
    push(fails, writes=[array])
    raises(ValueError, array.asnumpy, "expected 1, got 2")

    def fails_oddly(_: Completion) -> None:
        raise KeyError("odd")

    push(fails_oddly, writes=[array])
    raises(mx.base.MXNetError, array.asnumpy, "KeyError: 'odd'")


def check_an_exception_after_completion_is_logged_and_not_lost() -> None:
    def fails_late(completion: Completion) -> None:
        completion()
        raise ValueError("too late")

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("hybridpar.comm.mxnet.engine").addHandler(handler)
    array = mx.nd.ones((2,))
    push(fails_late, writes=[array])
    assert array.asnumpy().tolist() == [1, 1]
    mx.nd.waitall()
    deadline = time.monotonic() + 5
    while "too late" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    logging.getLogger("hybridpar.comm.mxnet.engine").removeHandler(handler)
    assert "too late" in stream.getvalue()


def check_a_second_completion_does_nothing_and_says_so() -> None:
    kept: list[Completion] = []
    array = mx.nd.ones((2,))
    push(lambda completion: (kept.append(completion), completion()), writes=[array])
    array.wait_to_read()
    assert not kept[0]() and not kept[0](ValueError("late"))


def check_a_function_behind_a_failed_operator_is_skipped_and_told() -> None:
    bad = mx.nd.random.normal(0, -1, (3,))  # fails when it runs: a negative scale
    out = mx.nd.zeros((3,))
    ran, skipped = threading.Event(), threading.Event()
    push(lambda _: ran.set(), reads=[bad], writes=[out], skipped=skipped.set)
    raises(mx.base.MXNetError, out.asnumpy)
    assert skipped.wait(10) and not ran.is_set()


def check_what_a_function_holds_is_freed_after_it_has_completed() -> None:
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    array = mx.nd.ones((2,))
    push(lambda completion, held=held: completion(), writes=[array])
    del held
    array.wait_to_read()
    mx.nd.waitall()
    deadline = time.monotonic() + 5
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() is None


def check_a_function_outlives_every_reference_to_it_and_to_its_arrays() -> None:
    seen: list[float] = []
    source = mx.nd.zeros((500, 500))
    for _ in range(30):
        source = source + 1
    view = as_tensor(source)

    def look(completion: Completion) -> None:
        seen.append(float(view[0, 0]))
        completion()

    push(look, reads=[source])
    del source, look
    gc.collect()
    mx.nd.waitall()
    assert seen == [30]


def check_thousands_of_functions_from_many_threads() -> None:
    arrays = [mx.nd.zeros((3,)) for _ in range(8)]
    views = [as_tensor(array) for array in arrays]

    def work(view: torch.Tensor) -> Callable[[Completion], None]:
        def add(completion: Completion) -> None:
            view.add_(1)
            completion()

        return add

    def many(place: int) -> None:
        for _ in range(300):
            push(work(views[place]), writes=[arrays[place]])

    threads = [threading.Thread(target=many, args=(place,)) for place in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [array.asnumpy().tolist() for array in arrays] == [[300] * 3] * len(arrays)
    push(lambda completion: completion(), priority=1 << 40)  # beyond the engine's 32 bits
    push(lambda completion: completion(), priority=-(1 << 40))
    mx.nd.waitall()


def check_another_release_of_mxnet_and_its_engine_for_debugging_are_refused() -> None:
    check_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXNET_ENGINE_TYPE", "ThreadedEngine")
        check_engine()
        patch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
        raises(RuntimeError, check_engine, "got MXNET_ENGINE_TYPE=NaiveEngine; unset it")
        patch.setattr(mx, "__version__", "2.0.0")
        raises(RuntimeError, check_engine, "expected MXNet 1.9.x, got 2.0.0")


def check_after_the_end_functions_complete_with_its_error() -> None:
    functions = Functions()
    engine = Engine(functions.receive)
    before, after = mx.nd.zeros((2,)), mx.nd.zeros((2,))
    arrived = threading.Event()
    engine.push((lambda _: arrived.set(), lambda: None), writes=handles([before]))
    assert arrived.wait(10)
    engine.stop(ValueError("at an end"))
    engine.push((lambda _: None, lambda: None), writes=handles([after]))
    raises(ValueError, before.asnumpy, "at an end")
    raises(ValueError, after.asnumpy, "at an end")
    engine.wait_idle()


def check_an_abandoned_engine_ends_its_thread() -> None:
    functions = Functions()
    engine = Engine(functions.receive)
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


if __name__ == "__main__":
    checks.run(globals())
