"""clip_grad_norm_: sharded norms are summed, replicated ones counted once, as torch does on the dense model."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from tests.head.cases import MARGINS, assert_close, dense_rows, errors_of
from tests.ranks import run_threads

CLASSES, EMBEDDING = 11, 4
Gradients = dict[str, Tensor]


def _gradients(scale: float = 1.0) -> Gradients:
    draw = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (3, 5), "0.bias": (3,), "weight": (CLASSES, EMBEDDING), "bias": (CLASSES,)}
    return {n: torch.randn(*s, dtype=torch.float64, generator=draw) * scale for n, s in shapes.items()}


def _parameters(group: Any, gradients: Gradients, margin: Any) -> tuple[nn.Module, Any, Tensor]:
    backbone = nn.Sequential(nn.Linear(5, 3)).double()
    head = hp.ShardedClassifier(EMBEDDING, CLASSES, margin=margin, dtype=torch.float64, rule="striped", group=group)
    ids = head.layout.class_ids(group.rank)
    for name, parameter in backbone.named_parameters():
        parameter.grad = gradients[name].clone()
    for name, parameter in head.named_parameters():
        parameter.grad = gradients[name][ids].clone()
    return backbone, head, ids


def _clip(group: Any, gradients: Gradients, margin: Any, max_norm: float, norm_type: float) -> Any:
    backbone, head, ids = _parameters(group, gradients, margin)
    total = hp.clip_grad_norm_([*backbone.parameters(), *head.parameters()], max_norm, norm_type)
    return total, ids, {n: p.grad for n, p in (*backbone.named_parameters(), *head.named_parameters())}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_clipped_gradients_equal_torch_on_the_dense_model(
    max_norm: float, norm_type: float, ranks: int
) -> None:
    for margin in (MARGINS["softmax-bias"], MARGINS["arcface"]):
        gradients = _gradients()
        dense = {n: nn.Parameter(torch.zeros_like(g)) for n, g in gradients.items()}
        if margin is MARGINS["arcface"]:
            del dense["bias"]
        for name, parameter in dense.items():
            parameter.grad = gradients[name].clone()
        expected = nn.utils.clip_grad_norm_(dense.values(), max_norm, norm_type)
        results = run_threads(ranks, _clip, gradients, margin, max_norm, norm_type)
        for total, _, clipped in results:
            assert_close(total, expected, 1e-12, "total norm")
            assert torch.equal(total, results[0][0]), "the norm differs between ranks"
            for name in ("0.weight", "0.bias"):
                assert_close(clipped[name], dense[name].grad, 1e-12, name)  # type: ignore[arg-type]
        for name in dense.keys() - {"0.weight", "0.bias"}:
            rows = dense_rows([(ids, clipped[name]) for _, ids, clipped in results], CLASSES)
            assert_close(rows, dense[name].grad, 1e-12, name)  # type: ignore[arg-type]


def test_a_norm_below_the_limit_leaves_the_bits_alone() -> None:
    gradients = _gradients()
    for _, ids, clipped in run_threads(3, _clip, gradients, MARGINS["softmax-bias"], 1e6, 2.0):
        assert torch.equal(clipped["weight"], gradients["weight"][ids])
        assert torch.equal(clipped["0.weight"], gradients["0.weight"])


def test_backbone_alone_head_alone_one_tensor_and_a_generator() -> None:
    gradients = _gradients()
    whole = {n: torch.linalg.vector_norm(g) for n, g in gradients.items()}

    def work(group: Any) -> Any:
        backbone, head, _ = _parameters(group, gradients, MARGINS["softmax-bias"])
        return [
            hp.clip_grad_norm_(backbone.parameters(), 1e9),
            hp.clip_grad_norm_(head.parameters(), 1e9),
            hp.clip_grad_norm_(head.weight, 1e9),
            hp.clip_grad_norm_((p for p in [backbone[0].bias, head.bias]), 1e9),
        ]

    for backbone, head, weight, biases in run_threads(3, work):
        assert backbone.item() == pytest.approx(math.hypot(whole["0.weight"], whole["0.bias"]), rel=1e-12)
        assert head.item() == pytest.approx(math.hypot(whole["weight"], whole["bias"]), rel=1e-12)
        assert weight.item() == pytest.approx(whole["weight"].item(), rel=1e-12)
        assert biases.item() == pytest.approx(math.hypot(whole["0.bias"], whole["bias"]), rel=1e-12)


def test_a_rank_whose_shard_has_no_gradient_still_takes_part() -> None:
    gradients = _gradients()

    def work(group: Any) -> Any:
        backbone, head, ids = _parameters(group, gradients, MARGINS["softmax-bias"])
        if group.rank == 1:
            head.weight.grad = None
        return hp.clip_grad_norm_([*backbone.parameters(), *head.parameters()], 0.1), ids

    results = run_threads(2, work)
    kept = {**gradients, "weight": gradients["weight"][results[0][1]]}
    expected = math.sqrt(sum(g.square().sum().item() for g in kept.values()))
    for total, _ in results:
        assert total.item() == pytest.approx(expected, rel=1e-12)


def test_two_heads_on_one_group_are_both_counted() -> None:
    gradients = _gradients()

    def work(group: Any) -> Any:
        _, one, _ = _parameters(group, gradients, MARGINS["softmax-bias"])
        _, two, _ = _parameters(group, gradients, MARGINS["cosface"])
        return hp.clip_grad_norm_([one.weight, two.weight, one.bias], 1.0)

    squares = {n: g.square().sum().item() for n, g in gradients.items()}
    for total in run_threads(3, work):
        assert total.item() == pytest.approx(math.sqrt(2 * squares["weight"] + squares["bias"]), rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("where", "rank"), [("weight", 1), ("bias", 2), ("0.bias", 0)])
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(where: str, rank: int, value: float) -> None:
    gradients = _gradients()

    def work(group: Any, refuse: bool) -> Any:
        backbone, head, _ = _parameters(group, gradients, MARGINS["softmax-bias"])
        if group.rank == rank or where.startswith("0."):
            name = where.removeprefix("0.")
            target = getattr(backbone[0] if where.startswith("0.") else head, name)
            target.grad.reshape(-1)[0] = value
        parameters = [*backbone.parameters(), *head.parameters()]
        return hp.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=refuse)

    for error in errors_of(3, work, True):
        assert isinstance(error, hp.NonFiniteError), error
        assert str(rank) in str(error)
        index = {"0.bias": 1, "weight": 2, "bias": 3}[where]
        assert _names(error, where.removeprefix("0.")) or _names(error, str(index)), error
    for total in run_threads(3, work, False):
        assert not math.isfinite(total.item())


def _names(error: Exception, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", str(error)) is not None


def test_no_parameters_and_no_gradients_have_norm_zero() -> None:
    def work(group: Any) -> Any:
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, group=group)
        return hp.clip_grad_norm_([], 1.0), hp.clip_grad_norm_(head.parameters(), 1.0)

    for none, empty in run_threads(2, work):
        assert none == 0 and empty == 0


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -2.0)])
def test_limits_without_a_meaning_are_refused(max_norm: float, norm_type: float) -> None:
    def work(group: Any) -> Any:
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, group=group)
        hp.clip_grad_norm_(head.parameters(), max_norm, norm_type)

    assert all(type(error) is ValueError for error in errors_of(2, work))


def test_float32_and_bfloat16_gradients_are_summed_in_at_least_float32() -> None:
    def work(group: Any) -> Any:
        parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
        parameter.grad = torch.full_like(parameter, 0.25)
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, group=group)
        head.weight.grad = torch.zeros_like(head.weight)
        return hp.clip_grad_norm_([parameter, head.weight], 1e9)

    for total in run_threads(2, work):
        assert float(total) == pytest.approx(0.25 * math.sqrt(100_000), rel=1e-3)
