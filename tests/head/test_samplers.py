"""Sampled heads equal a dense softmax over the classes that were drawn, and estimate that over all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.head.samplers import stream
from tests.dense import dense_loss
from tests.head.cases import Case, assert_close, dense_rows, local, make_head, make_problem, set_rows
from tests.ranks import run_threads

PLAIN = hp.UniformSampler(rate=0.3, correct_logits=False)


def _positives(head: Any, rank: int, labels: Tensor) -> Tensor:
    ranks, rows = head.layout.locate(labels[labels >= 0])
    return torch.unique(rows[ranks == rank])


def _run(group: Any, case: Case, problem: Any) -> list[dict[str, Tensor]]:
    """Every step's results, with the ids of the classes that took part here and what was added to their logits."""
    head = make_head(group, case)
    set_rows(head, group, problem.weight, problem.bias)
    ids = head.layout.class_ids(group.rank)
    steps = []
    for step, (sizes, (features, labels)) in enumerate(zip(case.steps, problem.batches, strict=True)):
        mine = local(features, sizes, group.rank).requires_grad_()
        head.zero_grad()
        loss = head(mine, local(labels, sizes, group.rank))
        loss.backward()
        sampler = case.head["sampler"]
        drawn = sampler.draw(_positives(head, group.rank, labels), len(ids), case.classes, step, group.rank)
        shifts = torch.zeros(len(drawn.rows)).double() if drawn.shifts is None else drawn.shifts
        steps.append(
            {
                "loss": loss.detach(), "features": mine.grad, "ids": ids, "drawn": ids[drawn.rows], "shifts": shifts,
                "weight": head.weight.grad.clone(), "bias": None if head.bias is None else head.bias.grad.clone(),
            }
        )  # fmt: skip
    assert int(head.draws) == len(case.steps)
    return steps


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "margin", [hp.Softmax(bias=True), hp.ArcFace(8.0, 0.3), hp.CurricularFace(16.0, 0.7, momentum=0.3)]
)
def test_without_correction_it_is_the_dense_loss_of_the_classes_that_take_part(margin: Any, ranks: int) -> None:
    case = Case(ranks, 60, margin, chunk=4, head={"sampler": PLAIN})
    problem = make_problem(case)
    results = run_threads(ranks, _run, case, problem)
    state = None
    for step, (features, labels) in enumerate(problem.batches):
        now = [rank[step] for rank in results]
        active = torch.cat([rank["drawn"] for rank in now]).sort().values
        assert len(active) < 60 and set(labels[labels >= 0].tolist()) <= set(active.tolist())
        x, w = features.clone().requires_grad_(), problem.weight.clone().requires_grad_()
        b = None if problem.bias is None else problem.bias.clone().requires_grad_()
        among = torch.where(labels < 0, labels, torch.searchsorted(active, labels))
        loss, state = dense_loss(x, w[active], among, margin, None if b is None else b[active], state)
        loss.backward()
        _compare(now, loss, x, w, b)


