"""Drawing without replacement: right sets, equally likely, repeatable, and in no time that depends on the range."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hybridpar import kernels


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_in_and_the_rest_is_drawn_once_each(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 300))
    kept = sorted(data.draw(st.sets(st.integers(0, size - 1)))) if size else []
    count = data.draw(st.integers(0, size - len(kept)))
    found = kernels.draw_with(torch.tensor(kept, dtype=torch.int64), size, count, data.draw(st.integers(0, 2**64 - 1)))
    assert len(found) == len(kept) + count == len(set(found.tolist())) and found.tolist() == sorted(found.tolist())
    assert set(kept) <= set(found.tolist()) <= set(range(size))


@pytest.mark.parametrize(("kept", "size", "count"), [([], 6, 3), ([2, 5], 7, 2), ([0], 5, 1), ([0, 1, 2], 9, 5)])
def test_every_set_is_equally_likely(kept: list[int], size: int, count: int) -> None:
    rest = [number for number in range(size) if number not in kept]
    possible = [tuple(sorted([*kept, *some])) for some in itertools.combinations(rest, count)]
    draws = 400 * len(possible)
    chosen = torch.tensor(kept, dtype=torch.int64)
    seen = Counter(tuple(kernels.draw_with(chosen, size, count, seed).tolist()) for seed in range(draws))
    assert set(seen) == set(possible)
    assert stats.chisquare([seen[one] for one in possible]).pvalue > 1e-4


def test_the_range_may_be_larger_than_any_memory() -> None:
    size = 1 << 60
    found = kernels.draw_with(torch.tensor([5, size - 1]), size, 100_000, 1)
    assert len(found) == 100_002 and bool((found[1:] > found[:-1]).all()) and {5, size - 1} <= set(found.tolist())
    # Their distances follow an exponential distribution.
    gaps = (found[1:] - found[:-1]).double() / size * 100_000
    assert stats.kstest(gaps.numpy(), "expon").pvalue > 1e-4


def test_a_seed_repeats_its_draw_and_others_differ() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    one, same, other = (kernels.draw_with(nothing, 10_000, 100, seed) for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    # Known once, and to stay so: runs of other versions and machines are repeated by it.
    assert kernels.draw_with(nothing, 1000, 5, 0).tolist() == KNOWN


KNOWN = [26, 106, 430, 879, 969]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 7 numbers to draw, got 8"):
        kernels.draw_with(torch.tensor([1, 2, 3]), 10, 8, 0)
    with pytest.raises(ValueError, match=r"expected ascending numbers in \[0, 10\), none twice, got \[1, 1\]"):
        kernels.draw_with(torch.tensor([1, 1]), 10, 1, 0)
    with pytest.raises(TypeError, match="expected contiguous int64"):
        kernels.draw_with(torch.tensor([1.0]), 10, 1, 0)
