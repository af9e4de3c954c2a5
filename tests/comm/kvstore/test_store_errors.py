"""Bad input: a clear error, on every rank, in bounded time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import kvstore
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group
from hybridpar.kvstore import KVStore, RowSparse
from tests.ranks import run_program, run_threads

W, V = np.zeros(3, np.float32), np.zeros((2, 2), np.float32)
ROWS = RowSparse(np.array([1]), np.ones((1, 2), np.float32), (4, 2))


def on(work: Callable[[KVStore], Any], name: str = "dist_sync", size: int = 2) -> list[Any]:
    def run(group: Group) -> Any:
        store = kvstore.create(name, group, timeout=5.0)
        try:
            return work(store)
        finally:
            store.close()

    return run_threads(size, run, timeout=10.0)


def fails(error: type[Exception], text: str, call: Callable[[KVStore], Any], name: str = "dist_sync") -> None:
    """``call`` raises this on both ranks, and the store goes on working as if nothing had been called."""

    def work(kv: KVStore) -> Any:
        kv.init(["w", "v", "i", "table"], [W, V, np.zeros(2, np.int32), ROWS])
        with pytest.raises(error, match=text):
            call(kv)
        kv._compression = None
        kv.push(["w", "table"], [np.ones(3, np.float32), ROWS])
        out, rows = np.zeros(3, np.float32), RowSparse(np.array([0]), np.zeros((1, 2), np.float32), (4, 2))
        kv.pull("w", out)
        kv.row_sparse_pull("table", out=rows, row_ids=np.array([1]))
        return out.tolist(), rows.values.tolist()

    n = 2.0 if name.startswith("dist") else 1.0
    assert on(work, name) == [([n] * 3, [[n, n]])] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.init(["a", 4], [W, W]),
        lambda kv: kv.push(["w", 4], [W, W]),
        lambda kv: kv.pull(["w", 4], [W.copy(), W.copy()]),
        lambda kv: kv.row_sparse_pull(["table", 4], [ROWS, ROWS], row_ids=np.array([1])),
    ],
)
def test_int_and_str_keys_do_not_mix_in_one_call(call: Any) -> None:
    fails(TypeError, "expected keys of one type in a call, got .* and 4", call)


def test_int_and_str_keys_do_not_mix_in_one_store() -> None:
    fails(TypeError, "expected keys of one type in a store, got 'w' and 4", lambda kv: kv.init(4, W))


@pytest.mark.parametrize("key", ["w", ["a", "w"], ["a", "a"]])
def test_initialising_a_key_twice_raises(key: Any) -> None:
    text = "is initialised already; every key is initialised once"
    fails(ValueError, text, lambda kv: kv.init(key, [W] * len(key) if isinstance(key, list) else W))
    fails(ValueError, text, lambda kv: kv.init(key, [W] * len(key) if isinstance(key, list) else W), "local")


def test_broadcasting_a_key_twice_raises_as_in_mxnet() -> None:
    fails(ValueError, "key 'w' is initialised already", lambda kv: kv.broadcast("w", W, W.copy()))


def test_what_one_rank_initialised_twice_raises_on_every_rank() -> None:
    def call(kv: KVStore) -> None:
        kv.init("w" if kv.rank == 1 else "new", W)

    fails(ValueError, "key 'w' is initialised already", call)


def test_what_is_no_array_on_one_rank_raises_on_every_rank() -> None:
    fails(TypeError, "init of key 'new': expected an array", lambda kv: kv.init("new", 3.0 if kv.rank else W))


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.push("x", W),
        lambda kv: kv.pull("x", W.copy()),
        lambda kv: kv.pushpull("x", W.copy()),
        lambda kv: kv.row_sparse_pull("x", ROWS, row_ids=np.array([1])),
        lambda kv: kv.push(["w", "x"], [W, W]),
        lambda kv: kv.pull(["w", "x"], [W.copy(), W.copy()]),
    ],
)
def test_an_unknown_key_raises_and_nothing_of_the_call_is_done(call: Any) -> None:
    fails(ValueError, "key 'x' is not in the store.*call init first", call)


@pytest.mark.parametrize(
    ("mine", "sides"),
    [
        (
            lambda rank: np.zeros(3 + rank, np.float32),
            "key 'new': float32[3] on rank 0; key 'new': float32[4] on rank 1",
        ),
        (
            lambda rank: np.zeros(3, [np.float32, np.float64][rank]),
            "key 'new': float32[3] on rank 0; key 'new': float64[3] on rank 1",
        ),
    ],
)
def test_shapes_and_dtypes_that_differ_between_ranks_name_key_ranks_and_shapes(mine: Any, sides: str) -> None:
    fails(CommunicationError, re.escape(sides), lambda kv: kv.init("new", mine(kv.rank)))


def test_keys_that_differ_between_ranks_are_named() -> None:
    text = re.escape("key 'a': float32[3] on rank 0; key 'b': float32[3] on rank 1")
    fails(CommunicationError, text, lambda kv: kv.init("ab"[kv.rank], W))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            np.zeros(4, np.float32),
            ValueError,
            r"push of key 'w': expected float32\[3\], as initialised, got float32\[4\]",
        ),
        (np.zeros(3), TypeError, r"push of key 'w': expected float32\[3\], as initialised, got float64\[3\]"),
        ([W, np.zeros(4, np.float32)], ValueError, r"got float32\[4\]"),
    ],
)
def test_pushing_another_shape_or_dtype_raises(value: Any, error: type[Exception], text: str) -> None:
    fails(error, text, lambda kv: kv.push("w", value))


def _read_only() -> np.ndarray:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (None, ValueError, "pull: expected out, the arrays to be filled, got None"),
        (
            np.zeros(4, np.float32),
            ValueError,
            r"pull of key 'w': expected float32\[3\], as initialised, got an out float",
        ),
        (np.zeros((3, 1), np.float32), ValueError, r"got an out float32\[3, 1\]"),
        (np.zeros(3, np.int32), TypeError, r"got an out int32\[3\]"),
        (_read_only(), TypeError, "expected an array that may be written"),
        ([np.zeros(3, np.float32), 5.0], TypeError, "pull of key 'w': expected arrays, got float"),
    ],
)
def test_pulling_into_what_does_not_fit_raises(out: Any, error: type[Exception], text: str) -> None:
    fails(error, text, lambda kv: kv.pull("w", out))


def test_a_sparse_value_for_a_dense_key_raises() -> None:
    fails(TypeError, "push of key 'v': expected dense values, got a sparse one", lambda kv: kv.push("v", ROWS))
    fails(TypeError, "push of key 'v': expected dense", lambda kv: kv.push("v", torch.eye(2).to_sparse()))


def test_a_dense_value_for_a_sparse_key_raises() -> None:
    dense = np.zeros((4, 2), np.float32)
    fails(TypeError, "push of key 'table': expected row-sparse values", lambda kv: kv.push("table", dense))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda kv, out: kv.row_sparse_pull("w", out, row_ids=np.array([1])), TypeError, "got a dense key; use pull"),
        (lambda kv, out: kv.row_sparse_pull("table", V, row_ids=np.array([1])), TypeError, "got a dense out"),
        (lambda kv, out: kv.row_sparse_pull("table", out, row_ids=np.array([4])), ValueError, r"in \[0, 4\), got 4"),
        (lambda kv, out: kv.row_sparse_pull("table", out), ValueError, "expected out and row_ids, got None"),
        (lambda kv, out: kv.row_sparse_pull("table", row_ids=np.array([1])), ValueError, "expected out and row_ids"),
        (
            lambda kv, out: kv.push("table", _narrow()),
            ValueError,
            r"expected float32\[4, 2\], as initialised, got RowSp",
        ),
        (
            lambda kv, out: kv.push("table", _wide()),
            TypeError,
            r"expected float32\[4, 2\], as initialised, got RowSparse",
        ),
        (lambda kv, out: kv.push("table", ROWS, op="max"), ValueError, "expected op 'sum' for row-sparse values"),
    ],
)
def test_rows_that_do_not_fit_raise(call: Any, error: type[Exception], text: str) -> None:
    out = RowSparse(np.array([0]), np.zeros((1, 2), np.float32), (4, 2))
    fails(error, text, lambda kv: call(kv, out))


def _narrow() -> RowSparse:
    return RowSparse(np.array([1]), np.ones((1, 2), np.float32), (3, 2))


def _wide() -> RowSparse:
    return RowSparse(np.array([1]), np.ones((1, 2)), (4, 2))


@pytest.mark.parametrize(
    ("kind", "key", "value", "error", "text"),
    [
        ("2bit", "i", np.zeros(2, np.int32), TypeError, "2bit compression of key 'i': expected float32, got int32"),
        ("fp16", "i", np.zeros(2, np.int32), TypeError, "float16 compression of key 'i': expected floating-point"),
        ("2bit", "table", ROWS, TypeError, "push of key 'table': expected dense values with TwoBit"),
        ("2bit", ["w", "i"], [W, np.zeros(2, np.int32)], TypeError, "2bit compression of key 'i'"),
    ],
)
def test_compression_of_what_cannot_be_compressed_raises(
    kind: str, key: Any, value: Any, error: type[Exception], text: str
) -> None:
    def call(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": kind})
        kv.push(key, value)

    fails(error, text, call)
    if kind == "2bit":
        fails(error, text, call, "device")


def test_compression_of_anything_but_sums_raises() -> None:
    def call(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit"})
        kv.push("w", W, op="max")

    fails(ValueError, "expected op 'sum' or 'mean' with TwoBit", call)
    fails(ValueError, "expected op 'sum' or 'mean' with TwoBit", call, "device")


def test_mean_of_whole_numbers_raises() -> None:
    text = "push of key 'i': expected floating-point values for 'mean'"
    fails(TypeError, text, lambda kv: kv.push("i", np.zeros(2, np.int32), op="mean"))


@pytest.mark.parametrize(
    ("params", "name"), [({"type": "2bit"}, "local"), ({"type": "fp16"}, "device"), ({"type": "4bit"}, "dist_sync")]
)
def test_compression_that_a_store_does_not_have_raises(params: Any, name: str) -> None:
    fails(ValueError, "set_gradient_compression: expected", lambda kv: kv.set_gradient_compression(params), name)


def test_compressions_and_optimizers_that_differ_between_ranks_raise_on_every_rank() -> None:
    def compress(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0 + kv.rank})

    def optimise(kv: KVStore) -> None:
        kv.set_optimizer([torch.optim.SGD, torch.optim.Adam][kv.rank])

    fails(ValueError, "expected the same compression on every rank, got TwoBit", compress)
    fails(ValueError, r"expected the same optimizer on every rank, got .*SGD.* on rank 0 and .*Adam", optimise)


def test_what_a_bad_optimizer_is_on_one_rank_raises_on_every_rank() -> None:
    fails(
        TypeError, "expected an mxnet.optimizer.Optimizer", lambda kv: kv.set_optimizer([torch.optim.SGD, 3][kv.rank])
    )


def test_commands_to_servers_raise_because_there_are_none() -> None:
    fails(NotImplementedError, "expected servers, but there are none", lambda kv: kv._send_command_to_servers(0, ""))


def test_an_updater_that_fails_does_so_at_the_pull_and_the_store_goes_on() -> None:
    def work(kv: KVStore) -> Any:
        kv.init("w", W)

        def update(key: Any, merged: Any, stored: Any) -> None:
            if merged[0] > 5:
                raise ArithmeticError("too large")
            stored += merged

        kv._set_updater(update)
        kv.push("w", np.full(3, 4, np.float32))
        out = np.zeros(3, np.float32)
        with pytest.raises(ArithmeticError, match="too large"):
            kv.pull("w", out)
        kv.push("w", np.full(3, 2, np.float32))
        kv.pull("w", out)
        return out.tolist()

    assert on(work) == [[4.0] * 3] * 2


def test_a_key_that_one_worker_does_not_push_is_named_with_the_worker() -> None:
    def work(group: Group) -> Any:
        kv = kvstore.create("dist_sync", group, timeout=1.0)
        kv.init(["w", "v"], [W, V])
        kv.push(["w", "v"][group.rank], [W, V][group.rank])
        begin = time.monotonic()
        with pytest.raises(CommunicationError, match=r"key '[wv]'") as caught:
            kv.pull(["w", "v"][group.rank], [W, V][group.rank].copy())
        assert time.monotonic() - begin < 20
        return str(caught.value)

    assert all("time-out" in text or "rank" in text for text in run_threads(2, work, timeout=10.0))


def test_a_worker_that_closes_its_store_early_makes_the_others_raise() -> None:
    def work(group: Group) -> Any:
        kv = kvstore.create("dist_sync", group, timeout=30.0)
        kv.init("w", W)
        group.barrier()
        if group.rank == 1:
            kv.close()
            return ""
        with pytest.raises(CommunicationError) as caught:
            kv.pushpull("w", W.copy())
        return str(caught.value)

    assert "key 'w'" in run_threads(3, work, timeout=3.0)[0]


_LEAVES = """
import os, sys, time
import numpy as np
import hybridpar as hp
from hybridpar import kvstore
kv = kvstore.create("dist_sync", hp.init(timeout=20), timeout=20)
w, rows = np.zeros(1000, np.float32), kvstore.RowSparse(np.array([1]), np.ones((1, 2), np.float32), (4, 2))
kv.init(["w", "table"], [w, rows])
kv.pushpull("w", w)
if kv.rank == 1:
    {leave}
