"""The compressed form of values: every bit comes back, lengths are as promised, and broken bytes are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.comm.lanes.exponents import compress, compressed_bound, expand

BLOCK = 256
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
dtypes = pytest.mark.parametrize("dtype", BITS, ids=["bfloat16", "float32"])


def _compressed(values: Tensor) -> Tensor:
    target = torch.full((compressed_bound(values.numel(), values.dtype) + 8,), 0xAB, dtype=torch.uint8)
    length = compress(values, target)
    assert target[length:].eq(0xAB).all() or length > target.numel() - 8  # what is behind stays as it was
    assert target[-8:].eq(0xAB).all()
    return target[:length].clone()


def _comes_back(values: Tensor) -> int:
    """The number of bytes it took on the way."""
    form = _compressed(values)
    back = torch.full_like(values, 7)
    expand(form, back)
    bits = BITS[values.dtype]
    assert torch.equal(back.view(bits), values.view(bits))
    return form.numel()


def _of_bits(generator: torch.Generator, count: int, dtype: torch.dtype, exponents: int) -> Tensor:
    """Random signs and mantissas, with the exponents of a band of random place and of a given width."""
    wide = 1 << (16 if dtype is torch.bfloat16 else 32)
    mantissa = 7 if dtype is torch.bfloat16 else 23
    noise = torch.randint(0, wide, (count,), generator=generator)
    lowest = int(torch.randint(0, 257 - exponents, (1,), generator=generator))
    exponent = torch.randint(lowest, lowest + exponents, (count,), generator=generator)
    bits = (noise & ~(255 << mantissa)) | (exponent << mantissa)
    return torch.where(bits >= wide // 2, bits - wide, bits).to(BITS[dtype]).view(dtype)


@dtypes
@given(seed=st.integers(0, 2**31), count=st.integers(0, 3 * BLOCK), exponents=st.integers(1, 256))
@settings(deadline=None, max_examples=200)
def test_every_bit_comes_back(dtype: torch.dtype, seed: int, count: int, exponents: int) -> None:
    values = _of_bits(torch.Generator().manual_seed(seed), count, dtype, exponents)
    _comes_back(values)


def test_every_bfloat16_comes_back() -> None:
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    _comes_back(everything)
    _comes_back(everything[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))])


@dtypes
def test_no_block_is_longer_than_its_values_and_two_bytes(dtype: torch.dtype) -> None:
    values = _of_bits(torch.Generator().manual_seed(2), 64 * BLOCK, dtype, 256)
    assert compressed_bound(64 * BLOCK, dtype) == 64 * (2 + BLOCK * dtype.itemsize)
    assert _comes_back(values) <= compressed_bound(64 * BLOCK, dtype)
    assert compressed_bound(1, dtype) == 2 + BLOCK * dtype.itemsize
    assert compressed_bound(0, dtype) == 0


@dtypes
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e30])
def test_normal_values_take_little_more_than_the_entropy_of_their_exponents(dtype: torch.dtype, scale: float) -> None:
    values = (torch.randn(256 * BLOCK, generator=torch.Generator().manual_seed(3)) * scale).to(dtype)
    exponents = (values.view(BITS[dtype]) >> (7 if dtype is torch.bfloat16 else 23)) & 255
    shares = torch.bincount(exponents.to(torch.int64)) / values.numel()
    entropy = -float((shares * shares.clamp_min(1e-9).log2()).sum())
    least = 8 * dtype.itemsize - 8 + entropy
    bits = 8 * _comes_back(values) / values.numel()
    assert least <= bits <= least + 1
    assert math.isclose(entropy, 2.5, abs_tol=0.2)  # what normal values have, whatever their scale


@dtypes
def test_blocks_of_zeros_are_two_bytes_and_blocks_of_one_exponent_have_none(dtype: torch.dtype) -> None:
    assert _comes_back(torch.zeros(10 * BLOCK, dtype=dtype)) == 20
    assert _comes_back(torch.zeros(1, dtype=dtype)) == 2
    ones = torch.ones(10 * BLOCK, dtype=dtype)
    assert _comes_back(ones) == 10 * (2 + BLOCK * (dtype.itemsize - 1))
    assert _comes_back(-torch.zeros(BLOCK, dtype=dtype)) == 2 + BLOCK * (dtype.itemsize - 1)


@dtypes
@given(
    seed=st.integers(0, 2**31), count=st.integers(1, 3 * BLOCK), exponents=st.integers(1, 256), share=st.floats(0, 1)
)
@settings(deadline=None, max_examples=200)
def test_every_bit_comes_back_among_zeros(
    dtype: torch.dtype, seed: int, count: int, exponents: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = _of_bits(generator, count, dtype, exponents)
    values[torch.rand(count, generator=generator) < share] = 0.0
    assert _comes_back(values) <= compressed_bound(count, dtype)


@dtypes
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.99])
def test_a_zero_takes_three_bits_where_there_are_many(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(64 * BLOCK, generator=generator).to(dtype)
    dense = 8 * _comes_back(values) / values.numel()
    values[torch.rand(len(values), generator=generator) < share] = 0.0
    zeros = float(values.eq(0).double().mean())
    assert 8 * _comes_back(values) / values.numel() <= 3 * zeros + (dense + 1) * (1 - zeros)


@dtypes
def test_an_outlier_costs_a_byte(dtype: torch.dtype) -> None:
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(4)).to(dtype)
    plain = _comes_back(values)
    values[100] = 1e30
    assert plain <= _comes_back(values) <= plain + 2


@dtypes
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 17])
def test_adding_gives_what_torch_gives(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    own, other = (torch.randn(count, generator=generator).mul(100).to(dtype) for _ in range(2))
    expected = (own.float() + other.float()).to(dtype)
    expand(_compressed(other), own, add=True)
    assert torch.equal(own, expected)
    for special in (math.inf, -math.inf, math.nan):
        own[0] = special
        expand(_compressed(other), own, add=True)
        assert own[0].isnan() if math.isnan(special) else own[0] == special


@dtypes
def test_bytes_that_are_cut_or_broken_are_refused(dtype: torch.dtype) -> None:
    values = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(5)).to(dtype)
    form = _compressed(values)
    for cut in (0, 1, 2, 50, 99, form.numel() // 2, form.numel() - 1):
        with pytest.raises(ValueError, match="end too early"):
            expand(form[:cut].clone(), torch.empty_like(values))
    with pytest.raises(ValueError, match="got 3 more"):
        expand(torch.cat([form, torch.zeros(3, dtype=torch.uint8)]), torch.empty_like(values))
    with pytest.raises(ValueError, match="end too early"):
        expand(form, torch.empty(3 * BLOCK, dtype=dtype))
    form[0] = 5
    with pytest.raises(ValueError, match="begins with 5"):
        expand(form, torch.empty_like(values))


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 2 * BLOCK), length=st.integers(0, 1200))
def test_no_bytes_make_it_read_or_write_elsewhere(seed: int, count: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)
    if length:
        noise[0] = [0, 1, 2, 3, 4, 8, 17, 18, 19, 20, 255][int(noise[0]) % 11]
    memory = torch.full((count + 16,), 3.0)
    try:
        expand(noise, memory[8:-8])
    except ValueError as error:
        assert "expected" in str(error)  # noqa: PT017
    assert memory[:8].eq(3).all()
    assert memory[-8:].eq(3).all()


def test_what_cannot_be_compressed_is_refused() -> None:
    room = torch.empty(4096, dtype=torch.uint8)
    for values in (torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.float64), torch.zeros(4).int()):
        with pytest.raises(TypeError, match="expected bfloat16 or float32"):
            compress(values, room)
    with pytest.raises(TypeError, match="contiguous"):
        compress(torch.zeros(4, 4).t()[1:], room)
    with pytest.raises(TypeError, match="uint8"):
        compress(torch.zeros(4), torch.empty(4096))
    with pytest.raises(ValueError, match="expected room for 1026 bytes, got 1025"):
        compress(torch.zeros(4), room[:1025])
