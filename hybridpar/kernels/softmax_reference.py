"""PyTorch references of the class-chunk kernels: a softmax over more classes than fit in memory, chunk by chunk.

Shapes: B global batch, C classes of the chunk, D embedding size. Compiled kernels keep these signatures.
"""

from __future__ import annotations

import torch
from torch import Tensor


def online_exp_(logits_BC: Tensor, maximum_B: Tensor, total_B: Tensor) -> Tensor:
    """Take one more chunk into a running log-sum-exp (Milakov and Gimelshein 2018).

    In place: ``maximum_B`` becomes the maximum so far, ``total_B`` the sum of exp(logit - maximum) so far, and
    ``logits_BC`` becomes exp(logits - maximum).

    Returns:
        The factor [B] by which anything accumulated against the old maximum must be multiplied.
    """
    new_maximum = torch.maximum(maximum_B, logits_BC.amax(dim=1))
    rescale = torch.exp(maximum_B - new_maximum)
    logits_BC.sub_(new_maximum[:, None]).exp_()
    total_B.mul_(rescale).add_(logits_BC.sum(dim=1))
    maximum_B.copy_(new_maximum)
    return rescale


def softmax_(logits_BC: Tensor, maximum_B: Tensor, log_total_B: Tensor, weight_B: Tensor) -> Tensor:
    """In place: probabilities times a weight for each sample, exp((logits - maximum) - log_total) * weight.

    Maximum and logarithm of the sum are subtracted one after the other: added up first, they would lose digits.
    """
    return logits_BC.sub_(maximum_B[:, None]).sub_(log_total_B[:, None]).exp_().mul_(weight_B[:, None])


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
