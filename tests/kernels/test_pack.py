"""pack and unpack against plain torch operations, and against their references."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.kernels import _native, pack, pack_reference, unpack
from tests.kernels.tensors import DTYPES, optional_tensors

SCALES = st.sampled_from([1.0, 0.5, -3.0, 1 / 3, 0.0, 1e-30])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal values, signs of zero included; any NaN equals any NaN."""
    numbers = ~left.isnan()
    return (
        left.dtype == right.dtype
        and torch.equal(left.isnan(), right.isnan())
        and torch.equal(left[numbers], right[numbers])
        and torch.equal(left[numbers].signbit(), right[numbers].signbit())
    )


def by_torch(values: torch.Tensor, scale: float, target: torch.dtype) -> torch.Tensor:
    """The definition in torch operations: product in the wider type, then one cast."""
    if torch.float64 in (values.dtype, target):
        product = values.double() * scale
        return product if target == torch.float64 else product.float().to(target)
    return (values.float() * scale).to(target)


def count_nonfinite(values: torch.Tensor) -> int:
    return values.numel() - int(values.isfinite().sum())


def counts_for(tensors: list[torch.Tensor | None]) -> list[int]:
    return [3 if tensor is None else tensor.numel() for tensor in tensors]


@given(optional_tensors(), st.sampled_from(DTYPES), SCALES)
def test_pack_concatenates_casts_scales_and_counts(
    tensors: list[torch.Tensor | None], wire: torch.dtype, scale: float
) -> None:
    counts = counts_for(tensors)
    bucket = torch.full((sum(counts),), 7.0, dtype=wire)
    nonfinite = pack(tensors, counts, bucket, scale)

    parts = [torch.zeros(3, dtype=wire) if t is None else by_torch(t.reshape(-1), scale, wire) for t in tensors]
    assert same_bits(bucket, torch.cat([torch.zeros(0, dtype=wire), *parts]))
    assert nonfinite == sum(count_nonfinite(t) for t in tensors if t is not None)

    twin = torch.full_like(bucket, 7.0)
    assert pack_reference.pack(tensors, counts, twin, scale) == nonfinite
    assert same_bits(bucket, twin)


@given(optional_tensors(writable=True), st.sampled_from(DTYPES), SCALES, st.integers(0, 2**31))
def test_unpack_scatters_casts_scales_and_counts(
    tensors: list[torch.Tensor | None], wire: torch.dtype, scale: float, seed: int
) -> None:
    counts = counts_for(tensors)
    generator = torch.Generator().manual_seed(seed)
    bucket = (torch.randn(sum(counts), dtype=torch.float64, generator=generator) * 300).exp().to(wire)
    twins = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    nonfinite = unpack(bucket, counts, tensors, scale)

    seen = 0
    for tensor, part in zip(tensors, bucket.split(counts), strict=True):
        if tensor is not None:
            assert same_bits(tensor.reshape(-1), by_torch(part, scale, tensor.dtype))
            seen += count_nonfinite(part)
    assert nonfinite == seen

    assert pack_reference.unpack(bucket, counts, twins, scale) == nonfinite
    for tensor, twin in zip(tensors, twins, strict=True):
        assert (tensor is None) == (twin is None)
        assert tensor is None or twin is None or same_bits(tensor, twin)


@given(optional_tensors(writable=True))
def test_unpack_writes_nothing_between_the_elements_of_a_view(tensors: list[torch.Tensor | None]) -> None:
    present = [tensor for tensor in tensors if tensor is not None]
    stores = [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in present]
    expected = []
    for tensor, store in zip(present, stores, strict=True):
        before = store.clone()
        before.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(2.0)
        expected.append(before)
    counts = [tensor.numel() for tensor in present]
    unpack(torch.ones(sum(counts)), counts, present, 2.0)
    assert all(same_bits(store, wanted) for store, wanted in zip(stores, expected, strict=True))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_every_half_and_every_tie_between_halves_is_cast_as_torch_casts(
    source: torch.dtype, target: torch.dtype
) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = [halves.view(half).to(source) for half in (torch.float16, torch.bfloat16)]
    for half in (torch.float16, torch.bfloat16):
        exact = halves.view(half).double()
        middles = (exact[:-1] + exact[1:]) / 2
        values += [middle.to(source) for middle in (middles, middles * (1 + 1e-7), middles * (1 - 1e-7))]
    tensor = torch.cat(values)
    bucket = torch.empty(tensor.numel(), dtype=target)
    assert pack([tensor], [tensor.numel()], bucket) == count_nonfinite(tensor)
    assert same_bits(bucket, tensor.to(target))


def test_float16_rounding_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    values *= np.logspace(-9, 6, len(values), dtype=np.float32)
    bucket = torch.empty(len(values), dtype=torch.float16)
    pack([torch.from_numpy(values)], [len(values)], bucket)
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(bucket.numpy(), values.astype(np.float16))


def test_channels_last_gradients_lie_in_logical_order() -> None:
    gradient = torch.randn(40, 30, 3, 3).to(memory_format=torch.channels_last)
    bucket = torch.empty(gradient.numel(), dtype=torch.bfloat16)
    pack([gradient], [gradient.numel()], bucket, 0.25)
    assert torch.equal(bucket, (gradient * 0.25).contiguous().view(-1).to(torch.bfloat16))
    back = torch.zeros_like(gradient)
    unpack(bucket, [gradient.numel()], [back], 4.0)
    assert torch.equal(back, bucket.float().mul(4.0).view(gradient.shape))