def _compare(now: list[dict[str, Tensor]], loss: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> None:
    assert x.grad is not None and w.grad is not None
    for rank in now:
        assert_close(rank["loss"], loss, 1e-10, "loss")
    assert_close(torch.cat([rank["features"] for rank in now]), x.grad, 1e-10, "feature gradient")
    shards = [(rank["ids"], rank["weight"]) for rank in now]
    assert_close(dense_rows(shards, len(w)), w.grad, 1e-10, "weight gradient")
    if b is not None:
        assert b.grad is not None
        biases = [(rank["ids"], rank["bias"]) for rank in now]
        assert_close(dense_rows(biases, len(b)), b.grad, 1e-10, "bias gradient")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("curriculum", [False, True])
def test_with_correction_drawn_negatives_stand_for_all(ranks: int, curriculum: bool) -> None:
    """From the definition. CurricularFace without its curriculum takes the other way through the kernels."""
    margin = hp.CurricularFace(8.0, 0.0, momentum=0.0) if curriculum else hp.CosFace(8.0, 0.2)
    case = Case(ranks, 60, margin, chunk=4, head={"sampler": hp.UniformSampler(count=20)}, ignored_share=0.0)
    problem = make_problem(case)
    results = run_threads(ranks, _run, case, problem)
    for step, (features, labels) in enumerate(problem.batches):
        now = [rank[step] for rank in results]
        shifts = torch.full((60,), -math.inf).double()
        for rank in now:
            shifts[rank["drawn"]] = rank["shifts"]
        assert (shifts[labels] == 0).all() and (shifts > 0).any()
        for rank in now:  # 1 / 3 of them, but for those of the batch
            negatives = len(rank["ids"]) - int(torch.isin(rank["ids"], labels).sum())
            drawn = int((rank["shifts"] > 0).sum())
            assert drawn == 0 or rank["shifts"].max() == pytest.approx(math.log(negatives / drawn))
        x, w = features.clone().requires_grad_(), problem.weight.clone().requires_grad_()
        cosines = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(w).T
        own = torch.nn.functional.one_hot(labels, 60).bool()
        hard = (cosines > cosines[own][:, None]).detach()  # of the curriculum with margin 0, whose t stays 0
        changed = torch.where(hard, cosines * cosines, cosines) if curriculum else cosines - 0.2 * own.double()
        logits = 8.0 * torch.where(own & torch.tensor(curriculum), cosines, changed) + shifts
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        _compare(now, loss, x, w, None)


def test_everything_drawn_is_the_exact_head() -> None:
    case = Case(2, 31, hp.ArcFace(8.0, 0.3), head={"sampler": hp.UniformSampler(rate=1.0)})
    problem = make_problem(case)
    sampled = run_threads(2, _run, case, problem)

    def exact(group: Any) -> list[Tensor]:
        head = make_head(group, replace(case, head={}))
        set_rows(head, group, problem.weight)
        return [
            head(local(x, sizes, group.rank), local(y, sizes, group.rank)).detach()
            for sizes, (x, y) in zip(case.steps, problem.batches, strict=True)
        ]

    for ours, theirs in zip(sampled[0], run_threads(2, exact)[0], strict=True):
        assert_close(ours["loss"], theirs, 1e-12, "loss")


def test_the_corrected_sum_estimates_that_over_all_classes_without_bias() -> None:
    """Over 400 draws the mean of exp(loss) comes near the exact one, within three of its own deviations."""
    head, exact = (
        hp.ShardedClassifier(
            8, 500, margin=hp.CosFace(4.0, 0.1), sampler=sampler, dtype=torch.float64, group=hp.Group.alone()
        )
        for sampler in (hp.UniformSampler(rate=0.1), None)
    )
    x, y = torch.randn(1, 8, dtype=torch.float64), torch.tensor([7])
    with torch.no_grad():
        draws = torch.stack([head(x, y).exp() for _ in range(400)])
        wanted = exact(x, y).exp()
    assert abs(draws.mean() - wanted) < 3 * draws.std() / 20
    assert draws.std() > 0


def test_evaluation_takes_all_classes_and_draws_none() -> None:
    head, exact = (
        hp.ShardedClassifier(8, 50, sampler=sampler, group=hp.Group.alone())
        for sampler in (hp.UniformSampler(rate=0.1), None)
    )
    x, y = torch.randn(5, 8), torch.arange(5)
    assert head.eval()(x, y) == exact.eval()(x, y) and head.draws is not None and int(head.draws) == 0
    assert head.train()(x, y) != exact(x, y) and int(head.draws) == 1


def test_draws_are_told_apart_by_seed_step_and_rank_and_repeat() -> None:
    nothing = torch.empty(0, dtype=torch.int64)

    def draw(seed: int, step: int, rank: int) -> Tensor:
        return hp.UniformSampler(rate=0.1, seed=seed).draw(nothing, 1000, 2000, step, rank).rows

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    several = [draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 3, 2)]
    assert len({tuple(rows.tolist()) for rows in several}) == 5
    assert len({stream(seed, step, rank) for seed in range(20) for step in range(20) for rank in range(20)}) == 8000


def test_a_quota_counts_the_batchs_classes_and_a_rank_without_any_draws_its_own() -> None:
    sampler = hp.UniformSampler(rate=0.1)
    for positives in (0, 4, 99, 100, 101, 300):
        drawn = sampler.draw(torch.arange(positives) * 3, 1000, 4000, 0, 0)
        assert len(drawn.rows) == max(100, positives)
        assert (drawn.shifts is None) == (positives >= 100)
    assert len(hp.UniformSampler(count=400).draw(torch.empty(0, dtype=torch.int64), 1000, 4000, 0, 0).rows) == 100
    assert len(hp.UniformSampler(count=9000).draw(torch.empty(0, dtype=torch.int64), 1000, 4000, 0, 0).rows) == 1000


@pytest.mark.parametrize("policy", [hp.RowSGD(0.3, momentum=0.9), hp.RowAdamW(0.1), hp.RowAdagrad(0.1)])
def test_only_rows_that_take_part_are_stepped(policy: hp.RowPolicy) -> None:
    head = hp.ShardedClassifier(8, 50, margin=hp.CosFace(4.0), sampler=PLAIN, optimizer=policy, group=hp.Group.alone())
    for step in range(3):
        before = head.weight.detach().clone()
        states = [value.clone() for value in head.row_optimizer.state[head.weight].values()]
        labels = torch.arange(5) * 7
        head(torch.randn(5, 8), labels).backward()
        active = torch.zeros(50, dtype=torch.bool)
        active[PLAIN.draw(labels, 50, 50, step, 0).rows] = True
        assert torch.equal((head.weight.detach() != before).any(dim=1), active)
        for old, new in zip(states, head.row_optimizer.state[head.weight].values(), strict=True):
            assert torch.equal(old[~active], new[~active]) and not torch.equal(old, new)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hp.UniformSampler(), "expected rate or count, got rate=None and count=None"),
        (lambda: hp.UniformSampler(rate=0.1, count=4), "expected rate or count"),
        (lambda: hp.UniformSampler(rate=0.0), r"rate: expected a share in \(0, 1\], got 0.0"),
        (lambda: hp.UniformSampler(rate=1.5), r"rate: expected a share in \(0, 1\], got 1.5"),
        (lambda: hp.UniformSampler(count=0), "count: expected at least 1 class, got 0"),
        (
            lambda: hp.ShardedClassifier(
                4, 9, margin=hp.CosFace(0.0), sampler=hp.UniformSampler(rate=0.5), group=hp.Group.alone()
            ),
            "sampler: expected a margin whose scale is above 0",
        ),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
