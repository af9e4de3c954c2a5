"""The global order: permutations, positions, and independence of the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

import hybridpar as hp
from tests.ranks import run_threads


@given(num_samples=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), batch=st.integers(1, 500))
def test_every_epoch_is_a_permutation_whatever_the_batches(num_samples: int, seed: int, batch: int) -> None:
    order = hp.GlobalOrder(num_samples, seed=seed)
    taken = [order.take(first, batch) for first in range(0, 2 * num_samples, batch)]
    indices = np.concatenate([indices for indices, _ in taken])
    epochs = np.concatenate([epochs for _, epochs in taken])
    for epoch in (0, 1):
        assert sorted(indices[epochs == epoch]) == list(range(num_samples))


def test_ranks_share_a_global_batch_that_does_not_depend_on_their_number() -> None:
    order = hp.GlobalOrder(1000, seed=5)
    whole, _ = order.take(990, 37)  # across the end of an epoch
    for size in (1, 2, 3, 4):
        parts = run_threads(size, lambda group: order.take_local(990, 37, group)[0])
        assert np.array_equal(np.concatenate(parts), whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_order_looks_random_and_changes_with_epoch_and_seed() -> None:
    count = 31_700
    order = hp.GlobalOrder(count, seed=1)
    first, second = order.take(0, count)[0], order.take(count, count)[0]
    other = hp.GlobalOrder(count, seed=2).take(0, count)[0]
    for a, b in ((first, second), (first, other), (np.arange(count), first), (first[:-1], first[1:])):
        assert abs(np.corrcoef(a[: len(b)], b)[0, 1]) < 0.03
    # Which tenth of the data a tenth of an epoch comes from: all pairings equally likely.
    table, _, _ = np.histogram2d(np.arange(count), first, bins=10)
    assert chisquare(table.ravel()).pvalue > 1e-3
    assert kstest(first[:1000] / count, "uniform").pvalue > 1e-3


def test_a_thousand_million_samples_cost_nothing() -> None:
    order = hp.GlobalOrder(10**9, seed=3)
    indices, epochs = order.take(10**9 - 500, 1000)
    assert len(np.unique(indices)) == 1000
    assert (indices >= 0).all()
    assert (indices < 10**9).all()
    assert epochs.tolist() == [0] * 500 + [1] * 500


def test_nothing_to_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        hp.GlobalOrder(0)
    with pytest.raises(ValueError, match="at least 0"):
        hp.GlobalOrder(5).take(-1, 2)
