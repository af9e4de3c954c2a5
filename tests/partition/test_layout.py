"""Layouts against the definition: a plain list of the ids of each rank."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.partition import Layout


@st.composite
def owner_lists(draw: st.DrawFn) -> tuple[list[int], int]:
    """Owners of up to 3,000 classes (several blocks) on up to 300 ranks (two bytes an owner)."""
    ranks = draw(st.sampled_from([1, 2, 3, 7, 255, 256, 257, 300]))
    classes = draw(st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 257, 3000])))
    runs = draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return np.repeat(rng.integers(0, ranks, classes), rng.integers(1, runs + 1, classes))[:classes].tolist(), ranks


def check_against_owners(layout: Layout, owners: list[int], num_ranks: int) -> None:
    ids_of = [[c for c, owner in enumerate(owners) if owner == rank] for rank in range(num_ranks)]
    assert layout.num_classes == len(owners)
    assert layout.num_ranks == num_ranks
    assert layout.sizes == tuple(map(len, ids_of))
    row_of = {c: row for ids in ids_of for row, c in enumerate(ids)}
    ids = torch.randperm(len(owners), generator=torch.Generator().manual_seed(0))
    ranks, rows = layout.locate(ids)
    assert ranks.dtype == rows.dtype == torch.int64
    assert ranks.tolist() == [owners[c] for c in ids.tolist()]
    assert rows.tolist() == [row_of[c] for c in ids.tolist()]
    for rank, expected in enumerate(ids_of):
        assert layout.rows(rank) == len(expected)
        assert layout.class_ids(rank).tolist() == expected
        some = torch.arange(0, len(expected), 2).flip(0)
        found = layout.class_ids(rank, some)
        assert found.dtype == torch.int64
        assert found.tolist() == expected[::2][::-1]


@given(owner_lists())
def test_from_owners_places_each_class_at_its_position_among_its_owners_classes(case: tuple[list[int], int]) -> None:
    owners, num_ranks = case
    check_against_owners(Layout.from_owners(owners, num_ranks), owners, num_ranks)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_contiguous_places_ranges(sizes: list[int]) -> None:
    owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    check_against_owners(Layout.contiguous(sizes), owners, len(sizes))


@given(st.integers(0, 60), st.integers(1, 9))
def test_striped_deals_classes_out(num_classes: int, num_ranks: int) -> None:
    owners = [c % num_ranks for c in range(num_classes)]
    check_against_owners(Layout.striped(num_classes, num_ranks), owners, num_ranks)


LAYOUTS: list[Callable[[], Layout]] = [
    lambda: Layout.contiguous([3, 2, 4]),
    lambda: Layout.striped(9, 3),
    lambda: Layout.from_owners([2, 0, 1, 1, 2, 0, 0, 0, 1], 3),
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_ids_of_any_shape_keep_it(make: Callable[[], Layout]) -> None:
    ids = torch.tensor([[0, 8, 3], [5, 5, 1]])
    ranks, rows = make().locate(ids)
    flat_ranks, flat_rows = make().locate(ids.view(-1))
    assert ranks.shape == rows.shape == ids.shape
    assert torch.equal(ranks.view(-1), flat_ranks)
    assert torch.equal(rows.view(-1), flat_rows)
    assert make().locate(ids.t())[1].tolist() == rows.t().tolist()
    assert make().locate(torch.tensor(4))[0].shape == ()
    assert make().locate(torch.empty(0, dtype=torch.int64))[0].shape == (0,)


@pytest.mark.parametrize("make", LAYOUTS)
def test_bad_arguments_are_named(make: Callable[[], Layout]) -> None:
    layout = make()
    with pytest.raises(ValueError, match=r"class id in \[0, 9\), got 9 at position 1"):
        layout.locate(torch.tensor([8, 9, -1]))
    with pytest.raises(ValueError, match=r"got -1 at position 0"):
        layout.locate(torch.tensor([-1]))
    with pytest.raises(TypeError, match=r"torch\.int64, got torch\.int32"):
        layout.locate(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"row in \[0, 3\), got 3 at position 0"):
        Layout.striped(9, 3).class_ids(1, torch.tensor([3]))
    with pytest.raises(ValueError, match="rank from 0 to 2, got 3"):
        layout.class_ids(3)
    with pytest.raises(ValueError, match="rank from 0 to 2, got -1"):
        layout.rows(-1)


def test_owners_must_be_ranks() -> None:
    with pytest.raises(ValueError, match="ranks from 0 to 1 as owners, got 2 for class 1"):
        Layout.from_owners([0, 2, 1], 2)
    with pytest.raises(ValueError, match="got -1 for class 0"):
        Layout.from_owners(torch.tensor([-1, 0]), 2)
    with pytest.raises(TypeError, match="integers, got float64"):
        Layout.from_owners([0.0, 1.0], 2)
    with pytest.raises(TypeError, match="integers, got bool"):
        Layout.from_owners(np.array([True, False]), 2)
    with pytest.raises(ValueError, match="one-dimensional"):
        Layout.from_owners([[0], [1]], 2)
    with pytest.raises(ValueError, match="one or more ranks"):
        Layout.from_owners([], 0)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64, np.uint64])
def test_owners_of_any_integer_type_mean_the_same(kind: type) -> None:
    owners = [1, 0, 1, 2]
    assert Layout.from_owners(np.array(owners, dtype=kind), 3) == Layout.from_owners(owners, 3)


def test_equality_is_about_places() -> None:
    assert Layout.contiguous([2, 2]) == Layout.contiguous([2, 2])
    assert Layout.contiguous([2, 2]) != Layout.contiguous([3, 1])
    assert Layout.contiguous([2, 2]) != Layout.striped(4, 2)
    assert Layout.contiguous([2, 2]) == Layout.from_owners([0, 0, 1, 1], 2)
    assert Layout.striped(4, 2) == Layout.from_owners([0, 1, 0, 1], 2)
    assert Layout.from_owners([0, 1, 1, 0], 2) != Layout.from_owners([0, 1, 0, 1], 2)
    assert Layout.contiguous([2]) != "contiguous"
    assert hash(Layout.contiguous([2, 2])) == hash(Layout.from_owners([0, 0, 1, 1], 2))


def test_descriptions_fit_into_json_and_tell_layouts_apart() -> None:
    described = [make().describe() for make in LAYOUTS]
    assert [json.loads(json.dumps(one)) for one in described] == described
    assert described[0] == {"kind": "contiguous", "num_classes": 9, "num_ranks": 3, "sizes": [3, 2, 4]}
    assert Layout.from_owners([0, 1, 1, 0], 2).describe() != Layout.from_owners([0, 1, 0, 1], 2).describe()
    assert Layout.from_owners([0, 1, 1, 0], 2).describe() == Layout.from_owners(np.array([0, 1, 1, 0]), 2).describe()


def test_a_hundred_million_classes_are_compact() -> None:
    num_classes = 100_000_000
    assert Layout.contiguous([num_classes // 256] * 256).nbytes < 10_000
    assert Layout.striped(num_classes, 256).nbytes < 10_000
    owners = np.arange(num_classes, dtype=np.uint32)
    owners *= np.uint32(2654435761)
    owners >>= 24
    layout = Layout.from_owners(owners.astype(np.uint8), 256)
    assert layout.nbytes <= 1.3 * num_classes
    ids = torch.tensor([0, 1, 50_000_000, 99_999_999])
    ranks, rows = layout.locate(ids)
    assert ranks.tolist() == [int(owners[c]) for c in ids.tolist()]
    assert rows.tolist() == [np.count_nonzero(owners[:c] == owners[c]) for c in ids.tolist()]
    for c, rank, row in zip(ids.tolist(), ranks.tolist(), rows.tolist(), strict=True):
        assert layout.class_ids(rank, torch.tensor([row])).tolist() == [c]