def pull_rows():
    kv.push("table", rows)
    kv.row_sparse_pull("table", rows, row_ids=np.array([1]))
for call in (lambda: kv.pushpull("w", w), pull_rows):
    begin = time.monotonic()
    try:
        call()
    except hp.CommunicationError as error:
        assert time.monotonic() - begin < 40
        print(error)
sys.stdout.flush()
"""


@pytest.mark.parametrize("leave", ["os._exit(3)", "raise SystemExit(3)"])
def test_a_worker_that_leaves_early_makes_the_others_raise_in_bounded_time(leave: str) -> None:
    statuses, outputs = run_program(_LEAVES.format(leave=leave), 2)
    assert statuses[1] == 3, outputs[1]
    printed = outputs[0][0].splitlines()
    assert len(printed) == 2 and "rank 1" in outputs[0][0], outputs[0]
    assert "key 'w'" in printed[0] and "key 'table'" in printed[1], outputs[0]
    assert statuses[0] == 0, outputs[0]


_ENDS = """
import numpy as np
from hybridpar import kvstore
kv = kvstore.create("dist_sync")
kv.init(["w", "v"], [np.zeros(1000, np.float32)] * 2)
kv.pushpull("w", np.ones(1000, np.float32))
if kv.rank == 0:
    kv.push("v", np.ones(1000, np.float32))
