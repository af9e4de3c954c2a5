"""The kernels of csrc/margin_softmax.cc in plain PyTorch, where those do not serve and as their test oracle; unit rows.

Shapes: C classes of a chunk, B samples, T samples whose own class is in the chunk, n rows, D embedding size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """The logit of class c and sample b is scale * (products[c, b] * inverse_norms[c] + bias[c]).

    Attributes:
        products: [C, B], float32, float64, bfloat16 or float16.
        inverse_norms, bias: exact [C]; None for all ones, and all zeros.
    """

    products: Tensor
    inverse_norms: Tensor | None
    bias: Tensor | None
    scale: float


class Own(NamedTuple):
    """Samples whose own class is in a chunk, in ascending order of it.

    Attributes:
        classes: int64 [T], places in the chunk.
        samples: int64 [T], none twice.
        values: exact [T], what stands in their places.
    """

    classes: Tensor
    samples: Tensor
    values: Tensor


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_exponentials(chunk: Chunk, own: Own, maximum_B: Tensor, total_B: Tensor, out_CB: Tensor) -> Tensor:
    """See `hybridpar.kernels.add_exponentials`."""
    logits_CB = _logits(chunk)
    logits_CB[own.classes, own.samples] = own.values
    new_maximum_B = torch.maximum(maximum_B, logits_CB.amax(dim=0)) if len(logits_CB) else maximum_B.clone()
    rescale_B = torch.where(maximum_B == new_maximum_B, 1.0, torch.exp(maximum_B - new_maximum_B))
    logits_CB.sub_(torch.where(new_maximum_B == -torch.inf, 0.0, new_maximum_B)).exp_()
    total_B.mul_(rescale_B).add_(logits_CB.sum(dim=0))
    maximum_B.copy_(new_maximum_B)
    if chunk.inverse_norms is not None:
        logits_CB.mul_(chunk.inverse_norms[:, None])
    logits_CB[own.classes, own.samples] = 0.0
    out_CB.copy_(logits_CB)
    return rescale_B


def to_probabilities(
    chunk: Chunk,
    own: Own,
    maximum_B: Tensor,
    log_total_B: Tensor,
    counts_B: Tensor,
    out_CB: Tensor,
    sums_C: Tensor | None,
) -> None:
    """See `hybridpar.kernels.to_probabilities`."""
    values_CB = _logits(chunk)
    values_CB.sub_(maximum_B).sub_(log_total_B).exp_().mul_(counts_B)
    values_CB[own.classes, own.samples] = own.values
    out_CB.copy_(values_CB)
    if sums_C is not None:
        sums_C.copy_(values_CB.sum(dim=1))


def _logits(chunk: Chunk) -> Tensor:
    logits_CB = chunk.products.to(exact_dtype(chunk.products.dtype), copy=True)
    if chunk.inverse_norms is not None:
        logits_CB.mul_(chunk.inverse_norms[:, None])
    if chunk.bias is not None:
        logits_CB.add_(chunk.bias[:, None])
    return logits_CB.mul_(chunk.scale)


def unit_rows(rows: Tensor, eps: float = 1e-12) -> tuple[Tensor, Tensor]:
    """Rows divided by max(norm, eps), and those divisors. [n, D] -> [n, D], [n]."""
    norms = torch.linalg.vector_norm(rows, dim=1).clamp_(min=eps)
    return rows / norms[:, None], norms


def unit_rows_backward_(grad: Tensor, unit: Tensor, norms: Tensor, eps: float = 1e-12) -> Tensor:
    """In place: gradient with respect to unit rows -> gradient with respect to the rows. All [n, D], norms [n].

    d(w/|w|) = (I - u u^T)/|w|; rows shorter than eps were only divided by a constant, so nothing is projected out.
    """
    inner = torch.sum(grad * unit, dim=1).masked_fill_(norms <= eps, 0.0)
    return grad.addcmul_(unit, inner[:, None], value=-1.0).div_(norms[:, None])
