"""The CUDA kernels of pack and unpack, run on the host: everything but the device's own instructions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.kernels import cuda, pack_cuda, packing
from tests.kernels.cuda_host import HostLauncher, library
from tests.kernels.tensors import DTYPES, optional_tensors
from tests.kernels.test_pack import SCALES, by_torch, count_nonfinite, counts_for, same_bits

LAUNCHERS = st.builds(
    HostLauncher, blocks=st.integers(1, 5), threads=st.sampled_from([32, 64, 96]), step=st.integers(1, 99)
)
ITEM_LENGTHS = st.sampled_from([8, 40, 512])


@contextmanager
def items_of(length: int) -> Iterator[None]:
    """Short items, so that small tensors have many."""
    pack_cuda._table.cache_clear()
    with mock.patch.object(pack_cuda, "_ITEM_LENGTHS", (length,)):
        yield
    pack_cuda._table.cache_clear()


def pack(
    tensors: Sequence[torch.Tensor | None],
    counts: Sequence[int],
    bucket: torch.Tensor,
    scale: float = 1.0,
    launcher: HostLauncher | None = None,
) -> torch.Tensor:
    """As on a CUDA device, whose place ``launcher`` takes."""
    present = packing._check(tensors, counts, bucket, scale)
    with mock.patch.object(packing, "_module", return_value=launcher or HostLauncher()):
        count = packing._pack_on_device(tensors, counts, bucket, scale, present)
    assert isinstance(count, torch.Tensor)
    return count


def unpack(
    bucket: torch.Tensor,
    counts: Sequence[int],
    tensors: Sequence[torch.Tensor | None],
    scale: float = 1.0,
    launcher: HostLauncher | None = None,
) -> torch.Tensor:
    present = packing._check(tensors, counts, bucket, scale)
    with mock.patch.object(packing, "_module", return_value=launcher or HostLauncher()):
        count = packing._unpack_on_device(bucket, counts, tensors, scale, present)
    assert isinstance(count, torch.Tensor)
    return count


@given(optional_tensors(), st.sampled_from(DTYPES), SCALES, LAUNCHERS, ITEM_LENGTHS)
def test_pack_concatenates_casts_scales_and_counts(
    tensors: list[torch.Tensor | None], wire: torch.dtype, scale: float, launcher: HostLauncher, length: int
) -> None:
    counts = counts_for(tensors)
    bucket = torch.full((sum(counts),), 7.0, dtype=wire)
    with items_of(length):
        nonfinite = pack(tensors, counts, bucket, scale, launcher)
    parts = [torch.zeros(3, dtype=wire) if t is None else by_torch(t.reshape(-1), scale, wire) for t in tensors]
    assert same_bits(bucket, torch.cat([torch.zeros(0, dtype=wire), *parts]))
    assert nonfinite == sum(count_nonfinite(t) for t in tensors if t is not None)
    assert (nonfinite.shape, nonfinite.dtype) == ((), torch.int64)


@given(optional_tensors(writable=True), st.sampled_from(DTYPES), SCALES, LAUNCHERS, ITEM_LENGTHS, st.integers(0, 2**31))
def test_unpack_scatters_casts_scales_and_counts_and_writes_nothing_else(
    tensors: list[torch.Tensor | None],
    wire: torch.dtype,
    scale: float,
    launcher: HostLauncher,
    length: int,
    seed: int,
) -> None:
    counts = counts_for(tensors)
    generator = torch.Generator().manual_seed(seed)
    bucket = (torch.randn(sum(counts), dtype=torch.float64, generator=generator) * 300).exp().to(wire)
    present = [tensor for tensor in tensors if tensor is not None]
    stores = [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in present]
    expected, seen = [], 0
    for tensor, part in zip(tensors, bucket.split(counts), strict=True):
        if tensor is None:
            continue
        seen += count_nonfinite(part)
        expected.append(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone())
        view = expected[-1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view.copy_(by_torch(part, scale, tensor.dtype).view(tensor.shape))
    with items_of(length):
        assert unpack(bucket, counts, tensors, scale, launcher) == seen
    assert all(same_bits(store, wanted) for store, wanted in zip(stores, expected, strict=True))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_any_alignment_of_both_sides(source: torch.dtype, target: torch.dtype) -> None:
    numbers = np.random.default_rng(0)
    for begin, count in itertools.product(range(9), (1, 7, 31, 32, 33, 100, 517)):
        stored = torch.randn(begin + count + 9).to(source)
        before, after = numbers.integers(9, size=2).tolist()
        counts = [before, count, after]
        bucket = torch.empty(sum(counts), dtype=target)
        missing: list[torch.Tensor | None] = [None, stored[begin : begin + count], None]
        pack(missing, counts, bucket, 0.5)
        middle = by_torch(stored[begin : begin + count], 0.5, target)
        assert torch.equal(bucket, torch.nn.functional.pad(middle, (before, after)))

        expected = stored.clone()
        expected[begin : begin + count] = by_torch(middle, 3.0, source)
        unpack(bucket, counts, missing, 3.0)
        assert torch.equal(stored, expected)


@pytest.mark.parametrize(("target_size", "width"), [(4, 4), (2, 4), (2, 8)])
def test_vectors_begin_where_both_sides_are_aligned(target_size: int, width: int) -> None:
    for source, target in itertools.product(
        range(4096, 4096 + 4 * width, 4), range(8192, 8192 + 2 * width, target_size)
    ):
        heads = [h for h in range(width) if (source // 4 + h) % width == 0 and (target // target_size + h) % width == 0]
        assert library().head_of(source, target, target_size, width) == (heads[0] if heads else -1)


def test_many_small_tensors_among_empty_and_missing_ones() -> None:
    counts = np.random.default_rng(1).choice([0, 1, 2, 3, 17], size=12_000).tolist()
    tensors = [None if i % 7 == 0 else torch.full((count,), float(i)) for i, count in enumerate(counts)]
    bucket = torch.full((sum(counts),), 7.0)
    launcher = HostLauncher(blocks=16, threads=256)
    assert pack(tensors, counts, bucket, 1.0, launcher) == 0
    assert launcher.launched == ["copy_float32"]
    filled = [torch.zeros(count) if tensor is None else tensor for tensor, count in zip(tensors, counts, strict=True)]
    assert torch.equal(bucket, torch.cat(filled))
    unpack(bucket, counts, tensors, 2.0, launcher)
    assert all(tensor is None or tensor.eq(2.0 * i).all() for i, tensor in enumerate(tensors))


def test_one_launch_for_each_dtype() -> None:
    launcher = HostLauncher()
    tensors = [torch.ones(5), torch.ones(6).half(), None, torch.ones(7), torch.ones(8).double(), torch.ones(9).half()]
    counts = [5, 6, 4, 7, 8, 9]
    bucket = torch.empty(39, dtype=torch.float16)
    pack(tensors, counts, bucket, 1.0, launcher)
    assert launcher.launched == ["convert_float32_to_float16", "convert_float64_to_float16", "copy_float16"]
    assert torch.equal(bucket, torch.cat([torch.ones(11), torch.zeros(4), torch.ones(24)]).half())


def test_nothing_to_do_launches_nothing() -> None:
    launcher = HostLauncher()
    assert pack([], [], torch.empty(0), 1.0, launcher) == 0
    assert pack([torch.empty(0, 3), None], [0, 0], torch.empty(0), 1.0, launcher) == 0
    assert unpack(torch.empty(0), [0], [torch.empty(2, 0)], 1.0, launcher) == 0
    assert launcher.launched == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_only_copied_keeps_its_bits(dtype: torch.dtype) -> None:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limit = torch.iinfo(width)
    bits = torch.randint(limit.min, limit.max, (3000,), dtype=width)
    bits[:3] = torch.tensor([limit.max, limit.min, -1], dtype=width)  # NaN with payloads, -0
    values = bits.view(dtype)
    bucket = torch.empty(3000, dtype=dtype)
    assert pack([values], [3000], bucket) == count_nonfinite(values)
    assert torch.equal(bucket.view(width), bits)


def test_a_tensor_may_lie_where_its_part_of_the_bucket_is() -> None:
    bucket = torch.arange(5000.0)
    parts = [bucket[:333], bucket[333:]]
    pack(parts, [333, 4667], bucket, 2.0)
    assert torch.equal(bucket, 2 * torch.arange(5000.0))
    unpack(bucket, [333, 4667], parts, 0.5)
    assert torch.equal(bucket, torch.arange(5000.0))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_items_cover_every_element_of_every_tensor_once(lengths: list[int], kinds: list[int]) -> None:
    counts = np.array(lengths)
    dtypes = np.array(kinds[: len(lengths)], dtype=np.uint8)
    addresses = np.arange(1, len(lengths) + 1) * 1000
    numbers, parts, item_length = pack_cuda.table_of(addresses, counts, dtypes, np.empty(0, dtype=np.int64))
    covered = {int(address): [0] * count for address, count in zip(addresses, lengths, strict=True)}
    found = np.empty(3, dtype=np.int64)
    for part in parts:
        columns = np.ascontiguousarray(numbers[part.begin : part.begin + 5 * part.tensors])
        for item in range(part.items):
            library().find(columns.ctypes.data, part.tensors, item, item_length, found.ctypes.data)
            tensor, begin, length = found.tolist()
            row = int(columns[tensor])
            assert dtypes[row // 1000 - 1] == part.dtype
            assert columns[part.tensors + tensor] == sum(lengths[: row // 1000 - 1])
            assert 1 <= length <= item_length
            for element in range(begin, begin + length):
                covered[row][element] += 1
    assert all(set(times) <= {1} for times in covered.values())


@pytest.mark.parametrize(
    ("elements", "length"), [(1, 512), (512 * 4096, 512), (1024 * 4096, 1024), (2048 * 4096, 2048), (10**10, 2048)]
)
def test_items_are_longer_where_there_is_more_to_do(elements: int, length: int) -> None:
    none = np.empty(0, dtype=np.int64)
    numbers, parts, item_length = pack_cuda.table_of(
        np.array([16]), np.array([elements]), np.array([0], np.uint8), none
    )
    assert item_length == length
    assert parts[0].items == -(-elements // length)
    assert numbers.tolist() == [16, 0, elements, 0, -1]


@given(st.data())
def test_offsets_in_tensors_beyond_32_bits(data: st.DataObject) -> None:
    shape = data.draw(
        st.lists(st.sampled_from([1, 2, 3, 7, 65_537, 2**32 - 1, 2**32, 2**33 + 1]), min_size=1, max_size=3)
    )
    strides = data.draw(st.lists(st.integers(0, 2**20), min_size=len(shape), max_size=len(shape)))
    elements = int(np.prod([float(extent) for extent in shape]))
    index = data.draw(st.integers(0, min(elements, 2**62) - 1))
    left, expected = index, 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        expected += left % extent * stride
        left //= extent
    geometry = np.array([len(shape), *shape, *strides], dtype=np.int64)
    assert library().offset_of(geometry.ctypes.data, index) == expected


def test_equal_calls_find_their_table_again() -> None:
    tensors, bucket = [torch.ones(100), torch.ones(50)], torch.empty(150)
    pack_cuda._table.cache_clear()
    for scale in (1.0, 2.0):
        pack(tensors, [100, 50], bucket, scale)
        unpack(bucket, [100, 50], tensors, scale)
    assert pack_cuda._table.cache_info().misses == 1
    pack([torch.ones(100), tensors[1]], [100, 50], bucket)
    assert pack_cuda._table.cache_info().misses == 2


def test_every_kernel_that_can_be_asked_for_is_in_the_source() -> None:
    text = cuda.source("pack")
    written = set(re.findall(r"^HYBRIDPAR_(?:CONVERT|COPY)\((\w+)", text, re.MULTILINE))
    codes = sorted(pack_cuda._NAMES)
    assert written == {pack_cuda._kernel(a, b, scale) for a in codes for b in codes for scale in (1.0, 0.5)}


def test_autograd_notices_what_was_written() -> None:
    weight, bucket = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    loss = (weight * weight).sum()
    version = bucket._version
    pack([weight], [3], bucket)
    assert bucket._version > version
    unpack(torch.ones(3), [3], [weight])
    assert torch.equal(weight.detach(), torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_elements_that_share_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="each have their own memory"):
        unpack(torch.ones(4), [4], [torch.ones(1).expand(4)])
