"""Compute dtypes, autocast, huge logits, and the memory of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybridpar as hp
from tests.dense import dense_loss
from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    Case,
    Problem,
    assert_close,
    check,
    local,
    make_head,
    make_problem,
    run_dense,
    run_sharded,
    set_rows,
)
from tests.ranks import run_threads


def test_bfloat16_compute_stays_within_its_rounding() -> None:
    """A cosine in bfloat16 is off by at most 3 x 2^-9 (two rounded factors, one rounded result), a logit by scale times
    that, and the loss by twice that again: log-sum-exp and target, CosFace passing both on unchanged."""
    case = Case(2, 23, hp.CosFace(scale=16.0), dtype=torch.float32, embedding=32, chunk=5, sizes=((9, 7),))
    problem = make_problem(case)
    oracle = run_dense(case, problem)[0]
    half = run_sharded(Case(**{**vars(case), "head": {"compute_dtype": torch.bfloat16}}), problem)[0]
    full = run_sharded(case, problem)[0]
    assert abs(half.loss - oracle.loss).item() <= 2 * 16 * 3 * 2**-9
    assert abs(half.loss - oracle.loss) > abs(full.loss - oracle.loss), "nothing was computed in bfloat16"
    for ours, expected in ((half.features_grad, oracle.features_grad), (half.weight_grad, oracle.weight_grad)):
        assert ours.dtype == torch.float32
        assert (ours.double() - expected).norm() <= 0.05 * expected.norm()


def _mixed(group: Any, case: Case, problem: Problem, autocast: bool, dtype: torch.dtype) -> Any:
    head = make_head(group, case)
    set_rows(head, group, problem.weight)
    features, labels = problem.batches[0]
    mine = local(features.to(torch.bfloat16).to(dtype), case.steps[0], group.rank).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = head(mine, local(labels, case.steps[0], group.rank))
        loss.backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    return loss.detach(), mine.grad, head.weight.grad


def test_autocast_means_its_dtype_for_the_products_unless_compute_dtype_says_otherwise() -> None:
    case = Case(2, 23, hp.ArcFace(), dtype=torch.float32, embedding=16)
    problem = make_problem(case)

    def run(compute_dtype: torch.dtype | None, autocast: bool) -> Any:
        chosen = Case(**{**vars(case), "head": {"compute_dtype": compute_dtype}})
        return run_threads(2, _mixed, chosen, problem, autocast, torch.float32)

    full, half = run(None, False), run(torch.bfloat16, False)
    for outside, inside in ((full, run(torch.float32, True)), (half, run(None, True))):
        for one, other in zip(outside, inside, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(full[0][0], half[0][0])


def test_bfloat16_features_of_a_mixed_precision_backbone_are_taken_as_they_are() -> None:
    case = Case(2, 23, hp.ArcFace(), dtype=torch.float32, embedding=16)
    problem = make_problem(case)
    full = run_threads(2, _mixed, case, problem, False, torch.float32)
    half = run_threads(2, _mixed, case, problem, False, torch.bfloat16)
    for one, other in zip(full, half, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])
        assert_close(other[1], one[1].to(torch.bfloat16), 2**-7, "feature gradient")


def test_large_logits_do_not_overflow() -> None:
    """Scale 3000: exp of the raw logit is infinite in float32, exp after subtracting the maximum is not."""
    check(Case(3, 23, hp.CosFace(scale=3000.0), chunk=4))
    case = Case(3, 23, hp.CosFace(scale=3000.0), dtype=torch.float32, chunk=4)
    problem = make_problem(case)
    for step, oracle in zip(run_sharded(case, problem), run_dense(case, problem), strict=True):
        assert_close(step.loss, oracle.loss, 1e-5, "loss")
        assert torch.isfinite(step.features_grad).all() and torch.isfinite(step.weight_grad).all()


def _sure_batch(spread: float) -> tuple[Case, Problem]:
    """Samples near their own rows: the smaller the spread, the nearer every probability is to 0 or 1."""
    draw = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(50, 64, dtype=torch.float64, generator=draw))
    labels = torch.randint(50, (32,), generator=draw)
    away = torch.randn(32, 64, dtype=torch.float64, generator=draw) / 8
    features = 20 * F.normalize(weight[labels] + spread * away)
    case = Case(
        2, 50, hp.CosFace(scale=32.0, margin=0.2), dtype=torch.float32, embedding=64, chunk=16, sizes=((20, 12),)
    )
    return case, Problem(weight.float(), None, [(features.float(), labels)])


def _relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("spread", [0.6, 0.8, 1.0], ids=["loss-4e-5", "loss-1e-3", "loss-3e-2"])
def test_a_sure_batch_keeps_its_small_gradient_in_float32_as_torch_does(spread: float) -> None:
    """When p is almost 1 the gradient is 1 - p: it must not drown in the rounding of p, nor of a logit of 32."""
    case, problem = _sure_batch(spread)
    oracle, ours = run_dense(case, problem)[0], run_sharded(case, problem)[0]
    features, labels = problem.batches[0]
    x, w = features.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    loss, _ = dense_loss(x, w, labels, case.margin)
    loss.backward()
    assert x.grad is not None and w.grad is not None
    torchs = max(_relative(x.grad, oracle.features_grad), _relative(w.grad, oracle.weight_grad), 1e-6)
    assert _relative(ours.loss, oracle.loss) <= 3 * max(torchs, _relative(loss.detach(), oracle.loss))
    assert _relative(ours.features_grad, oracle.features_grad) <= 3 * torchs
    assert _relative(ours.weight_grad, oracle.weight_grad) <= 3 * torchs


@pytest.mark.parametrize("spread", [0.6, 0.8, 1.0], ids=["loss-4e-5", "loss-1e-3", "loss-3e-2"])
def test_a_sure_batch_keeps_its_small_gradient_in_bfloat16(spread: float) -> None:
    """Each product may be off by bfloat16's rounding, but what is 1e-3 of its parts may not be left to cancellation."""
    case, problem = _sure_batch(spread)
    oracle = run_dense(case, problem)[0]
    ours = run_sharded(Case(**{**vars(case), "head": {"compute_dtype": torch.bfloat16}}), problem)[0]
    assert _relative(ours.weight_grad, oracle.weight_grad) <= 0.06
    assert _relative(ours.features_grad, oracle.features_grad) <= 0.06


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, list | tuple) else [out]:
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return out


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_full_logits_never_exist(name: str) -> None:
    classes, batch, embedding, chunk = 1000, 64, 4, 50
    case = Case(
        1, classes, MARGINS[name], embedding=embedding, chunk=chunk, sizes=((batch,),), head={"logits_budget": 0}
    )
    problem = make_problem(case)
    head = make_head(group := hp.Group.alone(), case)
    set_rows(head, group, problem.weight, problem.bias)
    features, labels = problem.batches[0]
    with _LargestTensor() as largest:
        loss = head(features.clone().requires_grad_(), labels)
        loss.backward()
    assert head.weight.grad is not None
    assert largest.numel >= classes * embedding, "the weight gradient was not seen"
    assert largest.numel <= max(classes * embedding, 2 * batch * chunk), "something larger than a chunk was made"
