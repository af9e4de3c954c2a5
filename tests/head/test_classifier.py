"""The sharded head equals the dense oracle whatever the shards, the batches and the chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss

import hybridpar as hp
from tests.dense import dense_loss
from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    SIZES,
    TOLERANCE,
    Case,
    Problem,
    Step,
    assert_close,
    assert_steps_equal,
    check,
    dense_rows,
    local,
    make_head,
    make_problem,
    run_dense,
    run_sharded,
    set_rows,
)
from tests.head.rules import RandomRule
from tests.ranks import run_processes

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rule", ["even", "striped", RandomRule(seed=7)], ids=["even", "striped", "random"])
@pytest.mark.parametrize("classes", [7, 10, 23, 101])
def test_any_shards_and_any_chunks_equal_the_dense_oracle(classes: int, rule: Any, ranks: int) -> None:
    names = ("arcface-small-scale", "softmax-bias", "curricularface-quick", "combined-m1-two")
    for seed, (name, chunk) in enumerate(zip(names, (1, 3, 64, None), strict=True)):
        check(Case(ranks, classes, MARGINS[name], rule=rule, chunk=chunk, seed=seed))


def test_one_class_on_each_rank() -> None:
    for name in ONE_OF_EACH:
        check(Case(4, 4, MARGINS[name], seed=1))


def test_a_single_class_has_no_loss() -> None:
    steps = run_sharded(case := Case(1, 1, hp.CosFace(), ignored_share=0.0), make_problem(case))
    assert all(step.loss == 0 and (step.features_grad == 0).all() for step in steps)


def test_a_batch_larger_than_the_class_count_and_a_wide_embedding() -> None:
    check(Case(3, 5, hp.ArcFace(), embedding=129, sizes=((40, 0, 33),), chunk=2))


@pytest.mark.parametrize("ranks", RANKS)
def test_plain_softmax_equals_torch_cross_entropy(ranks: int) -> None:
    for dtype in (torch.float64, torch.float32):
        case = Case(ranks, 13, hp.Softmax(bias=True), dtype=dtype, chunk=4, seed=3)
        problem = make_problem(case)
        expected = []
        for features, labels in problem.batches:
            assert problem.bias is not None
            x, w, b = (t.double().clone().requires_grad_() for t in (features, problem.weight, problem.bias))
            loss = F.cross_entropy(F.linear(x, w, b), labels, ignore_index=-1)
            loss = loss if (labels != -1).any() else (x.sum() + w.sum() + b.sum()) * 0
            loss.backward()
            assert x.grad is not None and w.grad is not None and b.grad is not None
            expected.append(Step(loss.detach(), x.grad, w.grad, b.grad, None, x.detach().norm(dim=1, keepdim=True)))
        assert_steps_equal(run_sharded(case, problem), expected, TOLERANCE[dtype])


def test_a_scale_multiplies_all_of_a_linear_softmax() -> None:
    case = Case(2, 13, hp.Softmax(scale=3.0, bias=True), sizes=((4, 3),), ignored_share=0.0, chunk=4)
    problem = make_problem(case)
    assert problem.bias is not None
    features, labels = problem.batches[0]
    x, w, b = (t.clone().requires_grad_() for t in (features, problem.weight, problem.bias))
    loss = F.cross_entropy(3.0 * F.linear(x, w, b), labels)
    loss.backward()
    assert x.grad is not None and w.grad is not None and b.grad is not None
    expected = Step(loss.detach(), x.grad, w.grad, b.grad, None, x.detach().norm(dim=1, keepdim=True))
    assert_steps_equal(run_sharded(case, problem), [expected], 1e-10)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (hp.ArcFace(scale=8.0, margin=0.5), lambda k, d: ArcFaceLoss(k, d, margin=math.degrees(0.5), scale=8)),
        (hp.ArcFace(scale=4.0, margin=1.0), lambda k, d: ArcFaceLoss(k, d, margin=math.degrees(1.0), scale=4)),
        (hp.CosFace(scale=8.0, margin=0.35), lambda k, d: CosFaceLoss(k, d, margin=0.35, scale=8)),
    ],
    ids=["arcface", "arcface-wide", "cosface"],
)
def test_margins_equal_pytorch_metric_learning(ours: Any, theirs: Any, ranks: int) -> None:
    case = Case(ranks, 17, ours, ignored_share=0.0, seed=4)
    problem = make_problem(case)
    expected = []
    for features, labels in problem.batches:
        peer = theirs(17, case.embedding)
        peer.W.data = problem.weight.T.contiguous().clone()
        x = features.clone().requires_grad_()
        loss = peer(x, labels)
        loss.backward()
        norms = features.norm(dim=1, keepdim=True)
        expected.append(Step(loss.detach(), x.grad, peer.W.grad.T, None, None, norms))  # type: ignore[arg-type]
    assert_steps_equal(run_sharded(case, problem), expected, 1e-9)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_odd_shapes_equal_the_dense_oracle(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3), "ranks")
    classes = data.draw(st.integers(max(2, ranks), 12), "classes")
    sizes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * ranks), min_size=1, max_size=3), "sizes")
    name = data.draw(st.sampled_from(sorted(set(MARGINS) - {"sphereface-4"})), "margin")
    # In one dimension every angle is 0 or pi, where an angular margin has no derivative.
    embedding = data.draw(st.integers(1 if name.startswith("softmax") else 2, 9), "embedding")
    case = Case(
        ranks,
        classes,
        MARGINS[name],
        rule=data.draw(st.sampled_from(["even", "striped", RandomRule(seed=3)]), "rule"),
        chunk=data.draw(st.one_of(st.none(), st.integers(1, classes + 1)), "chunk"),
        embedding=embedding,
        sizes=tuple(sizes),
        ignored_share=data.draw(st.sampled_from([0.0, 0.3, 1.1]), "ignored"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    problem = make_problem(case)
    assert_steps_equal(run_sharded(case, problem), run_dense(case, problem), 1e-9, case, floor=1.0)


def _in_processes(group: Any, case: Case, problem: Problem) -> Any:
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    results = []
    for sizes, (features, labels) in zip(case.steps, problem.batches, strict=True):
        head.zero_grad()
        mine = local(features, sizes, group.rank).requires_grad_()
        loss = head(mine, local(labels, sizes, group.rank))
        loss.backward()
        results.append((loss.item(), mine.grad.numpy(), ids.numpy(), head.weight.grad.clone().numpy()))  # type: ignore[union-attr]
    return results


def test_gloo_processes_equal_the_dense_oracle() -> None:
    case = Case(2, 11, MARGINS["adaface-quick"], chunk=3, sizes=(*SIZES[2], (0, 0), (2, 3)))
    problem = make_problem(case)
    ranks = run_processes(2, _in_processes, case, problem)
    for step, oracle in enumerate(run_dense(case, problem)):
        results = [[torch.as_tensor(x) for x in rank[step]] for rank in ranks]
        assert torch.equal(results[0][0], results[1][0])
        assert_close(results[0][0], oracle.loss, 1e-6, "loss")
        assert_close(torch.cat([r[1] for r in results]), oracle.features_grad, 1e-10, "feature gradient")
        rows = dense_rows([(r[2], r[3]) for r in results], 11)
        assert_close(rows, oracle.weight_grad, 1e-10, "weight gradient")


def test_the_oracle_is_dense_and_ignores_nothing_it_should_not() -> None:
    """The oracle itself, on numbers done by hand: two classes, margin 0, scale 1."""
    loss, _ = dense_loss(
        torch.tensor([[2.0, 0.0], [0.0, 3.0]]),
        torch.tensor([[1.0, 0.0], [0.0, 5.0]]),
        torch.tensor([0, 0]),
        hp.ArcFace(scale=1.0, margin=0.0),
    )
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2, rel=1e-6)
