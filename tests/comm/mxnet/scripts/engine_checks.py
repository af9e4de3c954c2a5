"""Functions of MXNet's engine: order, overlap, errors, lifetime."""

from __future__ import annotations

import gc
import io
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hybridpar.comm.mxnet  # noqa: F401

# isort: split
import mxnet as mx

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.kvstore.arrays import as_tensor
from hybridpar.comm.mxnet.engine import Arrival, Engine, StoreError, check_engine
from tests.comm.mxnet.scripts import checks


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


def pointer(array: Any) -> int:
    return as_tensor(array).data_ptr()


def check_only_dense_arrays_of_one_dimension_and_the_same_kind_are_plain() -> None:
    like = mx.nd.zeros((6,))
    for plain in (mx.nd.ones((6,)), mx.nd.ones((2, 3)).reshape((-1,)), mx.nd.ones((12,))[3:9]):
        assert ENGINE.is_plain(*handles((plain, like)))
    for other in (
        mx.nd.ones((2, 3)), mx.nd.ones((5,)), mx.nd.ones((6,), dtype="float64"), mx.nd.ones((6,), dtype="int32"),
        mx.nd.ones((6, 1)).tostype("row_sparse"),
    ):  # fmt: skip
        assert not ENGINE.is_plain(*handles((other, like)))
    matrix = mx.nd.ones((2, 3))
    assert not ENGINE.is_plain(*handles((matrix, matrix)))


def check_a_function_copies_what_operators_have_computed_and_frees_what_nobody_holds() -> None:
    buffer, seen = mx.nd.zeros((50_000,)), []
    buffer.wait_to_read()
    view = as_tensor(buffer)
    value = mx.nd.zeros((50_000,))
    for _ in range(50):
        value = value + 1

    def look(completion: Completion) -> None:
        seen.append((float(view.min()), float(view.max())))
        completion()

    copied = [value.handle.value, view.data_ptr(), view.nbytes]
    ENGINE.push((look, lambda: None), reads=handles([value]), writes=handles([buffer]), copied=copied)
    value += 1  # after the copy
    del value
    gc.collect()
    out = mx.nd.empty((50_000,))
    ENGINE.fill(*handles((out, buffer)), view.data_ptr(), view.nbytes)
    assert out.asnumpy().min() == out.asnumpy().max() == 50
    assert seen == [(50, 50)]


def check_a_function_whose_arrays_are_free_has_copied_when_it_was_pushed() -> None:
    buffer, value, held = mx.nd.zeros((4,)), mx.nd.full((4,), 3), []
    mx.nd.waitall()
    view = as_tensor(buffer)
    copied = [value.handle.value, view.data_ptr(), view.nbytes]
    ENGINE.push((held.append, lambda: None), reads=handles([value]), writes=handles([buffer]), copied=copied)
    assert view.tolist() == [3] * 4
    while not held:
        time.sleep(0.001)
    held.pop()()
    buffer.wait_to_read()


def check_what_is_copied_back_comes_with_the_completion_and_not_with_an_error() -> None:
    for error, expected in ((None, 7), (ValueError("no"), 3)):
        buffer, value = mx.nd.zeros((4,)), mx.nd.full((4,), 3)
        mx.nd.waitall()
        view = as_tensor(buffer)

        def work(completion: Completion, view: torch.Tensor = view, error: BaseException | None = error) -> None:
            assert view.tolist() == [3] * 4
            view.fill_(7)
            completion(error)

        copied = [value.handle.value, view.data_ptr(), view.nbytes]
        memory = as_tensor(value)
        ENGINE.push((work, lambda: None), writes=handles([buffer, value]), copied=copied, back=True)
        if error is None:
            assert value.asnumpy().tolist() == [7] * 4
        else:
            raises(ValueError, value.asnumpy, "no")
        assert memory.tolist() == [expected] * 4


def check_views_of_one_array_are_read_by_one_function() -> None:
    whole, buffers = mx.nd.arange(6), [mx.nd.zeros((2,)) for _ in range(3)]
    mx.nd.waitall()
    parts = [whole[2 * place : 2 * place + 2] for place in range(3)]
    copied = [
        number
        for part, buffer in zip(parts, buffers, strict=True)
        for number in (part.handle.value, pointer(buffer), 8)
    ]
    ENGINE.push(
        (lambda completion: completion(), lambda: None),
        reads=handles([*parts, whole]),
        writes=handles(buffers),
        copied=copied,
    )
    whole += 1
    assert [buffer.asnumpy().tolist() for buffer in buffers] == [[0, 1], [2, 3], [4, 5]]
    assert whole.asnumpy().tolist() == [1, 2, 3, 4, 5, 6]


