"""The bucket plan is a pure function, and ranks that registered different tensors all say so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridpar as hp
from hybridpar.comm.buckets import check_same_tensors, plan_buckets
from tests.head.cases import errors_of
from tests.ranks import run_threads

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[list[int], list[torch.dtype], list[int], int]:
    counts = draw(st.lists(st.integers(0, 60), max_size=30))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=len(counts), max_size=len(counts)))
    order = draw(st.permutations(range(len(counts))))
    return counts, dtypes, order, draw(st.integers(1, 500))


@given(_tensors())
def test_every_tensor_travels_once_in_order_and_within_the_limit(
    given: tuple[list[int], list[torch.dtype], list[int], int],
) -> None:
    counts, dtypes, order, limit = given
    plan = plan_buckets(counts, dtypes, order, limit)
    assert sorted(index for bucket in plan for index in bucket.members) == list(range(len(counts)))
    for bucket in plan:
        assert {dtypes[index] for index in bucket.members} == {bucket.dtype}
        assert bucket.counts == tuple(counts[index] for index in bucket.members)
        assert bucket.numel == sum(bucket.counts)
        assert bucket.numel * bucket.dtype.itemsize <= limit or sum(count > 0 for count in bucket.counts) == 1
    for dtype in DTYPES:
        sent = [index for bucket in plan if bucket.dtype == dtype for index in bucket.members]
        assert sent == [index for index in order if dtypes[index] == dtype]
    last_places = [order.index(bucket.members[-1]) for bucket in plan]
    assert last_places == sorted(last_places)
    assert plan == plan_buckets(list(counts), tuple(dtypes), tuple(order), limit)


@given(_tensors())
def test_no_two_neighbours_of_one_dtype_would_fit_into_one_bucket(
    given: tuple[list[int], list[torch.dtype], list[int], int],
) -> None:
    counts, dtypes, order, limit = given
    plan = plan_buckets(counts, dtypes, order, limit)
    for dtype in DTYPES:
        buckets = [bucket for bucket in plan if bucket.dtype == dtype]
        for bucket, following in itertools.pairwise(buckets):
            assert (bucket.numel + following.counts[0]) * dtype.itemsize > limit


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"each of 2 tensors once, got \[0, 0\]"):
        plan_buckets([1, 1], [torch.float32] * 2, [0, 0], 10)
    with pytest.raises(ValueError, match="limit_bytes >= 1, got 0"):
        plan_buckets([1], [torch.float32], [0], 0)


def test_equal_tensors_pass_on_every_rank() -> None:
    run_threads(3, lambda group: check_same_tensors(group, ["a", "b"], [(2, 3), ()], [torch.float32, torch.float64]))


Registered = tuple[list[str], list[tuple[int, ...]], list[torch.dtype]]
SAME: Registered = (["stem", "neck"], [(2, 3), (4,)], [torch.float32, torch.float32])
DIFFERENT: dict[str, tuple[Registered, str]] = {
    "name": (
        (["stem", "tail"], [(2, 3), (4,)], [torch.float32] * 2),
        r"position 1: neck: float32\[4\] on ranks 0, 2; tail: float32\[4\] on rank 1",
    ),
    "shape": (
        (["stem", "neck"], [(3, 2), (4,)], [torch.float32] * 2),
        r"position 0: stem: float32\[2, 3\] on ranks 0, 2; stem: float32\[3, 2\] on rank 1",
    ),
    "dtype": (
        (["stem", "neck"], [(2, 3), (4,)], [torch.float32, torch.bfloat16]),
        r"position 1: neck: float32\[4\] on ranks 0, 2; neck: bfloat16\[4\] on rank 1",
    ),
    "order": (
        (["neck", "stem"], [(4,), (2, 3)], [torch.float32] * 2),
        r"position 0: stem: float32\[2, 3\] on ranks 0, 2; neck: float32\[4\] on rank 1",
    ),
    "count": (
        (["stem"], [(2, 3)], [torch.float32]),
        r"position 1: neck: float32\[4\] on ranks 0, 2; nothing on rank 1",
    ),
    "none": (([], [], []), r"position 0: stem: float32\[2, 3\] on ranks 0, 2; nothing on rank 1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_named_on_every_rank(what: str) -> None:
    other, message = DIFFERENT[what]

    def work(group: Any) -> None:
        check_same_tensors(group, *(other if group.rank == 1 else SAME))

    errors = errors_of(3, work)
    for rank, error in enumerate(errors):
        assert isinstance(error, hp.CommunicationError)
        assert (error.rank, error.operation) == (rank, "register")
        with pytest.raises(hp.CommunicationError, match=message):
            raise error
