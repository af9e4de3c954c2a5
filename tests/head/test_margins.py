"""Every margin, on 1 to 4 ranks, against the dense oracle, against hand-written values, and against differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.head.cases import MARGINS, Case, assert_close, check, make_head, set_rows
from tests.ranks import run_threads

NORMALISED = [name for name in MARGINS if not name.startswith("softmax")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MARGINS)
def test_loss_gradients_and_state_equal_the_dense_oracle_in_float64(name: str, ranks: int) -> None:
    for seed, (classes, chunk) in enumerate([(10, None), (23, 3)]):
        check(Case(ranks, classes, MARGINS[name], chunk=chunk, seed=seed))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", MARGINS)
def test_loss_gradients_and_state_equal_the_dense_oracle_in_float32(name: str, ranks: int) -> None:
    check(Case(ranks, 23, MARGINS[name], chunk=4, dtype=torch.float32, seed=5))


# One sample and two classes: the own row at the angle theta, the other at a right angle to the sample. The loss is then
# log(1 + exp(-scale v)), from which the target value v can be read back.


def _at_angle(theta: float, norm: float) -> tuple[Tensor, Tensor]:
    feature = torch.tensor([[norm, 0.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([[3 * math.cos(theta), 3 * math.sin(theta), 0.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    return feature, weight


def _loss(margin: Any, theta: float, norm: float, state: list[float] | None = None) -> tuple[float, Tensor, Tensor]:
    """Loss, feature gradient and weight gradient of the one-sample problem."""
    feature, weight = _at_angle(theta, norm)
    group = hp.Group.alone()
    head = make_head(group, Case(1, 2, margin, embedding=3)).eval()
    set_rows(head, group, weight)
    if state is not None:
        head.margin_state.copy_(torch.tensor(state, dtype=torch.float64).reshape(head.margin_state.shape))
    feature.requires_grad_()
    loss = head(feature, torch.tensor([0]))
    loss.backward()
    assert feature.grad is not None
    return loss.item(), feature.grad, head.weight.grad


def _value(margin: Any, theta: float, norm: float = 20.0, state: list[float] | None = None) -> float:
    return -math.log(math.expm1(_loss(margin, theta, norm, state)[0])) / margin.scale


ANGLES = [1e-3, 0.05, 0.5, 1.0, math.pi / 2 - 1e-3, math.pi / 2 + 1e-3, 2.0, 2.6, 2.66, 3.0, math.pi - 1e-3]


def _staircase(phi: float) -> float:
    k = math.floor(phi / math.pi)
    return (-1) ** k * math.cos(phi) - 2 * k


def _continued(theta: float, m: float) -> float:
    return math.cos(theta + m) if theta <= math.pi - m else math.cos(theta) - m * math.sin(math.pi - m)


def _adaptive(theta: float) -> float:
    z = max(-1.0, min(1.0, 0.333 * (20.0 - 15.0) / (4.0 + 1e-3)))
    return math.cos(min(max(theta - 0.4 * z, 1e-3), math.pi - 1e-3)) - (0.4 * z + 0.4)


def _magnitude(theta: float) -> float:
    return _continued(theta, (0.8 - 0.45) / 100.0 * (20.0 - 10.0) + 0.45)


HAND_WRITTEN: dict[str, tuple[Any, Callable[[float], float], list[float] | None]] = {
    "arcface": (hp.ArcFace(scale=2.0, margin=0.5), lambda t: _continued(t, 0.5), None),
    "arcface-easy": (
        hp.ArcFace(scale=2.0, margin=0.5, easy_margin=True),
        lambda t: math.cos(t + 0.5) if math.cos(t) > 0 else math.cos(t),
        None,
    ),
    "cosface": (hp.CosFace(scale=2.0, margin=0.35), lambda t: math.cos(t) - 0.35, None),
    "sphereface": (hp.SphereFace(scale=2.0, margin=1.35), lambda t: _staircase(1.35 * t), None),
    "sphereface-4": (hp.SphereFace(scale=1.0, margin=4.0), lambda t: _staircase(4 * t), None),
    "combined": (hp.CombinedMargin(scale=2.0, m1=1.0, m2=0.3, m3=0.2), lambda t: _continued(t, 0.3) - 0.2, None),
    "combined-m1": (
        hp.CombinedMargin(scale=2.0, m1=1.4, m2=0.3, m3=0.2),
        lambda t: _staircase(1.4 * t + 0.3) - 0.2,
        None,
    ),
    "adaface": (hp.AdaFace(scale=2.0, margin=0.4, h=0.333), _adaptive, [15.0, 4.0]),
    "curricularface": (hp.CurricularFace(scale=2.0, margin=0.5), lambda t: _continued(t, 0.5), [0.0]),
    "magface": (hp.MagFace(scale=2.0, lambda_g=0.0), _magnitude, None),
}


@pytest.mark.parametrize("theta", ANGLES)
@pytest.mark.parametrize("name", [name for name in HAND_WRITTEN if name != "curricularface"])
def test_the_target_value_is_the_formula_at_every_angle(name: str, theta: float) -> None:
    margin, formula, state = HAND_WRITTEN[name]
    assert _value(margin, theta, state=state) == pytest.approx(formula(theta), abs=1e-11)


@pytest.mark.parametrize("t", [0.0, 0.3])
@pytest.mark.parametrize("theta", ANGLES)
def test_curricularface_raises_the_negatives_that_beat_the_target(theta: float, t: float) -> None:
    margin = hp.CurricularFace(scale=2.0, margin=0.5)
    other = 0.6
    feature = torch.tensor([[7.0, 0.0, 0.0]], dtype=torch.float64)
    rows = [[math.cos(theta), math.sin(theta), 0.0], [other, 0.0, math.sqrt(1 - other**2)]]
    group = hp.Group.alone()
    head = make_head(group, Case(1, 2, margin, embedding=3)).eval()
    set_rows(head, group, torch.tensor(rows, dtype=torch.float64))
    head.margin_state.fill_(t)
    loss = head(feature, torch.tensor([0])).item()
    negative = other * (t + other) if other > math.cos(theta + 0.5) else other
    expected = math.log1p(math.exp(2.0 * (negative - _continued(theta, 0.5))))
    assert loss == pytest.approx(expected, rel=1e-11)


# Angles away from each margin's kinks, near 0 and near pi included.
SMOOTH_ANGLES = [2e-3, 0.05, 0.4, 1.0, 1.4, 1.7, 2.0, 2.5, 2.9, 3.1, math.pi - 2e-3]


@pytest.mark.parametrize("name", NORMALISED)
def test_the_gradient_is_the_true_derivative_by_central_differences(name: str) -> None:
    """Turning the sample by d changes the loss by gradient . d: the margin's derivative is not left out."""
    margin = MARGINS[name]
    state = {"AdaFace": [15.0, 4.0], "CurricularFace": [0.2]}.get(type(margin).__name__)
    step = 1e-6
    for theta in SMOOTH_ANGLES:
        _, feature_grad, weight_grad = _loss(margin, theta, 20.0, state)
        slope = (_loss(margin, theta + step, 20.0, state)[0] - _loss(margin, theta - step, 20.0, state)[0]) / (2 * step)
        # The own row moves along its tangent when theta grows, the sample against it.
        tangent = torch.tensor([-math.sin(theta), math.cos(theta), 0.0], dtype=torch.float64)
        bound = 1e-6 * max(1.0, margin.scale)
        assert (weight_grad[0] @ tangent).item() * 3 == pytest.approx(slope, abs=bound), theta
        assert -feature_grad[0, 1].item() * 20 == pytest.approx(slope, abs=bound), theta


