"""The class graph holds what brute force finds, for any number of ranks, and building it needs little memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.head import class_graph
from hybridpar.head.class_graph import GraphPolicy, build_graph, nearest_rows
from hybridpar.partition import Layout, build_layout
from tests.head.cases import dense_rows
from tests.head.rules import RandomRule
from tests.ranks import run_threads


def brute_force(weight: Tensor, k: int) -> Tensor:
    """[K, min(k, K - 1)] by way of all cosines in float64, with NumPy."""
    rows = weight.double().numpy()
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    return torch.from_numpy(np.argsort(-cosines, axis=1, kind="stable")[:, : min(k, len(rows) - 1)].copy())


def _weight(classes: int, width: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of very different lengths."""
    draw = torch.Generator().manual_seed(classes)
    rows = torch.randn(classes, width, dtype=torch.float64, generator=draw)
    return (rows * torch.rand(classes, 1, dtype=torch.float64, generator=draw).exp() ** 5).to(dtype)


def _build(group: hp.Group, layout: Layout, weight: Tensor, policy: GraphPolicy) -> tuple[Tensor, Tensor]:
    ids = layout.class_ids(group.rank)
    graph = policy.empty(len(ids), len(weight))
    build_graph(group, layout, weight[ids], graph, policy)
    return ids, graph


def _graph(layout: Layout, weight: Tensor, policy: GraphPolicy) -> Tensor:
    """[K, k], put together from all ranks."""
    return dense_rows(run_threads(layout.num_ranks, _build, layout, weight, policy), len(weight))


@pytest.fixture(params=[False, True], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(class_graph, "_TILE", 8 * 6 * 9)
        monkeypatch.setattr(class_graph, "_QUERIES", 4)
        monkeypatch.setattr(class_graph, "_IVF_BLOCK", 4 * 6 * 30)
        monkeypatch.setattr(class_graph, "_IVF_QUERIES", 7)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["even", "striped", RandomRule(3)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_neighbours_are_those_of_brute_force_on_any_number_of_ranks(ranks: int, rule: Any, dtype: torch.dtype) -> None:
    weight = _weight(61, dtype=dtype)
    graph = _graph(build_layout(rule, 61, ranks), weight, GraphPolicy(7, 1, "exact"))
    assert graph.dtype == torch.int32
    assert torch.equal(graph.long(), brute_force(weight, 7))


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("search", ["exact", "faiss"])
@pytest.mark.parametrize(("sizes", "k"), [([5, 0, 8], 4), ([0, 3], 10), ([1, 1], 3), ([2, 0, 0], 1), ([1, 0], 2)])
def test_shards_without_rows_and_fewer_classes_than_neighbours(sizes: list[int], k: int, search: Any) -> None:
    if search == "faiss":
        pytest.importorskip("faiss", reason="needs hybridpar[faiss]")
    weight = _weight(sum(sizes))
    graph = _graph(Layout.contiguous(sizes), weight, GraphPolicy(k, 1, search))
    assert torch.equal(graph.long(), brute_force(weight, k))


def test_equal_rows_are_each_others_neighbours_and_rows_of_zeros_have_some() -> None:
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [-1.0, 0.1], [3.0, 0.0]])
    graph = _graph(Layout.contiguous([3, 2]), weight, GraphPolicy(2, 1, "exact"))
    for row, others in {0: {1, 4}, 1: {0, 4}, 4: {0, 1}}.items():
        assert set(graph[row].tolist()) == others
    assert len(set(graph[2].tolist()) - {2}) == 2 and (graph >= 0).all()


def test_no_rank_holds_more_than_a_block_of_rows_or_a_tile_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other ranks' rows, and of anything that has both sides; with what is kept for each row beside it."""
    monkeypatch.setattr(class_graph, "_TILE", 32 << 10)
    monkeypatch.setattr(class_graph, "_QUERIES", 16)
    largest: list[int] = []
    wrapped: Callable[..., Tensor] = hp.Group.all_gather

    def gather(group: hp.Group, tensor: Tensor, sizes: Any = None) -> Tensor:
        result = wrapped(group, tensor, sizes)
        largest.append(result.nbytes)
        return result

    def product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        largest.append(out.nbytes)
        return multiply(left, right, out=out)

    multiply: Callable[..., Tensor] = torch.mm
    monkeypatch.setattr(hp.Group, "all_gather", gather)
    monkeypatch.setattr(torch, "mm", product)
    _graph(build_layout("even", 2000, 2), _weight(2000, 16, torch.float32), GraphPolicy(3, 1, "exact"))
    assert max(largest) <= 32 << 10 and len(largest) > 2000 * 1000 // (8 << 10)


