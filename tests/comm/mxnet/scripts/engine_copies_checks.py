"""What functions of MXNet's engine copy: into buffers before they run, back with their completion, and to followers."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

import hybridpar.comm.mxnet  # noqa: F401

# isort: split
import mxnet as mx

from hybridpar.comm.kvstore.arrays import as_tensor
from hybridpar.comm.mxnet.engine import Arrival, Engine
from tests.comm.mxnet.scripts import checks
from tests.comm.mxnet.scripts.engine_calls import (
    ENGINE,
    Completion,
    handles,
    push,
    raises,
)


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


if __name__ == "__main__":
    checks.run(globals())
