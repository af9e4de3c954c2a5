"""Checks beside MXNet itself, run by ``running.run_with_mxnet`` in a process of their own."""

from __future__ import annotations

import functools
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

np.bool = bool  # mxnet 1.9.1 asks NumPy for a name that it no longer has
import mxnet as mx  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from hybridpar import kvstore  # noqa: E402
from hybridpar.comm.kvstore.arrays import (  # noqa: E402
    as_tensor,
    is_array,
    is_mxnet,
    library_array,
    library_of,
    wait_to_read,
    wait_to_write,
)


def arrays() -> None:
    for dtype in ("float32", "float64", "float16", "int64", "int32", "int8", "uint8"):
        array = mx.nd.array(np.arange(6).reshape(2, 3), dtype=dtype)
        wait_to_read(array)
        view = as_tensor(array, write=True)
        assert view.tolist() == [[0, 1, 2], [3, 4, 5]] and str(view.dtype) == f"torch.{dtype}"
        wait_to_write(array)
        view[1, 2] = 9
        assert array.asnumpy()[1, 2] == 9
    brain = mx.nd.array([1.5, -2.0]).astype(np.dtype([("bfloat16", np.uint16)]))
    wait_to_read(brain)
    assert as_tensor(brain).dtype == torch.bfloat16 and as_tensor(brain).tolist() == [1.5, -2.0]
    view = as_tensor(mx.nd.full((1000,), 3))
    others = [mx.nd.zeros((1000,)) for _ in range(20)]
    mx.nd.waitall()
    assert (view == 3).all() and others
    array = mx.nd.zeros((2,))
    assert is_mxnet(array) and is_array(array) and library_of(array) == "mxnet"
    tensor = torch.zeros(3)
    library_array(tensor, "mxnet")[:] = 5
    mx.nd.waitall()
    assert tensor.tolist() == [5, 5, 5]
    with pytest.raises(TypeError, match=r"expected a dense array, got a row_sparse NDArray of shape \[2, 2\]"):
        as_tensor(mx.nd.ones((2, 2)).tostype("row_sparse"))


def _both(kind: str) -> tuple[Any, Any]:
    return mx.kv.create(kind), kvstore.create(kind)


def _pulled(store: Any, key: Any, shape: tuple[int, ...]) -> list[Any]:
    out = mx.nd.full(shape, -7)
    store.pull(key, out=out)
    return out.asnumpy().tolist()


def _steps(a: Any, b: Any, c: Any, d: Any) -> list[Callable[[Any], object]]:
    return [
        lambda kv: kv.init(3, a),
        lambda kv: kv.init([5, 7], [b, c]),
        lambda kv: kv.push(3, d),
        lambda kv: kv.push(3, [a, b]),
        lambda kv: kv.push([5, 7], [a, b]),
        lambda kv: kv.push([5, 5, 7], [a, b, c]),
        lambda kv: kv.push([5, 7], [[a, b], [c, d]]),
        lambda kv: kv.push(([3, 5], 7), [(a, b), c]),
        lambda kv: kv.push([], []),
    ]


def semantics() -> None:
    """The same calls give the same values in MXNet's store and in ours."""
    rng = np.random.default_rng(0)
    shape = (3, 4)

    def values(count: int) -> list[Any]:
        return [mx.nd.array(rng.normal(size=shape)) for _ in range(count)]

    for kind in ("local", "device"):
        theirs, ours = _both(kind)
        assert ours.type == theirs.type and (ours.rank, ours.num_workers) == (theirs.rank, theirs.num_workers)
        a, b, c, d = values(4)
        steps = _steps(a, b, c, d)
        for step in steps:
            step(theirs), step(ours)
            for key in (3, 5, 7) if step is not steps[0] else (3,):
                assert _pulled(theirs, key, shape) == _pulled(ours, key, shape), (kind, key)
        outs = [[mx.nd.zeros(shape) for _ in range(4)] for _ in range(2)]
        for store, (one, two, three, four) in zip((theirs, ours), outs, strict=True):
            store.pull([3, 5], out=[[one, two], three])
            store.pushpull(7, [a, b], out=four)
        for one, other in zip(*outs, strict=True):
            assert one.asnumpy().tolist() == other.asnumpy().tolist()
        for store in (theirs, ours):
            first, second = a.copy(), b.copy()
            store.pushpull(7, [first, second])
            np.testing.assert_array_equal(first.asnumpy(), (a + b).asnumpy())
            np.testing.assert_array_equal(second.asnumpy(), first.asnumpy())
            out = mx.nd.zeros(shape)
            store.broadcast(11, c, out)
            np.testing.assert_array_equal(out.asnumpy(), c.asnumpy())
        ours.close()


