"""Small plain arrays: what is taken as such, and that the short way gives what the long one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hybridpar as hp
from hybridpar.comm.kvstore.buffer import Buffer, small_values


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32), np.arange(12, dtype=np.float32)[::2], torch.arange(6, dtype=torch.float32),
        torch.arange(12, dtype=torch.float32)[::2],
    ],
)  # fmt: skip
def test_plain_arrays_are_copied_in_and_out(array: Any) -> None:
    values = small_values(array, (6,), np.dtype(np.float32))
    assert values is not None
    buffer = Buffer(torch.zeros(6))
    buffer.fill(values)
    assert buffer.tensor.tolist() == array.tolist()
    buffer.tensor.mul_(2)
    buffer.copy_to(values)
    assert array.tolist() == buffer.tensor.tolist()


def test_several_dimensions_are_taken_as_one_where_they_lie_in_order() -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    values = small_values(matrix, (2, 3), matrix.dtype)
    assert values is not None and np.shares_memory(values, matrix) and values.tolist() == [0, 1, 2, 3, 4, 5]
    assert small_values(np.zeros((3, 2), np.float32).T, (2, 3), matrix.dtype) is None


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(5, np.float32), np.zeros(6), np.zeros(6, ">f4"), [0.0] * 6, np.ma.zeros(6, np.float32), None,
        torch.zeros(6, requires_grad=True), torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6).to_sparse(),
        torch.zeros(6, device="meta"), torch.nn.Parameter(torch.zeros(6), requires_grad=False),
    ],
)  # fmt: skip
def test_anything_else_is_not_simple(array: Any) -> None:
    assert small_values(array, (6,), np.dtype(np.float32)) is None
    with torch.inference_mode():
        inference = torch.zeros(6)
    assert small_values(inference, (6,), np.dtype(np.float32)) is None


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(1 << 20), torch.zeros(4, dtype=torch.bfloat16)])
def test_empty_large_and_unknown_values_have_no_short_way(tensor: torch.Tensor) -> None:
    assert Buffer(tensor).values is None


def test_lists_single_keys_and_both_libraries_give_the_same() -> None:
    store = hp.kvstore.create("local")
    store.init([0, 1, 2], [np.zeros(4, np.float32), torch.zeros(2, 2), np.zeros((2, 2), np.float32)])
    numbers = [np.arange(4, dtype=np.float32), torch.ones(2, 2), np.full((2, 2), 3, np.float32)]
    store.push([0, 1, 2], numbers)
    outs = [torch.zeros(4), np.zeros((2, 2), np.float32), torch.zeros(2, 2)]
    store.pull([0, 1, 2], outs)
    for number, out in zip(numbers, outs, strict=True):
        assert number.tolist() == out.tolist()
    for key, number in enumerate(numbers):
        number += 1
        store.push(key, number)
        store.pull(key, outs[key])
        assert number.tolist() == outs[key].tolist()


def test_what_was_pushed_may_be_overwritten_at_once_and_keys_may_repeat() -> None:
    store = hp.kvstore.create("local")
    value, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    store.init("a", value)
    store.push("a", value)
    value[:] = 7
    store.pull("a", out)
    assert out.tolist() == [1, 1, 1]
    store.push(["a", "a"], [value, value])
    store.pull(["a"], [out])
    assert out.tolist() == [14, 14, 14]


def test_an_out_that_may_not_be_written_is_refused_before_another_one_is() -> None:
    store = hp.kvstore.create("local")
    store.init([0, 1], [np.ones(3, np.float32)] * 2)
    outs = [np.zeros(3, np.float32), np.zeros(3, np.float32)]
    outs[1].flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        store.pull([0, 1], outs)
    assert outs[0].tolist() == [0, 0, 0]


def test_autograd_knows_that_a_tensor_was_written() -> None:
    store = hp.kvstore.create("local")
    store.init("a", torch.ones(3))
    out = torch.zeros(3)
    loss = (out * torch.ones(3, requires_grad=True)).sum()
    store.pull("a", out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
