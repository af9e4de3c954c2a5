"""`predict` is a brute-force top-k over the dense matrix; `class_centers` are its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.dense import dense_scores
from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    Case,
    assert_close,
    errors_of,
    local,
    make_head,
    make_problem,
    set_rows,
)
from tests.head.rules import RandomRule
from tests.ranks import run_threads

RULES = ["even", "striped", RandomRule(seed=5)]
SIZES = {1: (5,), 2: (4, 0), 3: (3, 1, 4), 4: (0, 2, 5, 1)}


def _predict(group: Any, case: Case, problem: Any, k: int) -> Any:
    head = make_head(group, case)
    set_rows(head, group, problem.weight, problem.bias)
    features, _ = problem.batches[0]
    state = None if head.margin_state is None else head.margin_state.clone()
    mine = local(features, case.steps[0], group.rank).requires_grad_()
    scores, ids = head.predict(mine, k=k)
    assert not scores.requires_grad
    assert state is None or torch.equal(state, head.margin_state)
    return scores, ids


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES, ids=["even", "striped", "random"])
def test_predict_is_the_top_k_of_all_classes(ranks: int, rule: Any) -> None:
    # 11 classes: a shard of 4 ranks holds two or three rows, fewer than most k.
    for name, k, chunk in [("arcface", 1, None), ("softmax-bias", 4, 2), ("magface", 8, 1), ("cosface", 11, 3)]:
        case = Case(ranks, 11, MARGINS[name], rule=rule, chunk=chunk, sizes=(SIZES[ranks],), seed=k)
        problem = make_problem(case)
        expected = dense_scores(problem.batches[0][0], problem.weight, case.margin, problem.bias).topk(k)
        results = run_threads(ranks, _predict, case, problem, k)
        assert [tuple(scores.shape) for scores, _ in results] == [(size, k) for size in SIZES[ranks]]
        assert all(ids.dtype == torch.int64 and ids.shape == scores.shape for scores, ids in results)
        assert_close(torch.cat([scores for scores, _ in results]), expected.values, 1e-12, f"{name} scores")
        assert torch.equal(torch.cat([ids for _, ids in results]), expected.indices)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_predict_of_one_is_the_default_and_knows_no_margin(name: str) -> None:
    case = Case(2, 23, MARGINS[name], sizes=((6, 3),))
    problem = make_problem(case)
    expected = dense_scores(problem.batches[0][0], problem.weight, case.margin, problem.bias).max(dim=1)

    def work(group: Any) -> Any:
        head = make_head(group, case)
        set_rows(head, group, problem.weight, problem.bias)
        return head.predict(local(problem.batches[0][0], case.steps[0], group.rank))

    results = run_threads(2, work)
    assert_close(torch.cat([s for s, _ in results]).squeeze(1), expected.values, 1e-12, "scores")
    assert torch.equal(torch.cat([i for _, i in results]).squeeze(1), expected.indices)


def test_equal_scores_give_the_same_distinct_classes_on_every_rank() -> None:
    def work(group: Any) -> Any:
        head = hp.ShardedClassifier(3, 8, margin=hp.CosFace(), group=group)
        head.weight.data.fill_(1.0)
        return head.predict(torch.ones(2, 3), k=5)

    first, *others = run_threads(3, work)
    for scores, ids in [first, *others]:
        assert torch.allclose(scores, torch.ones(2, 5))
        assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 8 for row in ids.tolist())
        assert torch.equal(ids, first[1])


@pytest.mark.parametrize("k", [0, -1, 12])
def test_predict_refuses_a_k_outside_the_classes(k: int) -> None:
    def work(group: Any) -> Any:
        hp.ShardedClassifier(3, 11, group=group).predict(torch.ones(2, 3), k=k)

    errors = errors_of(2, work)
    assert all(type(error) is ValueError and str(k) in str(error) and "11" in str(error) for error in errors), errors


def test_predict_refuses_another_embedding_size_on_every_rank() -> None:
    def work(group: Any) -> Any:
        hp.ShardedClassifier(3, 11, group=group).predict(torch.ones(2, 3 + group.rank), k=1)

    errors = errors_of(2, work)
    assert all(type(error) is ValueError for error in errors), errors


def test_predict_names_the_rank_of_features_that_are_not_finite() -> None:
    def work(group: Any) -> Any:
        features = torch.ones(2, 3)
        features[1, 1] = float("nan") if group.rank == 1 else 1.0
        hp.ShardedClassifier(3, 11, group=group).predict(features, k=1)

    errors = errors_of(3, work)
    assert all(type(error) is hp.NonFiniteError and error.ranks == (1,) for error in errors), errors


def test_ranks_that_ask_for_different_k_are_told_so() -> None:
    def work(group: Any) -> Any:
        hp.ShardedClassifier(3, 11, group=group).predict(torch.ones(2, 3), k=2 + group.rank)

    errors = errors_of(2, work)
    assert all(type(error) is ValueError and "k" in str(error) for error in errors), errors


# Class centers


def _centers(group: Any, weight: Tensor, rule: Any, asked: list[list[int]]) -> Any:
    head = hp.ShardedClassifier(4, len(weight), rule=rule, dtype=torch.float64, group=group)
    set_rows(head, group, weight)
    return head.class_centers(torch.tensor(asked[group.rank], dtype=torch.int64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES, ids=["even", "striped", "random"])
def test_class_centers_are_the_rows_wherever_they_live(ranks: int, rule: Any) -> None:
    weight = torch.randn(13, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for asked in (
        [[12, 0, 5, 5, 0]] * ranks,  # the same, with repetitions
        [[3, 12], [], [0, 1, 2, 3, 12, 7], [9]][:ranks],  # different, and none
        [list(range(13))] * ranks,
        [[]] * ranks,
    ):
        for rank, rows in enumerate(run_threads(ranks, _centers, weight, rule, asked)):
            assert rows.shape == (len(asked[rank]), 4)
            assert torch.equal(rows, weight[asked[rank]])


@pytest.mark.parametrize("bad", [13, -1, 2**40])
def test_a_center_out_of_range_is_an_error_on_every_rank(bad: int) -> None:
    weight = torch.ones(13, 4, dtype=torch.float64)
    for rank in range(3):
        asked = [[1, 2], [3], [4, 5]]
        asked[rank] = [0, bad]
        errors = errors_of(3, _centers, weight, "even", asked)
        assert all(type(error) is ValueError and str(bad) in str(error) and "13" in str(error) for error in errors)


def test_centers_are_asked_for_by_int64_ids() -> None:
    def work(group: Any) -> Any:
        ids = torch.tensor([1.0]) if group.rank == 1 else torch.tensor([1])
        hp.ShardedClassifier(3, 11, group=group).class_centers(ids)

    errors = errors_of(2, work)
    assert all(type(error) is TypeError and "int64" in str(error) for error in errors), errors
