from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.comm.kvstore import compression as module
from hybridpar.comm.kvstore.compression import Half, TwoBit, compression


def servers(gradients: np.ndarray, threshold: float) -> np.ndarray:
    """What MXNet's servers get, step by step, from the definition: float32 [steps, n] of [steps, ranks, n]."""
    threshold = np.float32(threshold)
    residuals = np.zeros(gradients.shape[1:], np.float32)
    sums = []
    for step in gradients:
        residuals = residuals + step
        sent = np.where(residuals >= threshold, threshold, np.where(residuals <= -threshold, -threshold, 0))
        residuals = residuals - sent.astype(np.float32)
        total = sent[0].astype(np.float32)
        for other in sent[1:]:
            total = total + other.astype(np.float32)
        sums.append(total)
    return np.stack(sums)


def ours(gradients: np.ndarray, threshold: float) -> np.ndarray:
    """The same by way of words that are added over the ranks as one float32 all-reduce does."""
    _, ranks, n = gradients.shape
    example = torch.empty(n)
    coders = [TwoBit(threshold).coder(example, ranks) for _ in range(ranks)]
    sums = []
    for step in gradients:
        words = torch.full((ranks, coders[0].numel), torch.nan)
        for coder, gradient, mine in zip(coders, step, words, strict=True):
            coder.encode(torch.from_numpy(gradient.copy()), mine)
        total = torch.zeros(coders[0].numel)
        for mine in words.flip(0):  # in any order
            total += mine
        decoded = torch.full((n,), torch.nan)
        coders[0].decode(total, decoded)
        sums.append(decoded.numpy())
    return np.stack(sums)


@settings(max_examples=150)
@given(
    ranks=st.integers(1, 16),
    n=st.integers(0, 40),
    steps=st.integers(1, 4),
    threshold=st.sampled_from([0.5, 0.25, 2.0, 1e-3]),
    seed=st.integers(0, 2**32 - 1),
    extreme=st.booleans(),
)
def test_words_of_1_to_16_ranks_sum_to_what_servers_would_get(
    ranks: int, n: int, steps: int, threshold: float, seed: int, extreme: bool
) -> None:
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(steps, ranks, n)) * threshold * (100 if extreme else 0.7)
    if extreme:  # every rank at the threshold: the largest sums that a field must hold
        gradients = np.where(rng.random((steps, 1, n)) < 0.5, np.abs(gradients), -np.abs(gradients))
    gradients = gradients.astype(np.float32)
    expected = servers(gradients, threshold)
    if threshold == 1e-3 and ranks > 3:
        np.testing.assert_allclose(ours(gradients, threshold), expected, rtol=0, atol=threshold * ranks * 2**-23)
    else:
        np.testing.assert_array_equal(ours(gradients, threshold), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 15, 16, 63, 1000])
def test_every_field_holds_the_codes_of_all_ranks_and_words_stay_exact(ranks: int) -> None:
    for sign in (-1, 1):
        gradients = np.full((1, ranks, 50), sign, np.float32)
        np.testing.assert_array_equal(ours(gradients, 0.5), np.full((1, 50), sign * 0.5 * ranks))


def test_two_ranks_put_eight_values_in_a_word() -> None:
    assert TwoBit().coder(torch.empty(800), 2).numel == 100
    assert TwoBit().coder(torch.empty(801), 2).numel == 101


def test_values_longer_than_a_chunk_and_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 8)
    gradients = np.random.default_rng(0).normal(size=(3, 3, 500)).astype(np.float32)
    np.testing.assert_array_equal(ours(gradients, 0.5), servers(gradients, 0.5))
    coder = TwoBit().coder(torch.empty(4, 6), 1)
    gradient, words, result = torch.randn(6, 4).T, torch.empty(coder.numel), torch.full((6, 4), torch.nan).T
    coder.encode(gradient, words)
    coder.decode(words, result)
    assert torch.equal(result, torch.where(gradient.abs() >= 0.5, 0.5 * gradient.sign(), 0))


def test_a_value_at_the_threshold_is_sent_and_one_that_is_no_number_is_not() -> None:
    gradients = np.array([[[0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), np.nan, np.inf, 0]]], np.float32)
    assert ours(gradients, 0.5)[0].tolist() == [0.5, -0.5, 0, 0, 0.5, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_half_precision_divides_first_and_multiplies_the_sum(dtype: torch.dtype, wide: torch.dtype) -> None:
    ranks = 4
    values = torch.randn(ranks, 3, 5, dtype=wide) * 30_000
    coders = [Half(dtype).coder(values[0], ranks) for _ in range(ranks)]
    words = torch.empty(ranks, 15, dtype=dtype)
    for coder, value, mine in zip(coders, values, words, strict=True):
        assert coder.dtype == dtype and coder.numel == 15
        coder.encode(value, mine)
    total = words.float().sum(0).to(dtype)
    assert total.isfinite().all()
    result = torch.empty(3, 5, dtype=wide)
    coders[0].decode(total, result)
    expected = ((values / ranks).to(dtype).float().sum(0).to(dtype).to(wide) * ranks).view(3, 5)
    assert torch.equal(result, expected)
    torch.testing.assert_close(result, values.sum(0), rtol=0.02, atol=2e3)


def test_who_is_compressed() -> None:
    assert TwoBit().applies("key 'w'", torch.float32)
    assert Half(torch.float16).applies("key 'w'", torch.float64)
    assert not Half(torch.float16).applies("key 'w'", torch.bfloat16)
    with pytest.raises(TypeError, match="2bit compression of key 'w': expected float32, got float16; cast it first"):
        TwoBit().applies("key 'w'", torch.float16)
    with pytest.raises(TypeError, match="bfloat16 compression of key 'w': expected floating-point values, got int32"):
        Half(torch.bfloat16).applies("key 'w'", torch.int32)


def test_parameters_as_mxnet_takes_them() -> None:
    assert compression({"type": "2bit"}) == TwoBit(0.5) == compression({"type": "2bit", "threshold": "0.5"})
    assert compression({"type": "2bit", "threshold": 0.3}).threshold == np.float32(0.3)  # type: ignore[attr-defined]
    assert compression({"type": "fp16"}) == Half(torch.float16) and compression({"type": "bf16"}) == Half(
        torch.bfloat16
    )


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"type": "2bit", "threshold": 0}, ValueError, "expected a threshold above 0, got 0"),
        ({"type": "2bit", "threshold": -1}, ValueError, "expected a threshold above 0, got -1"),
        ({"type": "2bit", "threshold": float("nan")}, ValueError, "expected a threshold above 0, got nan"),
        ({"type": "2bit", "threshold": 1e-60}, ValueError, "expected a threshold above 0"),
        ({"type": "2bit", "threshold": None}, ValueError, "expected a number as threshold, got None"),
        ({"type": "2bit", "threshold": "half"}, ValueError, "could not convert|expected a number"),
        ({"type": "1bit"}, ValueError, "expected type '2bit', 'fp16' or 'bf16', got '1bit'"),
        ({}, ValueError, "got None"),
        ({"type": "fp16", "threshold": 1}, ValueError, r"fp16 has no parameters \['threshold'\]"),
        ("2bit", TypeError, "expected a dictionary, got str"),
    ],
)
def test_other_parameters_raise(params: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compression(params)  # type: ignore[arg-type]
