"""The oracle: plain, dense, one-process softmax losses that the sharded head must equal.

Everything here is written from the definitions: full [B, K] logits, autograd through every step that the
definition differentiates, `detach` where it says that no gradient flows. Nothing of `hybridpar` is called; a margin is
read by its class name and its public fields. The target angle comes from sine and cosine through `atan2`, which keeps
all digits near 0 and pi, where an arc cosine loses half of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INITIAL_STATE = {"AdaFace": (20.0, 100.0), "CurricularFace": (0.0,)}


def initial_state(margin: Any, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """The state before the first step: AdaFace (mean, std), CurricularFace (t,), other margins None."""
    values = INITIAL_STATE.get(type(margin).__name__)
    return None if values is None else torch.tensor(values, dtype=dtype)


def dense_loss(
    features: Tensor,
    weight: Tensor,
    labels: Tensor,
    margin: Any,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    training: bool = True,
    ignore_index: int = -1,
) -> tuple[Tensor, Tensor | None]:
    """Mean loss over the labels of [B] that are not ignored, and the margin's state after this step.

    features [B, D] and weight [K, D] (and bias [K]) may require a gradient; float32 or float64.
    """
    valid = labels != ignore_index
    if state is None:
        state = initial_state(margin, features.dtype)
    if not bool(valid.any()):
        return features.sum() * 0.0 + weight.sum() * 0.0, state
    samples_BD, labels_B = features[valid], labels[valid]
    if type(margin).__name__ == "Softmax":
        logits_BK = samples_BD @ weight.T
        return F.cross_entropy(logits_BK if bias is None else logits_BK + bias, labels_B), None

    unit_BD, rows_KD = F.normalize(samples_BD, dim=1), F.normalize(weight, dim=1)
    cosine_BK = unit_BD @ rows_KD.T
    own_BD = rows_KD[labels_B]
    cosine_B = (unit_BD * own_BD).sum(dim=1)
    sine_B = torch.linalg.vector_norm(own_BD - cosine_B.unsqueeze(1) * unit_BD, dim=1)
    # A zero vector has no direction; its cosine is 0 by definition, and the angle is that of the cosine.
    is_zero_B = (own_BD == 0).all(dim=1) | (unit_BD == 0).all(dim=1)
    flat_B = torch.acos(torch.where(is_zero_B, cosine_B, 0.0))
    theta_B = torch.where(is_zero_B, flat_B, torch.atan2(torch.where(is_zero_B, 1.0, sine_B), cosine_B))
    norm_B = torch.linalg.vector_norm(samples_BD, dim=1)

    if state is not None and training:
        state = _next_state(margin, state, norm_B.detach(), cosine_B.detach())
    target_B = _TARGETS[type(margin).__name__](margin, theta_B, norm_B, state)
    negative_BK = cosine_BK
    if type(margin).__name__ == "CurricularFace":
        assert state is not None
        hard_BK = (cosine_BK > torch.cos(theta_B + margin.margin).unsqueeze(1)).detach()
        negative_BK = torch.where(hard_BK, cosine_BK * (state[0] + cosine_BK), cosine_BK)
    is_target_BK = F.one_hot(labels_B, weight.shape[0]).bool()
    logits_BK = margin.scale * torch.where(is_target_BK, target_B.unsqueeze(1), negative_BK)
    loss = F.cross_entropy(logits_BK, labels_B)
    if type(margin).__name__ == "MagFace":
        clipped_B = norm_B.clamp(margin.l_a, margin.u_a)
        loss = loss + margin.lambda_g * (clipped_B / margin.u_a**2 + 1.0 / clipped_B).mean()
    return loss, state


def dense_scores(features: Tensor, weight: Tensor, margin: Any, bias: Tensor | None = None) -> Tensor:
    """What `predict` ranks, [B, K]: cosines for the normalised margins, logits for Softmax."""
    if type(margin).__name__ == "Softmax":
        logits_BK = features @ weight.T
        return logits_BK if bias is None else logits_BK + bias
    return F.normalize(features, dim=1) @ F.normalize(weight, dim=1).T


def _next_state(margin: Any, state: Tensor, norm_B: Tensor, cosine_B: Tensor) -> Tensor:
    if type(margin).__name__ == "CurricularFace":
        return margin.momentum * cosine_B.mean().reshape(1) + (1.0 - margin.momentum) * state
    if len(norm_B) < 2:
        return state
    safe_B = norm_B.clamp(0.001, 100.0)
    batch = torch.stack([safe_B.mean(), safe_B.std()])
    return margin.t_alpha * batch + (1.0 - margin.t_alpha) * state


def _arcface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    m = margin.margin
    if margin.easy_margin:
        return torch.where(theta_B < math.pi / 2, torch.cos(theta_B + m), torch.cos(theta_B))
    return _continued(theta_B, m)


def _continued(theta_B: Tensor, m: float | Tensor) -> Tensor:
    """cos(theta + m), and beyond theta + m = pi the falling continuation cos(theta) - m sin(m)."""
    sine = torch.sin(m) if isinstance(m, Tensor) else math.sin(m)
    return torch.where(theta_B + m <= math.pi, torch.cos(theta_B + m), torch.cos(theta_B) - m * sine)


def _cosface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    return torch.cos(theta_B) - margin.margin


def _staircase(phi_B: Tensor) -> Tensor:
    """(-1)^k cos(phi) - 2k with k = floor(phi / pi): the falling continuation of a multiplied angle."""
    k_B = torch.div(phi_B.detach(), math.pi, rounding_mode="floor")
    return torch.cos(math.pi * k_B) * torch.cos(phi_B) - 2.0 * k_B


def _sphereface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    return _staircase(margin.margin * theta_B)


def _combined(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    if margin.m1 == 1.0:
        return _continued(theta_B, margin.m2) - margin.m3
    return _staircase(margin.m1 * theta_B + margin.m2) - margin.m3


def _adaface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    assert state is not None
    safe_B = norm_B.detach().clamp(0.001, 100.0)
    z_B = (margin.h * (safe_B - state[0]) / (state[1] + 1e-3)).clamp(-1.0, 1.0)
    angle_B = (theta_B - margin.margin * z_B).clamp(1e-3, math.pi - 1e-3)
    return torch.cos(angle_B) - margin.margin * (z_B + 1.0)


def _curricularface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    return _continued(theta_B, margin.margin)


def _magface(margin: Any, theta_B: Tensor, norm_B: Tensor, state: Tensor | None) -> Tensor:
    share_B = (norm_B.clamp(margin.l_a, margin.u_a) - margin.l_a) / (margin.u_a - margin.l_a)
    return _continued(theta_B, margin.l_m + share_B * (margin.u_m - margin.l_m))


_TARGETS: dict[str, Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]] = {
    "ArcFace": _arcface,
    "CosFace": _cosface,
    "SphereFace": _sphereface,
    "CombinedMargin": _combined,
    "AdaFace": _adaface,
    "CurricularFace": _curricularface,
    "MagFace": _magface,
}
