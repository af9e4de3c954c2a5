"""pack and unpack on CUDA tensors against plain torch operations on the CPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.kernels import cuda, pack, pack_reference, unpack
from tests.gpu.device import DEVICE, busy, moved
from tests.kernels.tensors import DTYPES, optional_tensors
from tests.kernels.test_pack import SCALES, by_torch, count_nonfinite, counts_for, same_bits

pytestmark = pytest.mark.gpu


def test_the_compiled_kernels_are_used() -> None:
    assert cuda.find_module("pack", DEVICE) is not None, "see the warning in the log"


@given(optional_tensors(), st.sampled_from(DTYPES), SCALES)
def test_pack_concatenates_casts_scales_and_counts(
    tensors: list[torch.Tensor | None], wire: torch.dtype, scale: float
) -> None:
    counts = counts_for(tensors)
    bucket = torch.full((sum(counts),), 7.0, dtype=wire, device=DEVICE)
    there = [None if tensor is None else moved(tensor) for tensor in tensors]
    nonfinite = pack(there, counts, bucket, scale)
    parts = [torch.zeros(3, dtype=wire) if t is None else by_torch(t.reshape(-1), scale, wire) for t in tensors]
    assert same_bits(bucket.cpu(), torch.cat([torch.zeros(0, dtype=wire), *parts]))
    assert nonfinite == sum(count_nonfinite(t) for t in tensors if t is not None)
    twin = torch.full_like(bucket, 7.0)
    assert pack_reference.pack(there, counts, twin, scale) == nonfinite
    assert same_bits(bucket, twin)


@given(optional_tensors(writable=True), st.sampled_from(DTYPES), SCALES, st.integers(0, 2**31))
def test_unpack_scatters_casts_scales_and_counts_and_writes_nothing_else(
    tensors: list[torch.Tensor | None], wire: torch.dtype, scale: float, seed: int
) -> None:
    counts = counts_for(tensors)
    generator = torch.Generator().manual_seed(seed)
    bucket = (torch.randn(sum(counts), dtype=torch.float64, generator=generator) * 300).exp().to(wire)
    there = [None if tensor is None else moved(tensor) for tensor in tensors]
    nonfinite = unpack(bucket.to(DEVICE), counts, there, scale)
    seen = 0
    for tensor, written, part in zip(tensors, there, bucket.split(counts), strict=True):
        if tensor is None or written is None:
            continue
        seen += count_nonfinite(part)
        store = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()
        expected = store.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        expected.copy_(by_torch(part, scale, tensor.dtype).view(tensor.shape))
        whole = torch.empty(0, dtype=tensor.dtype, device=DEVICE).set_(written.untyped_storage())
        assert same_bits(whole.cpu(), store)
    assert nonfinite == seen


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
    bucket = torch.empty(tensor.numel(), dtype=target, device=DEVICE)
    for scale in (1.0, 0.25):
        assert pack([tensor.to(DEVICE)], [tensor.numel()], bucket, scale) == count_nonfinite(tensor)
        assert same_bits(bucket.cpu(), by_torch(tensor, scale, target))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_any_alignment_of_both_sides(source: torch.dtype, target: torch.dtype) -> None:
    numbers = np.random.default_rng(0)
    for begin, count in itertools.product(range(9), (1, 33, 517, 5003)):
        stored = torch.randn(begin + count + 9).to(source)
        there = stored.to(DEVICE)
        before, after = numbers.integers(9, size=2).tolist()
        counts = [before, count, after]
        bucket = torch.empty(sum(counts), dtype=target, device=DEVICE)
        tensors = [None, there[begin : begin + count], None]
        pack(tensors, counts, bucket, 0.5)
        middle = by_torch(stored[begin : begin + count], 0.5, target)
        assert torch.equal(bucket.cpu(), torch.nn.functional.pad(middle, (before, after)))
        stored[begin : begin + count] = by_torch(middle, 3.0, source)
        unpack(bucket, counts, tensors, 3.0)
        assert torch.equal(there.cpu(), stored)


def test_many_small_tensors_among_empty_and_missing_ones() -> None:
    counts = np.random.default_rng(1).choice([0, 1, 2, 3, 17], size=12_000).tolist()
    whole = torch.randn(sum(counts), device=DEVICE)
    tensors = [part.clone() if i % 7 else None for i, part in enumerate(whole.split(counts))]
    bucket = torch.full_like(whole, 7.0)
    assert pack(tensors, counts, bucket) == 0
    filled = [part if i % 7 else torch.zeros_like(part) for i, part in enumerate(whole.split(counts))]
    assert torch.equal(bucket, torch.cat(filled))
    unpack(bucket, counts, tensors, 2.0)
    assert all(tensor is None or torch.equal(tensor, 2 * part) for tensor, part in zip(tensors, filled, strict=True))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_large_tensors_of_odd_sizes(wire: torch.dtype) -> None:
    counts = [50_000_003, 1, 9_999_999, 4096]
    tensors = [torch.randn(count, device=DEVICE) for count in counts]
    tensors[2][12_345] = float("nan")
    tensors[0][-1] = float("inf")
    bucket = torch.empty(sum(counts), dtype=wire, device=DEVICE)
    assert pack(tensors, counts, bucket, 0.5) == 2
    expected = (torch.cat(tensors) * 0.5).to(wire)
    assert torch.equal(bucket.nan_to_num(5.0), expected.nan_to_num(5.0))
    back = [torch.zeros_like(tensor) for tensor in tensors]
    assert unpack(bucket, counts, back, 2.0) == 2
    assert torch.equal(torch.cat(back).nan_to_num(5.0), (expected.float() * 2.0).nan_to_num(5.0))


def test_channels_last_gradients_lie_in_logical_order() -> None:
    gradient = torch.randn(40, 30, 3, 3, device=DEVICE).to(memory_format=torch.channels_last)
    bucket = torch.empty(gradient.numel(), dtype=torch.bfloat16, device=DEVICE)
    pack([gradient], [gradient.numel()], bucket, 0.25)
    assert torch.equal(bucket, (gradient * 0.25).contiguous().view(-1).to(torch.bfloat16))
    back = torch.zeros_like(gradient)
    unpack(bucket, [gradient.numel()], [back], 4.0)
    assert torch.equal(back, bucket.float().mul(4.0).view(gradient.shape))


def test_a_gradient_that_is_a_view_of_the_bucket_stays_in_place() -> None:
    bucket = torch.arange(100_000.0, device=DEVICE)
    parts = [bucket[:33_333], bucket[33_333:]]
    pack(parts, [33_333, 66_667], bucket, 2.0)
    assert torch.equal(bucket, 2 * torch.arange(100_000.0, device=DEVICE))


def test_nothing_waits_for_the_device() -> None:
    tensors = [torch.ones(1000, device=DEVICE), torch.ones(7, device=DEVICE)]
    bucket = torch.empty(1007, device=DEVICE)
    for scale in (1.0, 2.0):  # compiles, loads and takes pinned memory, all of which may wait
        pack(tensors, [1000, 7], bucket, scale)
        unpack(bucket, [1000, 7], tensors, 1 / scale)
    torch.cuda.synchronize()
    busy(200)
    done = torch.cuda.current_stream().record_event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        count = pack(tensors, [1000, 7], bucket, 2.0)
        moved_elsewhere = [torch.ones(1000, device=DEVICE), tensors[1]]
        pack(moved_elsewhere, [1000, 7], bucket, 3.0)
        unpack(bucket, [1000, 7], tensors)
        assert not done.query(), "the host waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(count, torch.Tensor)
    assert (count.device.type, count.dtype, count.shape, int(count)) == ("cuda", torch.int64, (), 0)
    assert tensors[0].eq(3).all()


def test_calls_are_ordered_on_the_current_stream() -> None:
    tensor, bucket = torch.zeros(1 << 20, device=DEVICE), torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number, stream in enumerate(streams * 2, start=1):
        with torch.cuda.stream(stream):
            busy()
            tensor.fill_(number)
            pack([tensor], [tensor.numel()], bucket)
            seen = bucket.clone()
        stream.synchronize()
        assert seen.eq(number).all()


def test_parameters_are_written_without_a_graph_and_autograd_notices() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, device=DEVICE))
    loss = (weight * weight).sum()
    unpack(torch.ones(3, device=DEVICE), [3], [weight])
    assert weight.detach().eq(1).all()
    assert weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_door_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="each have their own memory"):
        unpack(torch.ones(4, device=DEVICE), [4], [torch.ones(1, device=DEVICE).expand(4)])
    with pytest.raises(ValueError, match="on the bucket's device cuda:0, got cpu at position 0"):
        pack([torch.ones(4)], [4], torch.empty(4, device=DEVICE))


def test_a_stream_that_is_being_captured_is_refused() -> None:
    graph, tensor, bucket = torch.cuda.CUDAGraph(), torch.ones(9, device=DEVICE), torch.empty(9, device=DEVICE)
    with pytest.raises(RuntimeError, match="outside of CUDA graphs"), torch.cuda.graph(graph):
        pack([tensor], [9], bucket)
