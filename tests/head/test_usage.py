"""The ways a training script may use the head: scaled, retained, frozen, averaged, two at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridpar as hp
from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    Case,
    Problem,
    assert_close,
    dense_rows,
    local,
    make_head,
    make_problem,
    run_dense,
    set_rows,
)
from tests.ranks import run_threads

RANKS = [1, 2, 3, 4]


def _mean_reduction(group: Any, case: Case, problem: Problem) -> Any:
    results = []
    for reduction in ("sum", "mean"):
        head = make_head(group, Case(**{**vars(case), "head": {"backbone_reduction": reduction}}))
        set_rows(head, group, problem.weight, problem.bias)
        features, labels = problem.batches[0]
        mine = local(features, case.steps[0], group.rank).requires_grad_()
        loss = head(mine, local(labels, case.steps[0], group.rank))
        loss.backward()
        bias_grad = None if head.bias is None else head.bias.grad
        results.append((loss.detach(), mine.grad, head.weight.grad, bias_grad))
    return results


@pytest.mark.parametrize("ranks", RANKS)
def test_backbone_reduction_mean_multiplies_the_feature_gradient_alone(ranks: int) -> None:
    for name in ("arcface", "softmax-bias", "magface"):
        case = Case(ranks, 9, MARGINS[name])
        problem = make_problem(case)
        oracle = run_dense(case, problem)[0]
        summed, averaged = zip(*run_threads(ranks, _mean_reduction, case, problem), strict=True)
        assert_close(torch.cat([r[1] for r in summed]), oracle.features_grad, 1e-10, "sum")
        assert_close(torch.cat([r[1] for r in averaged]), oracle.features_grad * ranks, 1e-10, "mean")
        for (loss, _, rows, bias), (same_loss, _, same_rows, same_bias) in zip(summed, averaged, strict=True):
            assert torch.equal(loss, same_loss) and torch.equal(rows, same_rows)
            assert bias is None or torch.equal(bias, same_bias)


def _scaled(group: Any, case: Case, problem: Problem, factor: float) -> Any:
    head = make_head(group, case)
    set_rows(head, group, problem.weight, problem.bias)
    features, labels = problem.batches[0]
    mine = local(features, case.steps[0], group.rank).requires_grad_()
    loss = head(mine, local(labels, case.steps[0], group.rank))
    (loss * factor).backward()
    return mine.grad, head.weight.grad


@pytest.mark.parametrize("factor", [1024.0, -0.3, 0.0])
def test_a_scaled_loss_scales_every_gradient(factor: float) -> None:
    for name in ("arcface", "magface", "softmax-bias"):
        case = Case(2, 9, MARGINS[name], chunk=2)
        problem = make_problem(case)
        oracle = run_dense(case, problem)[0]
        features, weights = zip(*run_threads(2, _scaled, case, problem, factor), strict=True)
        assert_close(torch.cat(features), oracle.features_grad * factor, 1e-10, "feature gradient")
        assert_close(torch.cat(weights), oracle.weight_grad * factor, 1e-10, "weight gradient")


def _twice(group: Any, case: Case, problem: Problem) -> Any:
    head = make_head(group, case)
    set_rows(head, group, problem.weight, problem.bias)
    features, labels = problem.batches[0]
    mine = local(features, case.steps[0], group.rank).requires_grad_()
    loss = head(mine, local(labels, case.steps[0], group.rank))
    loss.backward(retain_graph=True)
    loss.backward()
    return mine.grad, head.weight.grad


def test_a_retained_graph_can_be_walked_twice() -> None:
    case = Case(2, 9, MARGINS["arcface-small-scale"], chunk=2)
    problem = make_problem(case)
    oracle = run_dense(case, problem)[0]
    features, weights = zip(*run_threads(2, _twice, case, problem), strict=True)
    assert_close(torch.cat(features), oracle.features_grad * 2, 1e-10, "feature gradient")
    assert_close(torch.cat(weights), oracle.weight_grad * 2, 1e-10, "weight gradient")


def _without_gradient(group: Any, case: Case, problem: Problem) -> Any:
    features, labels = problem.batches[0]
    mine, own = local(features, case.steps[0], group.rank), local(labels, case.steps[0], group.rank)
    losses, gradients = [], []
    for mode in ("both", "no_grad", "inference", "frozen features", "frozen rows"):
        head = make_head(group, case)
        set_rows(head, group, problem.weight, problem.bias)
        x = mine.clone().requires_grad_(mode in ("both", "frozen rows"))
        head.weight.requires_grad_(mode != "frozen rows")
        if mode in ("no_grad", "inference"):
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                loss = head(x, own)
            assert not loss.requires_grad
        else:
            loss = head(x, own)
            loss.backward()
            gradients.append((mode, x.grad, head.weight.grad))
        losses.append(loss.detach().clone())
    return losses, gradients


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_grad_and_frozen_inputs_give_the_same_loss_and_the_other_gradient(name: str) -> None:
    case = Case(2, 9, MARGINS[name], chunk=2)
    for losses, gradients in run_threads(2, _without_gradient, case, make_problem(case)):
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        (_, features, rows), (_, none, same_rows), (_, same_features, no_rows) = gradients
        assert none is None and no_rows is None
        assert torch.equal(rows, same_rows) and torch.equal(features, same_features)


def _layouts(group: Any, case: Case, problem: Problem) -> Any:
    head = make_head(group, case)
    set_rows(head, group, problem.weight, problem.bias)
    features, labels = problem.batches[0]
    mine = local(features, case.steps[0], group.rank)
    leaf = mine.t().contiguous().t().requires_grad_()  # column-major
    loss = head(leaf, local(labels, case.steps[0], group.rank).repeat_interleave(2)[::2])
    loss.backward()
    return loss.detach(), leaf.grad


def test_strides_do_not_matter() -> None:
    case = Case(2, 9, MARGINS["cosface"])
    problem = make_problem(case)
    oracle = run_dense(case, problem)[0]
    losses, grads = zip(*run_threads(2, _layouts, case, problem), strict=True)
    assert_close(losses[0], oracle.loss, 1e-10, "loss")
    assert_close(torch.cat(grads), oracle.features_grad, 1e-10, "feature gradient")


def _two_heads(group: Any, second_groups: Any, cases: list[Case], problems: list[Problem], order: str) -> Any:
    groups = [group, group if second_groups is None else second_groups[group.rank]]
    heads = [make_head(g, case) for g, case in zip(groups, cases, strict=True)]
    ids = [set_rows(h, g, p.weight, p.bias) for h, g, p in zip(heads, groups, problems, strict=True)]
    inputs, losses = [], []
    for head, case, problem in zip(heads, cases, problems, strict=True):
        features, labels = problem.batches[0]
        inputs.append(local(features, case.steps[0], group.rank).requires_grad_())
        losses.append(head(inputs[-1], local(labels, case.steps[0], group.rank)))
    if order == "sum":
        (losses[0] + losses[1]).backward()
    else:
        for loss in losses if order == "forward" else reversed(losses):
            loss.backward()
    return [(loss.detach(), x.grad, i, h.weight.grad) for loss, x, i, h in zip(losses, inputs, ids, heads, strict=True)]


@pytest.mark.parametrize("order", ["forward", "backward", "sum"])
@pytest.mark.parametrize("own_group", [False, True], ids=["one-group", "two-groups"])
def test_two_heads_live_side_by_side(order: str, own_group: bool) -> None:
    cases = [Case(3, 9, MARGINS["arcface"], seed=1), Case(3, 14, MARGINS["softmax-bias"], rule="striped", seed=2)]
    problems = [make_problem(case) for case in cases]
    second = hp.thread_groups(3) if own_group else None
    ranks = run_threads(3, _two_heads, second, cases, problems, order)
    for index, (case, problem) in enumerate(zip(cases, problems, strict=True)):
        oracle = run_dense(case, problem)[0]
        assert_close(ranks[0][index][0], oracle.loss, 1e-10, "loss")
        assert_close(torch.cat([r[index][1] for r in ranks]), oracle.features_grad, 1e-10, "feature gradient")
        rows = dense_rows([r[index][2:] for r in ranks], case.classes)
        assert_close(rows, oracle.weight_grad, 1e-10, "weight gradient")
