"""Stores and values for the checks of this folder."""

from __future__ import annotations

from typing import Any

import pytest

import hybridpar.mxnet as face

# isort: split
import mxnet as mx

SHAPE = (3, 4)


def store(name: str = "dist_sync_hybridpar", **options: Any) -> Any:
    return face.create(name, timeout=30, **options)


def filled(value: float, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Any:
    return mx.nd.full(shape, value, dtype=dtype)


def pulled(kv: Any, key: Any, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Any:
    out = mx.nd.zeros(shape, dtype=dtype)
    kv.pull(key, out)
    return out.asnumpy()


def rows(numbers: list[int], value: float, shape: tuple[int, int] = (6, 2)) -> Any:
    if not numbers:
        return mx.nd.sparse.zeros("row_sparse", shape)
    data = mx.nd.full((len(numbers), shape[1]), value)
    return mx.nd.sparse.row_sparse_array((data, mx.nd.array(numbers, dtype="int64")), shape=shape)


def wrong(kind: type[BaseException], text: str, call: Any) -> None:
    with pytest.raises(kind, match=text):
        call()
