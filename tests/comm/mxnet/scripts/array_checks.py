"""Arrays of all kinds in a store of MXNet's, on two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

import hybridpar.mxnet  # noqa: F401

# isort: split
import mxnet as mx
from mxnet import gluon

from tests.comm.mxnet.scripts import checks
from tests.comm.mxnet.scripts.values import SHAPE, filled, pulled, store, wrong


def check_other_dtypes_and_arrays_of_mxnet_numpy() -> None:
    for dtype in ("float16", "float64", "int32", "int64", "int8", "uint8"):
        kv = store()
        kv.init("w", filled(0, dtype=dtype))
        kv.push("w", filled(3, dtype=dtype))
        assert (pulled(kv, "w", dtype=dtype) == 6).all(), dtype
    kv = store()
    kv.init("w", mx.np.zeros(SHAPE))
    out = mx.np.zeros(SHAPE)
    kv.pushpull("w", mx.np.ones(SHAPE), out=out)
    assert (out.asnumpy() == 2).all()
    with mx.util.np_shape(True):
        for shape in ((), (0, 3)):
            kv = store()
            kv.init("w", mx.np.zeros(shape))
            out = mx.np.zeros(shape)
            kv.pushpull("w", mx.np.ones(shape) * 3, out=out)
            assert out.shape == shape and (out.asnumpy() == 6).all()
    truths = mx.np.array([True, False], dtype="bool")
    wrong(TypeError, "key 'truths': expected float32.*got torch.bool", lambda: store().init("truths", truths))


def check_slices_are_pushed_and_filled_in_place() -> None:
    kv = store()
    table = mx.nd.arange(24).reshape((4, 6))
    kv.init("w", table[1:3])
    kv.push("w", table[1:3])
    out = mx.nd.zeros((4, 6))
    kv.pull("w", out[2:4])
    assert np.array_equal(out.asnumpy(), [[0] * 6] * 2 + (2 * table[1:3]).asnumpy().tolist())


def check_gradients_in_layouts_of_onednn_are_combined_over_devices() -> None:
    """Which the gradient of a convolution has, and which an operator in place could hand on to its result."""

    def gradient(rank: int, device: int) -> Any:
        convolution = gluon.nn.Conv2D(32, 3, in_channels=32, use_bias=False)
        convolution.initialize(mx.init.Constant(0.1), ctx=mx.cpu(device))
        image = np.random.default_rng([rank, device]).normal(size=(2, 32, 9, 9))
        with mx.autograd.record():
            loss = (convolution(mx.nd.array(image, ctx=mx.cpu(device))) ** 2).sum()
        loss.backward()
        return convolution.weight.grad(mx.cpu(device))

    kv = store()
    shape = (32, 32, 3, 3)
    kv.init("w", filled(0, shape))
    everything = np.stack([gradient(rank, device).asnumpy() for rank in (0, 1) for device in (0, 1)])
    expected = {"sum": everything.sum(0), "max": everything.max(0), "mean": everything.mean(0)}
    for op, value in expected.items():
        for first in (gradient(kv.rank, 0), mx.nd.array(everything[2 * kv.rank])):
            kv.push("w", [first, gradient(kv.rank, 1)], op=op)
            outs = [mx.nd.zeros(shape, ctx=mx.cpu(device)) for device in (0, 1)]
            kv.pull("w", outs)
            assert all(np.allclose(out.asnumpy(), value, rtol=1e-5, atol=1e-5 * abs(value).max()) for out in outs), op


if __name__ == "__main__":
    checks.run(globals())