def test_a_gradient_that_is_a_view_of_the_bucket_stays_in_place() -> None:
    bucket = torch.arange(10.0)
    pack([bucket[:4], bucket[4:]], [4, 6], bucket)
    assert torch.equal(bucket, torch.arange(10.0))
    pack([bucket[:4], bucket[4:]], [4, 6], bucket, 2.0)
    assert torch.equal(bucket, 2 * torch.arange(10.0))


def test_nothing_to_pack() -> None:
    assert pack([], [], torch.empty(0)) == 0
    assert pack([torch.empty(0, 3), None], [0, 0], torch.empty(0)) == 0
    assert unpack(torch.empty(0), [0], [torch.empty(2, 0)]) == 0


def test_parameters_are_written_without_a_graph_and_autograd_notices() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    loss = (weight * weight).sum()
    unpack(torch.ones(3), [3], [weight])
    assert torch.equal(weight.detach(), torch.ones(3))
    assert weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_pack_their_own_buckets_at_once() -> None:
    sources = [torch.full((1000,), float(i)) for i in range(4)]
    buckets = [torch.empty(1000, dtype=torch.bfloat16) for _ in sources]

    def work(i: int) -> None:
        for _ in range(200):
            pack([sources[i]], [1000], buckets[i], 2.0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(bucket.float(), 2 * source) for bucket, source in zip(buckets, sources, strict=True))


@pytest.mark.parametrize(
    ("tensors", "counts", "bucket", "scale", "error", "words"),
    [
        ([torch.ones(3)], [4], torch.empty(4), 1.0, ValueError, "expected 4 elements, .* position 0, got .*3"),
        ([torch.ones(3)], [3], torch.empty(4), 1.0, ValueError, "add up to the bucket's 4 elements, got 3"),
        ([torch.ones(3)], [3, 1], torch.empty(4), 1.0, ValueError, "one count for each of the 1 tensors, got 2"),
        ([None, None], [5, -1], torch.empty(4), 1.0, ValueError, "counts of zero or more, got -1 at position 1"),
        ([torch.ones(4)], [4], torch.empty(2, 2), 1.0, ValueError, "contiguous 1-D bucket"),
        ([torch.ones(4)], [4], torch.empty(8)[::2], 1.0, ValueError, "contiguous 1-D bucket"),
        ([torch.ones(4)], [4], torch.empty(4), float("nan"), ValueError, "finite scale, got nan"),
        ([torch.ones(4)], [4], torch.empty(4, dtype=torch.int64), 1.0, TypeError, "bucket of float32.*got torch.int64"),
        ([None, torch.ones(3).int()], [1, 3], torch.empty(4), 1.0, TypeError, "got torch.int32 at position 1"),
        ([torch.ones(4, device="meta")], [4], torch.empty(4), 1.0, ValueError, "device cpu, got meta at position 0"),
    ],
)
def test_the_door_names_what_is_wrong(
    tensors: list[torch.Tensor | None],
    counts: list[int],
    bucket: torch.Tensor,
    scale: float,
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        pack(tensors, counts, bucket, scale)
    with pytest.raises(error, match=words):
        unpack(bucket, counts, tensors, scale)


def test_unpack_refuses_elements_that_share_memory() -> None:
    with pytest.raises(ValueError, match="each have their own memory"):
        unpack(torch.ones(4), [4], [torch.ones(1).expand(4)])


def native_arguments(**changes: object) -> dict[str, object]:
    tensor, bucket = torch.ones(4), torch.empty(4)
    none = np.empty(0, np.int64)
    arguments: dict[str, object] = {
        "pointers": np.array([tensor.data_ptr()]),
        "counts": np.array([4]),
        "dtypes": np.array([_native.FLOAT32], np.uint8),
        "geometry_at": none,
        "geometry": none,
        "bucket": bucket.data_ptr(),
        "bucket_count": 4,
        "bucket_dtype": _native.FLOAT32,
        "scale": 1.0,
        "keep": (tensor, bucket),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"counts": np.array([4.0])}, TypeError),
        ({"counts": np.array([4], np.int32)}, TypeError),
        ({"counts": [4]}, TypeError),
        ({"pointers": np.arange(8)[::4]}, TypeError),
        ({"counts": np.array([5])}, ValueError),
        ({"counts": np.array([3])}, ValueError),
        ({"counts": np.array([-4])}, ValueError),
        ({"counts": np.array([4, 0])}, ValueError),
        ({"bucket": 0}, ValueError),
        ({"bucket_count": -4}, ValueError),
        ({"bucket_dtype": 4}, ValueError),
        ({"dtypes": np.array([9], np.uint8)}, ValueError),
        ({"geometry_at": np.array([0])}, ValueError),
        ({"geometry_at": np.array([0, 0])}, ValueError),
        ({"geometry_at": np.array([0]), "geometry": np.array([2, 2, 2, 1])}, ValueError),
        ({"geometry_at": np.array([0]), "geometry": np.array([1, 5, 1])}, ValueError),
        ({"geometry_at": np.array([0]), "geometry": np.array([2, 2**62, 2**62, 1, 1])}, ValueError),
        ({"geometry_at": np.array([0]), "geometry": np.array([2, -2, -2, 1, 1])}, ValueError),
    ],
)
def test_the_compiled_kernels_convert_no_argument_and_check_every_number(
    changes: dict[str, object], error: type[Exception]
) -> None:
    arguments = native_arguments(**changes)
    keep = arguments.pop("keep")
    for kernel in (_native.pack, _native.unpack):
        with pytest.raises(error):
            kernel(**arguments)
    assert keep is not None
