"""What two ranks see when communication goes wrong: an error on both, within seconds, and nothing wrong after it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

import hybridpar as hp
import hybridpar.mxnet as face

# isort: split
import mxnet as mx
from mxnet import gluon

from tests.comm.mxnet.scripts import checks

SHAPE = (3,)


def store(timeout: float = 30) -> Any:
    kv = face.create(timeout=timeout, stall_seconds=min(10, timeout / 2))
    kv.init(["w", "v"], [mx.nd.zeros(SHAPE)] * 2)
    return kv


def fails(call: Callable[[], object], text: str, kind: type[BaseException] = hp.CommunicationError) -> BaseException:
    began = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        call()
    assert time.monotonic() - began < 20
    return caught.value


def all_calls_fail(kv: Any, text: str) -> None:
    value = mx.nd.ones(SHAPE)
    for call in (
        lambda: kv.push("v", value),
        lambda: kv.pull("v", value),
        lambda: kv.pushpull("v", value),
        lambda: kv.init("new", value),
        lambda: kv.barrier(),
        lambda: kv.wait(),
        lambda: kv.save_optimizer_states("nowhere"),
    ):
        fails(call, text)


def check_a_rank_that_does_not_push_is_named_within_the_timeout() -> None:
    kv = store(timeout=3)
    out = mx.nd.zeros(SHAPE)
    if kv.rank == 0:
        kv.push("w", mx.nd.ones(SHAPE))
        kv.pull("w", out)
        error = fails(out.asnumpy, "key 'w'")
        assert isinstance(error, mx.base.MXNetError) and "rank 1" in str(error), error
    else:
        time.sleep(5)
        kv.push("w", mx.nd.ones(SHAPE))
        fails(kv.wait, "rank 0")
    all_calls_fail(kv, "failed")


def check_ranks_that_ask_for_different_operations_are_told_so() -> None:
    kv = store()
    kv.push("w", mx.nd.ones(SHAPE), op=("sum", "max")[kv.rank])

    def read() -> None:
        out = mx.nd.zeros(SHAPE)
        kv.pull("w", out)  # raises itself, where the other rank was so quick that the error is known already
        out.wait_to_read()

    fails(read, "different operations")
    all_calls_fail(kv, "different operations")


def check_rows_pushed_in_different_orders_are_told_on_every_rank() -> None:
    kv = face.create(timeout=30)
    table = mx.nd.ones((4, 2)).tostype("row_sparse")
    kv.init(["a", "b"], [table] * 2)

    def push() -> None:
        for key in ("a", "b") if kv.rank == 0 else ("b", "a"):
            kv.push(key, table)
        kv.wait()

    fails(push, "rows of different keys")
    fails(lambda: kv.push("a", table), "rows of different keys")


def check_an_operator_that_fails_on_one_rank_fails_the_others_push() -> None:
    for seconds in (0, 1):
        kv = store()
        out = mx.nd.zeros(SHAPE)
        value = mx.nd.ones(SHAPE) if kv.rank == 0 else mx.nd.random.normal(0, -1, SHAPE)
        kv.push("w", value)
        time.sleep(seconds)

        def read(kv: Any = kv, out: Any = out) -> None:
            kv.pull("w", out)  # raises itself, where the error is known already, and then says what the operator said
            out.wait_to_read()

        fails(read, "rank 1" if kv.rank == 0 else "scale parameter", mx.base.MXNetError)
        told = "rank 1" if kv.rank == 0 else "an operator failed before"

        def go_on(kv: Any = kv) -> None:
            for _ in range(500):  # the array may know of the error a moment before the store does
                kv.push("w", mx.nd.ones(SHAPE))
                time.sleep(0.01)

        fails(go_on, told)


def check_a_script_that_only_reads_weights_does_not_go_on_with_wrong_numbers() -> None:
    """It waits with asnumpy, catches what that raises, and trains on: the next step raises again."""
    kv = face.create(timeout=4)
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    seen: list[str] = []
    steps = 0
    for step in range(4):
        if kv.rank == 1 and step == 2:
            break
        try:
            with mx.autograd.record():
                loss = net(mx.nd.ones((2, 3))).sum()
            loss.backward()
            trainer.step(2)
            steps += 1
            net.weight.data().asnumpy()
        except hp.CommunicationError as error:
            seen.append(str(error))
    if kv.rank == 0:
        assert steps == 3 and len(seen) == 2, (steps, seen)
        assert all(re.search("rank 0: all_reduce of key [01] failed", text) for text in seen), seen
    else:
        assert not seen
    kv._group.barrier()


def check_closing_a_store_fails_what_is_on_its_way() -> None:
    kv = store()
    out = mx.nd.zeros(SHAPE)
    if kv.rank == 0:
        kv.push("w", mx.nd.ones(SHAPE))
        kv.pull("w", out)
        kv._group.barrier()
        fails(out.asnumpy, "rank 1 closed the engine|closed")
    else:
        kv._group.barrier()
        time.sleep(0.5)
        kv.close()
        kv.push("w", mx.nd.ones(SHAPE))
        fails(kv.wait, "closed", mx.base.MXNetError)


if __name__ == "__main__":
    checks.run(globals())