@pytest.mark.parametrize("bad_ranks", [(1,), (0, 2)])
def test_rows_that_are_not_finite_are_an_error_on_every_rank(bad_ranks: tuple[int, ...]) -> None:
    layout = build_layout("even", 30, 3)
    weight = _weight(30)
    for rank in bad_ranks:
        weight[layout.class_ids(rank)[2], 1] = float("nan")

    def work(group: hp.Group) -> hp.NonFiniteError:
        with pytest.raises(hp.NonFiniteError, match="rows of the head") as caught:
            _build(group, layout, weight, GraphPolicy(3, 1, "exact"))
        return caught.value

    assert {error.ranks for error in run_threads(3, work)} == {bad_ranks}


def test_autocast_leaves_it_exact() -> None:
    weight = _weight(200, 16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, graph = _build(hp.Group.alone(), build_layout("even", 200, 1), weight, GraphPolicy(5, 1, "exact"))
    assert torch.equal(graph.long(), brute_force(weight, 5))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_rows_that_are_near_the_batch_nearest_first(ranks: int) -> None:
    layout = build_layout(RandomRule(1), 40, ranks)
    weight = _weight(40)
    dense = brute_force(weight, 6)
    for labels in ([3, 17, 3, -1, 39, 8], [-1, -1], [], list(range(40))):
        by_level = [int(dense[label, level]) for level in range(6) for label in sorted(set(labels) - {-1})]
        expected = list(dict.fromkeys(by_level))

        def work(group: hp.Group, labels: list[int] = labels) -> Tensor:
            ids, graph = _build(group, layout, weight, GraphPolicy(6, 1, "exact"))
            rows = nearest_rows(group, layout, graph, torch.tensor(labels, dtype=torch.int64))
            assert rows.dtype == torch.int64
            return ids[rows]

        for rank, found in enumerate(run_threads(ranks, work)):
            mine = set(layout.class_ids(rank).tolist())
            assert found.tolist() == [label for label in expected if label in mine]


def test_what_was_not_found_is_nobodys_row() -> None:
    graph = torch.tensor([[1, -1], [-1, -1], [0, 1]], dtype=torch.int32)
    rows = nearest_rows(hp.Group.alone(), build_layout("even", 3, 1), graph, torch.tensor([0, 1, 2]))
    assert rows.tolist() == [1, 0]


def test_building_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hybridpar"):
        _graph(build_layout("even", 20, 2), _weight(20), GraphPolicy(4, 1, "exact"))
    assert len(caplog.messages) == 1 and "4 nearest of 20 classes" in caplog.messages[0]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_index_that_looks_into_all_lists_finds_what_brute_force_finds(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="needs hybridpar[faiss]")
    monkeypatch.setattr(class_graph, "_PROBES", 300)
    weight = _weight(300, dtype=torch.float32)
    graph = _graph(build_layout("striped", 300, ranks), weight, GraphPolicy(5, 1, "faiss"))
    assert torch.equal(graph.long(), brute_force(weight, 5))


def test_an_index_that_looks_into_few_lists_finds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes in 30 bundles, as those of faces are: what is found is near, and nothing is found twice."""
    pytest.importorskip("faiss", reason="needs hybridpar[faiss]")
    monkeypatch.setattr(class_graph, "_PROBES", 4)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 16, generator=draw).repeat(30, 1) + 0.6 * torch.randn(900, 16, generator=draw)
    graph = _graph(build_layout("even", 900, 2), weight, GraphPolicy(5, 1, "faiss"))
    wanted = brute_force(weight, 5)
    hits = 0
    for row in range(900):
        found = [other for other in graph[row].tolist() if other >= 0]
        assert len(set(found)) == len(found) and row not in found
        hits += len(set(found) & set(wanted[row].tolist()))
    assert 0.8 * 4500 < hits < 4500
