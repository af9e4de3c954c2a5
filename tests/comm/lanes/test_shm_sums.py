"""Shared memory gives the sums, maxima and minima that torch gives in rank order, to the last bit."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.comm.lanes.lane import Lane, Op
from tests.ranks import run_shared_threads

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.uint8)
ODD = torch.tensor([0.0, -0.0, 1e-8, -3e38, 65504.0, 1e-30, float("nan"), float("inf"), -float("inf"), 2049.0])
# Small, so that a few thousand elements already are many chunks.
CHUNK_BYTES = 1024


@dataclass(frozen=True)
class Call:
    """One collective: what, on which dtype, how many elements of each rank, in a bucket or not."""

    kind: str
    dtype: torch.dtype
    counts: tuple[int, ...]
    op: Op
    root: int
    bucket: bool
    seed: int


def calls(size: int) -> st.SearchStrategy[Call]:
    counts = st.one_of(st.integers(0, 70), st.integers(0, 6000))
    return st.builds(
        Call,
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
        st.sampled_from(DTYPES),
        st.tuples(*[counts] * size),
        st.sampled_from(["sum", "max", "min"]),
        st.integers(0, size - 1),
        st.booleans(),
        st.integers(0, 1 << 30),
    )


def value(dtype: torch.dtype, count: int, rank: int, seed: int) -> Tensor:
    """Numbers of very different sizes, some of them odd: the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        high = 256 if dtype == torch.uint8 else 1 << 62
        return torch.randint(-high * (dtype == torch.int64), high, (count,), dtype=torch.int64, generator=generator).to(
            dtype
        )
    numbers = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    odd = torch.rand(count, generator=generator) < 0.03
    numbers[odd] = ODD[torch.randint(len(ODD), (int(odd.sum()),), generator=generator)]
    return numbers.to(dtype)


def reduced(values: list[Tensor], op: Op) -> Tensor:
    """By torch, in rank order; half types in float32, rounded at the end."""
    dtype = values[0].dtype
    wide = [v.float() if dtype in (torch.bfloat16, torch.float16) else v for v in values]
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    return functools.reduce(combine, wide).to(dtype)


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal bits, apart from which NaN it is, and the sign of a zero that is the greater or lesser of two."""
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())


def room(count: int, dtype: torch.dtype) -> Tensor:
    """Memory aligned to nothing but its elements."""
    return torch.empty(count + 1, dtype=dtype)[1:]


def memory(lane: Lane, call: Call, count: int) -> Tensor:
    return lane.allocate(count, call.dtype, torch.device("cpu")) if call.bucket else room(count, call.dtype)


def check(lane: Lane, call: Call) -> None:
    rank, counts = lane.rank, call.counts
    make = functools.partial(value, call.dtype, seed=call.seed)
    if call.kind in ("all_reduce", "broadcast"):
        everyone = [make(counts[0], other) for other in range(lane.size)]
        tensor = whole = memory(lane, call, counts[0]).copy_(everyone[rank])
        if call.kind == "broadcast":
            lane.broadcast(tensor, call.root)
            assert same(tensor, everyone[call.root])
        else:
            lane.all_reduce(tensor, call.op)
            assert same(tensor, reduced(everyone, call.op))
    elif call.kind == "all_gather":
        whole = memory(lane, call, sum(counts))
        outputs, tensor = whole.split(counts), make(counts[rank], rank)
        if call.seed % 2:  # it lies where it goes
            tensor = outputs[rank].copy_(tensor)
        lane.all_gather(outputs, tensor)
        assert same(whole, torch.cat([make(counts[other], other) for other in range(lane.size)]))
    else:
        everyone = [make(sum(counts), other) for other in range(lane.size)]
        whole = memory(lane, call, sum(counts)).copy_(everyone[rank])
        inputs = whole.split(counts)
        output = inputs[rank] if call.seed % 2 else room(counts[rank], call.dtype)
        lane.reduce_scatter(output, inputs)
        assert same(output, reduced([other.split(counts)[rank] for other in everyone], "sum"))
        inputs[rank].copy_(everyone[rank].split(counts)[rank])
        assert same(whole, everyone[rank]), "the other inputs have changed"
    # What comes behind a collective may use the memory at once.
    if call.bucket:
        whole.fill_(77)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@given(data=st.data())
@settings(max_examples=20)
def test_any_sequence_of_collectives_gives_what_torch_gives(size: int, data: st.DataObject) -> None:
    sequence = data.draw(st.lists(calls(size), min_size=1, max_size=8))

    def work(lane: Lane) -> None:
        for call in sequence:
            check(lane, call)

    run_shared_threads(size, work, timeout=30, chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket", [False, True], ids=["ordinary", "bucket"])
def test_tensors_of_64_megabytes(size: int, bucket: bool) -> None:
    count = (64 << 20) // 4 + 3

    def work(lane: Lane) -> None:
        tensor = torch.arange(count, dtype=torch.float32).remainder_(1000)
        if bucket:
            tensor = lane.allocate(count, torch.float32, tensor.device).copy_(tensor)
        tensor += lane.rank
        lane.all_reduce(tensor, "sum")
        tensor -= sum(range(size))
        assert torch.equal(tensor, torch.arange(count, dtype=torch.float32).remainder_(1000) * size)

    run_shared_threads(size, work, timeout=60)


@pytest.mark.parametrize("seed", range(2))
def test_rounds_with_ranks_that_come_late(seed: int) -> None:
    """Waits of every length: none, spinning, yielding, asleep."""

    def work(lane: Lane) -> None:
        delays, common = random.Random(100 * seed + lane.rank), random.Random(seed)  # noqa: S311
        for turn in range(150):
            time.sleep(delays.choice([0.0, 0.0, 0.0, 1e-5, 1e-4, 1e-3, 5e-3]))
            kind = common.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
            counts = tuple(common.choice([0, 1, 17, 2000]) for _ in range(lane.size))
            root, bucket = common.randrange(lane.size), common.random() < 0.1
            check(lane, Call(kind, common.choice(DTYPES), counts, "sum", root, bucket, turn))

    run_shared_threads(4, work, timeout=30, chunk_bytes=CHUNK_BYTES)
