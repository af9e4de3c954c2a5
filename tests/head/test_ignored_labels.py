"""Ignored labels give no loss, no gradient, and do not count."""

from __future__ import annotations

import pytest
import torch

from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    Case,
    Problem,
    assert_close,
    check,
    make_problem,
    run_sharded,
)

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ignore_index", [-1, -100, 255, 2**40])
def test_ignored_labels_do_not_count(ranks: int, ignore_index: int) -> None:
    for name in ("arcface", "softmax-bias", "adaface-quick", "curricularface-quick", "magface"):
        case = Case(ranks, 8, MARGINS[name], ignored_share=0.6, head={"ignore_index": ignore_index}, chunk=3)
        check(case)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_when_all_labels_are_ignored_loss_and_gradients_are_zero(name: str, ranks: int) -> None:
    case = Case(ranks, 8, MARGINS[name], ignored_share=1.1)
    for step in run_sharded(case, make_problem(case)):
        assert step.loss == 0
        assert (step.features_grad == 0).all() and (step.weight_grad == 0).all()
        assert step.bias_grad is None or (step.bias_grad == 0).all()


def test_a_global_batch_of_no_samples_has_zero_loss() -> None:
    for name in ("arcface", "softmax-bias", "adaface-quick", "magface"):
        check(Case(2, 5, MARGINS[name], sizes=((0, 0), (1, 2), (0, 0))))


def test_ignored_samples_may_hold_huge_values() -> None:
    """An ignored sample may not leak into the loss, the state or the weight gradient, however large it is."""
    for name in ("softmax-bias", "adaface-quick", "magface"):
        case = Case(2, 6, MARGINS[name], ignored_share=0.5, sizes=((4, 5),))
        problem = make_problem(case)
        plain = run_sharded(case, problem)
        features, labels = problem.batches[0]
        loud = torch.where((labels == -1).unsqueeze(1), features * 1e6, features)
        louder = run_sharded(case, Problem(problem.weight, problem.bias, [(loud, labels)]))
        for step, expected in zip(louder, plain, strict=True):
            assert_close(step.loss, expected.loss, 1e-12, "loss")
            assert_close(step.features_grad, expected.features_grad, 1e-12, "feature gradient")
            assert_close(step.weight_grad, expected.weight_grad, 1e-12, "weight gradient")