def check_an_error_skips_copies_into_other_arrays() -> None:
    buffer, out = mx.nd.zeros((4,)), mx.nd.zeros((4,))
    mx.nd.waitall()
    push(lambda completion: completion(ValueError("broken")), writes=[buffer])
    ENGINE.fill(*handles((out, buffer)), pointer(buffer), 16)
    raises(ValueError, out.asnumpy, "broken")


class Followed:
    """An engine of its own, for its first error ends all following. Its functions wait for ``complete``."""

    def __init__(self) -> None:
        self._ran: list[int] = []
        self.engine = Engine(self.receive)

    def receive(self, arrived: Sequence[Arrival]) -> None:
        self._ran += [one.number for one in arrived if one.ran]

    def push(self, *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> int:
        return self.engine.push(None, reads=handles(reads), writes=handles(writes))

    def follow(self, number: int, out: Any, memory: torch.Tensor) -> bool:
        return self.engine._inbox.follow(number, out.handle.value, memory.data_ptr(), memory.nbytes)

    def complete(self, number: int, error: BaseException | None = None) -> None:
        while number not in self._ran:
            time.sleep(0.001)
        assert self.engine.complete(number, error)


def zeros(count: int) -> list[Any]:
    arrays = [mx.nd.zeros((4,)) for _ in range(count)]
    mx.nd.waitall()
    return arrays


def check_a_follower_takes_its_array_at_once_and_fills_it_with_the_completion() -> None:
    followed, source, (buffer, out, lost) = Followed(), torch.ones(4), zeros(3)
    memory = as_tensor(out)
    number = followed.push(writes=[buffer])
    assert followed.follow(number, out, source) and followed.follow(number, lost, source)
    doubled = out * 2  # waits for the function
    source.fill_(5)
    assert memory.tolist() == [0] * 4
    del lost
    gc.collect()
    followed.complete(number)
    assert memory.tolist() == [5] * 4 and doubled.asnumpy().tolist() == [10] * 4
    source.fill_(6)
    assert followed.follow(number, out, source)
    assert memory.tolist() == [6] * 4 and out.asnumpy().tolist() == [6] * 4


def check_nothing_follows_a_function_that_may_still_be_skipped() -> None:
    followed, source, (first, buffer, out) = Followed(), torch.ones(4), zeros(3)
    before = followed.push(writes=[first])
    number = followed.push(reads=[first], writes=[buffer])
    assert not followed.follow(number, out, source)
    followed.complete(before)
    followed.complete(number)
    assert out.asnumpy().tolist() == [0] * 4 and followed.follow(number, out, source)


def check_an_array_in_use_is_filled_in_its_turn() -> None:
    followed, source, (buffer, out) = Followed(), torch.ones(4), zeros(2)
    number, use = followed.push(writes=[buffer]), followed.push(reads=[out])
    assert not followed.follow(number, out, source)
    followed.engine.fill(*handles((out, buffer)), source.data_ptr(), source.nbytes, number)
    out += 1
    followed.complete(use)
    source.fill_(8)
    followed.complete(number)
    assert out.asnumpy().tolist() == [9] * 4


def check_an_error_reaches_followers_and_nothing_follows_after_it() -> None:
    followed, source, (buffer, *outs) = Followed(), torch.ones(4), zeros(4)
    number = followed.push(writes=[buffer])
    followed.engine.fill(*handles((outs[0], buffer)), source.data_ptr(), source.nbytes, number)
    followed.complete(number, ValueError("broken"))
    followed.engine.fill(*handles((outs[1], buffer)), source.data_ptr(), source.nbytes, number)
    assert not followed.follow(number, outs[2], source)
    for out in outs[:2]:
        raises(ValueError, out.asnumpy, "broken")
    assert outs[2].asnumpy().tolist() == [0] * 4


def check_followers_get_the_error_of_an_engine_that_ends() -> None:
    followed, source, (buffer, out) = Followed(), torch.ones(4), zeros(2)
    number = followed.push(writes=[buffer])
    assert followed.follow(number, out, source)
    followed.engine.stop(ValueError("at an end"))
    for array in (buffer, out):
        raises(ValueError, array.asnumpy, "at an end")


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