print(kv.rank)
"""


def test_a_program_that_ends_without_closing_its_store_ends_at_once() -> None:
    begin = time.monotonic()
    statuses, outputs = run_program(_ENDS, 2)
    assert statuses == [0, 0], outputs
    assert time.monotonic() - begin < 60


_LAST_PUSHES = """
import sys, time
import numpy as np
from hybridpar import kvstore
kv = kvstore.create("dist_sync", timeout=30)
rows = kvstore.RowSparse(np.array([1]), np.ones((1, 2), np.float32), (4, 2))
kv.init(["w", "table"], [np.zeros(3, np.float32), rows])
for _ in range(3):
    time.sleep(0.3 * (1 - kv.rank))
    kv.push("w", np.ones(3, np.float32))
    kv.push("table", rows)
    if kv.rank == 0:
        out = np.zeros(3, np.float32)
        kv.pull("w", out)
        kv.row_sparse_pull("table", rows, row_ids=np.array([1]))
        print(out.tolist(), rows.values.tolist())
        rows = kvstore.RowSparse(np.array([1]), np.ones((1, 2), np.float32), (4, 2))
"""


def test_the_last_pushes_of_a_program_that_ends_arrive() -> None:
    statuses, outputs = run_program(_LAST_PUSHES, 2)
    assert statuses == [0, 0], outputs
    assert outputs[0][0].splitlines() == ["[2.0, 2.0, 2.0] [[2.0, 2.0]]"] * 3, outputs