@pytest.mark.parametrize("norm", [0.5, 12.0, 25.0, 109.0, 300.0])
def test_magface_differentiates_through_the_norm(norm: float) -> None:
    margin = hp.MagFace(scale=4.0)
    step = 1e-5 * norm
    for theta in (0.3, 1.5, 2.9):
        _, feature_grad, _ = _loss(margin, theta, norm)
        slope = (_loss(margin, theta, norm + step)[0] - _loss(margin, theta, norm - step)[0]) / (2 * step)
        assert feature_grad[0, 0].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)
        if norm in (0.5, 300.0):
            assert abs(slope) < 1e-9
        else:
            assert abs(slope) > 1e-6


def test_magface_adds_the_norm_term_once_for_the_global_batch() -> None:
    for ranks in (1, 3):
        check(Case(ranks, 9, hp.MagFace(scale=4.0, lambda_g=350.0), seed=8))
        check(Case(ranks, 9, hp.MagFace(scale=4.0, lambda_g=0.0), seed=8))


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sample_exactly_on_or_against_its_row_stays_finite(name: str, sign: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 8, dtype=dtype, generator=draw)
    features = (sign * 9.0 * weight[:3]).requires_grad_()
    group = hp.Group.alone()
    head = make_head(group, Case(1, 5, MARGINS[name], embedding=8, dtype=dtype))
    set_rows(head, group, weight)
    loss = head(features, torch.tensor([0, 1, 2]))
    loss.backward()
    assert torch.isfinite(loss)
    assert features.grad is not None
    for grad in (features.grad, head.weight.grad):
        assert torch.isfinite(grad).all()
        # |dv/dtheta| is at most 4, two logits per sample move, and nothing divides by sin(theta) ~ 0.
        bound = MARGINS[name].scale * 10 / features.detach().norm(dim=1).min().clamp(max=1.0)
        bound = bound + getattr(MARGINS[name], "lambda_g", 0.0)
        assert grad.abs().max() < bound


