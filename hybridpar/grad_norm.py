"""Gradient clipping where some parameters are sharded and others replicated."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``; as torch.nn.utils.clip_grad_norm_.

    Norms of rows that are sharded over ranks are summed over those ranks; replicated gradients, equal on all ranks,
    count once. Collective where a parameter is sharded.

    Args:
        parameters: parameters, or (name, parameter) pairs for better error messages; those without a gradient
            count as zero.
        max_norm: upper limit of the norm.
        norm_type: the p of the p-norm; may be infinity.
        error_if_nonfinite: raise instead of scaling by NaN or 0.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        ValueError: norm_type is not positive, or max_norm is negative.
        NonFiniteError: with ``error_if_nonfinite``, on every rank, naming the first such gradient and its ranks.
    """
    if not norm_type > 0 or not max_norm >= 0:
        raise ValueError(f"expected norm_type > 0 and max_norm >= 0, got {norm_type} and {max_norm}")
    named = _named(parameters)
    by_group: dict[Group | None, list[tuple[str, Tensor]]] = {None: []}
    for name, parameter in named:
        group: Group | None = getattr(parameter, "hybridpar_group", None)
        by_group.setdefault(group if group is not None and group.size > 1 else None, []).append((name, parameter))
    device = named[0][1].device if named else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group, members in by_group.items():
        part = _power_sum([parameter.grad for _, parameter in members], norm_type, device)
        if group is not None:
            group.all_reduce(part, "max" if math.isinf(norm_type) else "sum")
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        _raise_first_nonfinite(by_group)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, parameter in named:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return norm


def _named(parameters: Parameters) -> list[tuple[str, Tensor]]:
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(items)]


def _power_sum(gradients: Iterable[Tensor | None], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over all elements, in float64, or their maximum for p = infinity."""
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=_norm_dtype(gradient)).double().to(device)
        for gradient in gradients
        if gradient is not None and gradient.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.amax() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _norm_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _raise_first_nonfinite(by_group: dict[Group | None, list[tuple[str, Tensor]]]) -> None:
    """All ranks come here together, for the norm is the same on all of them."""
    for group, members in by_group.items():
        bad = [name for name, p in members if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        everyone = [bad] if group is None else group.all_gather_json(bad)
        found = [name for theirs in everyone for name in theirs]
        if found:
            ranks = tuple(rank for rank, theirs in enumerate(everyone) if found[0] in theirs)
            where = "all ranks, replicated" if group is None else "sharded"
            raise NonFiniteError(f"gradient of {found[0]}", ranks, f"{len(found)} gradients, {where}")
    raise NonFiniteError("the total gradient norm", (), "all gradients are finite, but their norm overflows")
