"""Margins: what the logit of a sample's own class becomes, with its true derivative.

A margin is a frozen policy. It works in units of ``scale``: the logit is ``scale * value``. What a margin must
remember from step to step (AdaFace, CurricularFace) is a small tensor that the head keeps and passes in.
theta is the angle between a feature and the row of its own class, c = cos(theta).

Shapes: B global batch, C classes of a chunk. All tensors are float32 or float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class TargetLogit(NamedTuple):
    """Value [B] of the target logit and its derivatives [B] by the cosine and by the feature norm (None: zero)."""

    value: Tensor
    by_cosine: Tensor
    by_norm: Tensor | None = None


@dataclass(frozen=True)
class Margin(ABC):
    """Base of all margins.

    Attributes:
        scale: factor of every logit, at least 0.
        normalized: whether features and rows are brought to unit length, so that products are cosines.
        uses_norms: whether the target logit depends on feature norms.
        needs_target_first: whether targets of the whole batch must be known before the other logits.
        changes_negatives: whether ``negatives_`` does anything.
        has_bias: whether each class has a bias.
    """

    scale: float = 64.0

    normalized: ClassVar[bool] = True
    uses_norms: ClassVar[bool] = False
    needs_target_first: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{type(self).__name__}.{field.name}: expected a finite number >= 0, got {value}")

    @property
    def has_bias(self) -> bool:
        return False

    @abstractmethod
    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        """The logit of each sample's own class, in units of ``scale``."""

    def negatives_(self, cosines_BC: Tensor, target_B: Tensor, state: Tensor) -> Tensor | None:
        """Change the other classes' cosines in place; return their derivatives [B, C], or None where all are 1."""
        return None

    @property
    def changes_negatives(self) -> bool:
        return type(self).negatives_ is not Margin.negatives_

    def initial_state(self) -> tuple[float, ...]:
        """What is remembered before the first step."""
        return ()

    def next_state(self, state: Tensor, target_B: Tensor | None, norms_B: Tensor | None) -> Tensor:
        """What is remembered after one global training batch, and used from that batch on.

        Args:
            target_B: target cosines of the not ignored samples, where ``needs_target_first``.
            norms_B: their feature norms, where ``uses_norms``.
        """
        return state

    def penalty(self, norms_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """A term [B] added to each sample's loss, and its derivative [B] by the feature norm."""
        return None


def _check_radians(name: str, margin: float) -> None:
    if margin >= math.pi:
        raise ValueError(f"{name}: expected radians below pi, got {margin}; 0.5 radians are 28.6 degrees")


def _sine(cosine: Tensor) -> Tensor:
    return (1 - cosine * cosine).clamp(min=0).sqrt()


def _over_sine(value: Tensor, cosine: Tensor) -> Tensor:
    """value / sin(theta). The pole at theta = 0, which the projection onto the sphere cancels, is cut off."""
    smallest = 1e-8 if cosine.dtype == torch.float64 else 1e-4
    return value / _sine(cosine).clamp(min=smallest)


def _angular(cosine: Tensor, margin: Tensor | float, continuation: bool = True) -> TargetLogit:
    """cos(theta + margin) while theta + margin <= pi, then c - margin * sin(margin); derivative by the margin last."""
    margin = torch.as_tensor(margin, dtype=cosine.dtype, device=cosine.device)
    cos_m, sin_m, sin_t = margin.cos(), margin.sin(), _sine(cosine)
    value = cosine * cos_m - sin_t * sin_m
    by_cosine = cos_m + _over_sine(sin_m * cosine, cosine)
    by_margin = -(sin_t * cos_m + cosine * sin_m)
    if continuation:
        beyond = cosine < -cos_m
        value = torch.where(beyond, cosine - margin * sin_m, value)
        by_cosine = torch.where(beyond, 1.0, by_cosine)
        by_margin = torch.where(beyond, -sin_m - margin * cos_m, by_margin)
    return TargetLogit(value, by_cosine, by_margin)


def _multiple_angle(cosine: Tensor, m1: float, m2: float) -> TargetLogit:
    """(-1)^k cos(phi) - 2k with phi = m1 theta + m2 and k = floor(phi / pi): falls monotonically in theta."""
    theta = torch.atan2(_sine(cosine), cosine)
    phi = m1 * theta + m2
    turns = torch.floor(phi / math.pi)
    sign = 1 - 2 * torch.remainder(turns, 2)
    return TargetLogit(sign * phi.cos() - 2 * turns, _over_sine(sign * m1 * phi.sin(), cosine))


@dataclass(frozen=True)
class Softmax(Margin):
    """Linear softmax: logit = x . w + b, nothing normalised, no margin.

    Args:
        bias: whether each class has a bias.
    """

    scale: float = 1.0
    bias: bool = True

    normalized: ClassVar[bool] = False

    @property
    def has_bias(self) -> bool:
        return self.bias

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        return TargetLogit(cosine_B, torch.ones_like(cosine_B))


@dataclass(frozen=True)
class ArcFace(Margin):
    """cos(theta + margin), Deng et al. 2019, continued as c - margin * sin(pi - margin) beyond theta + margin = pi.

    Args:
        margin: radians, in [0, pi).
        easy_margin: apply the margin only where theta < pi/2, and none elsewhere.
    """

    margin: float = 0.5
    easy_margin: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_radians("ArcFace.margin", self.margin)

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        if not self.easy_margin:
            return _angular(cosine_B, self.margin)._replace(by_norm=None)
        value, by_cosine, _ = _angular(cosine_B, self.margin, continuation=False)
        easy = cosine_B > 0
        return TargetLogit(torch.where(easy, value, cosine_B), torch.where(easy, by_cosine, 1.0))


@dataclass(frozen=True)
class CosFace(Margin):
    """c - margin, Wang et al. 2018."""

    margin: float = 0.35

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        return TargetLogit(cosine_B - self.margin, torch.ones_like(cosine_B))


@dataclass(frozen=True)
class SphereFace(Margin):
    """(-1)^k cos(margin * theta) - 2k, k = floor(margin * theta / pi), Liu et al. 2017, with normalised features.

    Args:
        margin: factor of the angle, at least 1.
    """

    margin: float = 1.35

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin < 1:
            raise ValueError(f"SphereFace multiplies the angle: expected margin >= 1, got {self.margin}")

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        return _multiple_angle(cosine_B, self.margin, 0.0)


@dataclass(frozen=True)
class CombinedMargin(Margin):
    """cos(m1 * theta + m2) - m3 (Deng et al. 2019, equation 4): all three margins act together.

    With m1 = 1 it is continued beyond pi as ArcFace is, otherwise as SphereFace is.
    """

    m1: float = 1.0
    m2: float = 0.3
    m3: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m1 == 0:
            raise ValueError("CombinedMargin.m1 multiplies the angle: expected m1 > 0, got 0")

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        if self.m1 == 1.0:
            value, by_cosine, _ = _angular(cosine_B, self.m2)
        else:
            value, by_cosine, _ = _multiple_angle(cosine_B, self.m1, self.m2)
        return TargetLogit(value - self.m3, by_cosine)


@dataclass(frozen=True)
class AdaFace(Margin):
    """Margins that adapt to the quality of an image, read off its feature norm; Kim et al. 2022.

    With z = clip(h * (norm - mean) / (std + 1e-3), -1, 1), of norms clipped to [1e-3, 100] and running mean and
    standard deviation: cos(clip(theta - margin * z, 1e-3, pi - 1e-3)) - (margin * z + margin). As in the paper no
    gradient flows through the norms.

    Args:
        margin: the paper's m.
        h: concentration of z.
        t_alpha: weight of a new batch in the running statistics.
    """

    margin: float = 0.4
    h: float = 0.333
    t_alpha: float = 0.01

    uses_norms: ClassVar[bool] = True
    _smallest_angle: ClassVar[float] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.t_alpha > 1:
            raise ValueError(f"AdaFace.t_alpha is a share: expected at most 1, got {self.t_alpha}")

    def initial_state(self) -> tuple[float, ...]:
        return (20.0, 100.0)

    def next_state(self, state: Tensor, target_B: Tensor | None, norms_B: Tensor | None) -> Tensor:
        assert norms_B is not None
        if len(norms_B) < 2:
            return state
        norms = norms_B.clamp(1e-3, 100.0)
        return torch.lerp(state, torch.stack([norms.mean(), norms.std()]).to(state.dtype), self.t_alpha)

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        assert norms_B is not None
        mean, std = state.to(cosine_B.dtype)
        quality = (self.h * (norms_B.clamp(1e-3, 100.0) - mean) / (std + 1e-3)).clamp(-1.0, 1.0)
        wanted = torch.atan2(_sine(cosine_B), cosine_B) - self.margin * quality
        angle = wanted.clamp(self._smallest_angle, math.pi - self._smallest_angle)
        by_cosine = torch.where(angle == wanted, _over_sine(angle.sin(), cosine_B), 0.0)
        return TargetLogit(angle.cos() - self.margin * (quality + 1.0), by_cosine)


@dataclass(frozen=True)
class CurricularFace(Margin):
    """ArcFace whose hard negatives count more as training goes on; Huang et al. 2020.

    A negative is hard where cos_j > cos(theta + margin), and becomes cos_j * (t + cos_j), t being the running mean of
    the target cosines. No gradient flows through t or the choice.

    Args:
        margin: radians, in [0, pi).
        momentum: weight of a new batch in t.
    """

    margin: float = 0.5
    momentum: float = 0.01

    needs_target_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum > 1:
            raise ValueError(f"CurricularFace.momentum is a share: expected at most 1, got {self.momentum}")
        _check_radians("CurricularFace.margin", self.margin)

    def initial_state(self) -> tuple[float, ...]:
        return (0.0,)

    def next_state(self, state: Tensor, target_B: Tensor | None, norms_B: Tensor | None) -> Tensor:
        assert target_B is not None
        return torch.lerp(state, target_B.mean().to(state.dtype), self.momentum) if len(target_B) else state

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        return _angular(cosine_B, self.margin)._replace(by_norm=None)

    def negatives_(self, cosines_BC: Tensor, target_B: Tensor, state: Tensor) -> Tensor | None:
        threshold_B = _angular(target_B, self.margin, continuation=False).value
        hard = cosines_BC > threshold_B[:, None]
        t = state[0].to(cosines_BC.dtype)
        slopes = torch.where(hard, t + 2 * cosines_BC, 1.0)
        cosines_BC.mul_(torch.where(hard, t + cosines_BC, 1.0))
        return slopes


@dataclass(frozen=True)
class MagFace(Margin):
    """A margin that grows with the feature norm a, and a penalty on small norms; Meng et al. 2021.

    With a clipped to [l_a, u_a]: m(a) runs linearly from l_m to u_m, the target logit is ArcFace's with margin m(a),
    and lambda_g * (1/a + a/u_a^2) is added to each sample's loss. Gradients flow through a.
    """

    l_a: float = 10.0
    u_a: float = 110.0
    l_m: float = 0.45
    u_m: float = 0.8
    lambda_g: float = 35.0

    uses_norms: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.l_a < self.u_a:
            raise ValueError(f"MagFace: expected 0 < l_a < u_a, got l_a={self.l_a}, u_a={self.u_a}")

    def _inside(self, norms_B: Tensor) -> Tensor:
        return (norms_B >= self.l_a) & (norms_B <= self.u_a)

    def target(self, cosine_B: Tensor, norms_B: Tensor | None, state: Tensor) -> TargetLogit:
        assert norms_B is not None
        slope = (self.u_m - self.l_m) / (self.u_a - self.l_a)
        margin_B = slope * (norms_B.clamp(self.l_a, self.u_a) - self.l_a) + self.l_m
        value, by_cosine, by_margin = _angular(cosine_B, margin_B)
        assert by_margin is not None
        return TargetLogit(value, by_cosine, slope * by_margin * self._inside(norms_B))

    def penalty(self, norms_B: Tensor) -> tuple[Tensor, Tensor] | None:
        norms = norms_B.clamp(self.l_a, self.u_a)
        slope_B = (1 / self.u_a**2 - 1 / norms**2) * self._inside(norms_B)
        return self.lambda_g * (norms / self.u_a**2 + 1 / norms), self.lambda_g * slope_B