@pytest.mark.parametrize("name", ["arcface-small-scale", "cosface", "magface", "adaface"])
def test_a_zero_feature_and_a_zero_row_follow_normalize(name: str) -> None:
    """x / max(|x|, 1e-12): the loss is finite, and its gradient is that of F.normalize."""
    margin = MARGINS[name]
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=draw)
    weight[2] = 0
    features = torch.randn(3, 4, dtype=torch.float64, generator=draw)
    features[1] = 0
    labels = torch.tensor([0, 3, 2])
    group = hp.Group.alone()
    head = make_head(group, Case(1, 6, margin, embedding=4))
    set_rows(head, group, weight)
    mine, dense = features.clone().requires_grad_(), features.clone().requires_grad_()
    rows = weight.clone().requires_grad_()
    loss = head(mine, labels)
    expected, _ = dense_loss(dense, rows, labels, margin, state=initial_state(margin))
    assert_close(loss, expected, 1e-10, "loss")
    loss.backward()
    expected.backward()
    assert mine.grad is not None and dense.grad is not None and rows.grad is not None
    assert_close(mine.grad, dense.grad, 1e-10, "feature gradient")
    assert_close(head.weight.grad, rows.grad, 1e-10, "weight gradient")
    # The zero vectors' gradients are 1e12 times larger: look at the others apart.
    assert_close(mine.grad[[0, 2]], dense.grad[[0, 2]], 1e-10, "feature gradient of the others")
    others = [0, 1, 3, 4, 5]
    assert_close(head.weight.grad[others], rows.grad[others], 1e-10, "weight gradient of the others")


def _steps(group: Any, margin: Any, training: bool) -> Any:
    head = make_head(group, Case(group.size, 7, margin, embedding=4, dtype=torch.float64)).train(training)
    draw = torch.Generator().manual_seed(group.rank)
    for _ in range(3):
        head(torch.randn(3, 4, dtype=torch.float64, generator=draw) * 30, torch.tensor([0, 6, 3]))
    return head.margin_state.clone().reshape(-1)


@pytest.mark.parametrize("name", ["adaface-quick", "curricularface-quick"])
def test_the_state_stands_still_in_eval_mode_and_moves_in_training(name: str) -> None:
    start = initial_state(MARGINS[name])
    assert start is not None
    for state in run_threads(2, _steps, MARGINS[name], False):
        assert torch.equal(state.double(), start)
    for state in run_threads(2, _steps, MARGINS[name], True):
        assert not torch.equal(state.double(), start)


@pytest.mark.parametrize("sizes", [((1, 0), (0, 0), (1, 1)), ((0, 2), (1, 0), (0, 0))])
@pytest.mark.parametrize("name", ["adaface-quick", "curricularface-quick", "magface"])
def test_steps_with_one_sample_or_none_keep_the_state_right(name: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    check(Case(2, 7, MARGINS[name], sizes=sizes, ignored_share=0.0, seed=2))


@pytest.mark.parametrize("name", ["adaface-quick", "curricularface-quick"])
def test_the_state_is_saved_and_loaded_with_the_head(name: str) -> None:
    group = hp.Group.alone()
    head = make_head(group, Case(1, 7, MARGINS[name], embedding=4))
    head(torch.randn(5, 4, dtype=torch.float64) * 9, torch.arange(5))
    other = make_head(group, Case(1, 7, MARGINS[name], embedding=4))
    assert not torch.equal(other.margin_state, head.margin_state)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.margin_state, head.margin_state)


def test_the_state_of_a_float32_head_does_not_drift() -> None:
    """100 steps of a moving mean, in a float32 head, still equal the oracle to 1e-5."""
    check(Case(2, 7, hp.AdaFace(t_alpha=0.01), sizes=((2, 3),) * 100, dtype=torch.float32, ignored_share=0.1))


@pytest.mark.parametrize("name", MARGINS)
def test_margins_are_frozen_values(name: str) -> None:
    margin = MARGINS[name]
    values = {field.name: getattr(margin, field.name) for field in fields(margin)}
    with pytest.raises(FrozenInstanceError):
        margin.scale = 1
    assert margin == type(margin)(**values)
    assert len({margin, type(margin)(**values)}) == 1