def updaters() -> None:
    """A function as updater sees the same keys and values, and NDArrays."""
    theirs, ours = _both("local")
    seen: list[list[Any]] = []
    for store in (theirs, ours):
        calls: list[Any] = []
        store.init("w", mx.nd.ones((4,)))

        def update(key: str, gradient: Any, weight: Any, calls: list[Any] = calls) -> None:
            name = key.decode() if isinstance(key, bytes) else key
            calls.append((name, gradient.asnumpy().tolist(), weight.asnumpy().tolist(), type(weight).__name__))
            weight += gradient * 2

        store._set_updater(update)
        store.push("w", [mx.nd.ones((4,))] * 3)
        store.push("w", mx.nd.ones((4,)))
        calls.append(_pulled(store, "w", (4,)))
        seen.append(calls)
    assert seen[0] == seen[1]
    ours.close()


def optimizers() -> None:
    """MXNet's optimizers give the same weights in both stores, also after saving and loading; rows as well."""
    for name, settings in (("sgd", {"momentum": 0.9, "wd": 0.01}), ("adam", {}), ("adagrad", {})):
        make = functools.partial(mx.optimizer.create, name, learning_rate=0.1, **settings)
        theirs, ours = _both("local")
        restarted = kvstore.create("local")
        rng = np.random.default_rng(1)
        start = mx.nd.array(rng.normal(size=(5, 2)))
        for store in (theirs, ours, restarted):
            store.init("w", start)
            store.set_optimizer(make())
        for step in range(6):
            gradients = [mx.nd.array(rng.normal(size=(5, 2))) for _ in range(2)]
            for store in (theirs, ours, restarted):
                store.push("w", gradients)
            np.testing.assert_array_equal(_pulled(theirs, "w", (5, 2)), _pulled(ours, "w", (5, 2)))
            if step == 2:
                with tempfile.TemporaryDirectory() as folder:
                    restarted.save_optimizer_states(Path(folder) / "states", dump_optimizer=True)
                    restarted.set_optimizer(make())
                    restarted.load_optimizer_states(Path(folder) / "states")
        np.testing.assert_array_equal(_pulled(ours, "w", (5, 2)), _pulled(restarted, "w", (5, 2)))
        ours.close(), restarted.close()


def rows() -> None:
    """Row-sparse values: sums, replacement, optimizers, and the rows that are pulled."""
    shape = (6, 2)
    rng = np.random.default_rng(2)

    def sparse(*indices: int) -> Any:
        return mx.nd.sparse.row_sparse_array(
            (rng.normal(size=(len(indices), 2)), list(indices)), shape=shape, dtype="float32"
        )

    for optimizer in (None, "sgd"):
        theirs, ours = _both("local")
        start = mx.nd.array(rng.normal(size=shape)).tostype("row_sparse")
        for store in (theirs, ours):
            store.init("w", start)
            if optimizer:
                store.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
        for pushed in (sparse(1, 4), [sparse(0, 1), sparse(1, 5)], sparse(2)):
            found = []
            for store in (theirs, ours):
                store.push("w", pushed)
                out = mx.nd.sparse.zeros("row_sparse", shape)
                store.row_sparse_pull("w", out=out, row_ids=mx.nd.array([5, 1, 1, 2], dtype="int64"))
                found.append((out.indices.asnumpy(), out.asnumpy()))
            np.testing.assert_array_equal(found[0][0], found[1][0])
            np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)
        ours.close()


def device_compression() -> None:
    """2-bit compression on a ``device`` store: every device has a residual of its own."""
    for devices in (1, 3):
        for threshold in (0.5, 0.3):
            theirs, ours = _both("device")
            rng = np.random.default_rng(3)
            for store in (theirs, ours):
                store.init("w", mx.nd.zeros((50,)))
                store.set_gradient_compression({"type": "2bit", "threshold": threshold})
            for _ in range(6):
                pushed = [mx.nd.array(rng.normal(size=50) * 0.4, ctx=mx.cpu(place)) for place in range(devices)]
                for store in (theirs, ours):
                    store.push("w", pushed)
                assert _pulled(theirs, "w", (50,)) == _pulled(ours, "w", (50,)), (devices, threshold)
            ours.close()


CHECKS = (arrays, semantics, updaters, optimizers, rows, device_compression)


def run_all() -> None:
    """Print what went wrong in each check, as JSON."""
    found = {}
    for check in CHECKS:
        try:
            check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
    print(json.dumps(found))
