"""One rank's share of the softmax: its rows against the features of the global batch, chunk by chunk.

Nothing here communicates. See Note [two passes] in softmax.py.

Shapes: B global batch, D embedding size, n rows of this rank, C rows of a chunk, T samples whose class lives here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.head.margins import Margin
from hybridpar.partition.layout import Layout


class Owned(NamedTuple):
    """The samples whose class lives on this rank, sorted by row.

    Attributes:
        samples: their positions [T] in the global batch.
        rows: the rows [T] of their classes.
        host_rows: the same on the CPU, so that cutting them into chunks waits for no device.
    """

    samples: Tensor
    rows: Tensor
    host_rows: Tensor

    def within(self, begin: int, end: int) -> tuple[slice, Tensor, Tensor]:
        """Those in rows [begin, end): which of them, their samples, and their columns in that chunk."""
        first, last = torch.searchsorted(self.host_rows, torch.tensor([begin, end])).tolist()
        part = slice(first, last)
        return part, self.samples[part], self.rows[part] - begin


class Targets(NamedTuple):
    """Target logits [T] of the owned samples, and their derivatives [T] by the cosine in units of the scale."""

    owned: Owned
    logits: Tensor
    by_cosine: Tensor


class LogSumExp(NamedTuple):
    """maximum + log_total, [B] each, kept apart: added up, the larger one would swallow digits of the smaller."""

    maximum_B: Tensor
    log_total_B: Tensor

    def below(self, logits: Tensor, samples: Tensor | slice = slice(None)) -> Tensor:
        """Log-probabilities: logits of the given samples minus their log-sum-exp."""
        return (logits - self.maximum_B[samples]) - self.log_total_B[samples]


class PassA(NamedTuple):
    """What pass A leaves on this rank: maximum [B], sum [B] and product [B, D] over its chunks.

    The product leaves the target logits out: where training has converged, all that matters of them is p - 1, and
    rounding p in half precision would drown it.
    """

    maximum_B: Tensor
    total_B: Tensor
    product_BD: Tensor | None


def owned_samples(layout: Layout, rank: int, labels_B: Tensor) -> Owned:
    """The samples whose class is a row of ``rank``; labels below 0 are nobody's."""
    host_labels = labels_B.cpu()
    valid = torch.nonzero(host_labels >= 0).flatten()
    ranks, rows = layout.locate(host_labels[valid])
    mine = torch.nonzero(ranks == rank).flatten()
    host_rows, order = torch.sort(rows[mine])
    device = labels_B.device
    return Owned(valid[mine[order]].to(device), host_rows.to(device), host_rows)


def exact_dtype(rows: Tensor) -> torch.dtype:
    """In which sums are accumulated and margins computed: float64 for float64 rows, else float32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, accumulated and returned in float32, or in float64 for float64."""
    with torch.autocast(left.device.type, enabled=False):  # the dtype was chosen once, for all ranks
        if left.dtype in (torch.float32, torch.float64):
            return left @ right
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        return (left @ right).float()


def default_chunk_classes(batch: int, embedding_size: int) -> int:
    """Rows per chunk such that its logits and rows stay near the caches (about 2 MiB), at least 256."""
    return max(256, (2 << 20) // (4 * max(batch + embedding_size, 1)) // 64 * 64)


class Chunks:
    """The rows of this rank, chunk by chunk, with the logits of the global batch against each.

    Args:
        features_BD: unit features (raw ones for a linear softmax), in the dtype of the matrix products.
        weight, bias: rows [n, D] and biases [n] or None.
        margin: of the head.
        state: what the margin remembers, as of this step.
        chunk_classes: C; None chooses by cache size.
        inverse_norms: 1 / max(norm, 1e-12) of each row, where known already; rows of a linear softmax have none.
    """

    def __init__(
        self,
        features_BD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        margin: Margin,
        state: Tensor,
        chunk_classes: int | None,
        inverse_norms: Tensor | None = None,
    ) -> None:
        self.features, self.weight, self.bias = features_BD, weight, bias
        self.margin, self.state = margin, state
        self.exact = exact_dtype(weight)
        self.size = chunk_classes or default_chunk_classes(len(features_BD), weight.shape[1])
        if margin.normalized and inverse_norms is None:
            norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=self.exact)
            inverse_norms = norms.clamp_(min=1e-12).reciprocal_()
        self.inverse_norms = inverse_norms

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of each chunk."""
        rows = len(self.weight)
        return ((begin, min(begin + self.size, rows)) for begin in range(0, rows, self.size))

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [C, D] in the dtype of the matrix products."""
        return self.weight[begin:end].to(self.features.dtype)

    def cosines(self, rows_CD: Tensor, begin: int, end: int) -> Tensor:
        """Cosines [B, C], or with a linear softmax x . w + b."""
        cosines_BC = product(self.features, rows_CD.T)
        if self.inverse_norms is not None:
            cosines_BC *= self.inverse_norms[begin:end]
        if self.bias is not None:
            cosines_BC += self.bias[begin:end]
        return cosines_BC

    def logits(self, begin: int, end: int, target_B: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits [B, C] as of negatives, the derivatives [B, C] of the margin's change to them, and the rows [C, D]."""
        rows_CD = self.rows(begin, end)
        cosines_BC = self.cosines(rows_CD, begin, end)
        slopes_BC = self.margin.negatives_(cosines_BC, target_B, self.state)
        return cosines_BC.mul_(self.margin.scale), slopes_BC, rows_CD

    def target_cosines(self, owned: Owned) -> Tensor:
        """Cosines [T] (or x . w + b) of the owned samples with their own class, in full precision."""
        features = self.features[owned.samples].to(self.exact)
        cosines = torch.sum(features * self.weight[owned.rows].to(self.exact), dim=1)
        if self.inverse_norms is not None:
            cosines *= self.inverse_norms[owned.rows]
        return cosines if self.bias is None else cosines + self.bias[owned.rows]

    def targets(self, owned: Owned, cosines: Tensor, norms_B: Tensor | None) -> Targets:
        """The margin applied to ``target_cosines``."""
        norms = None if norms_B is None else norms_B[owned.samples]
        value, by_cosine, _ = self.margin.target(cosines, norms, self.state)
        return Targets(owned, self.margin.scale * value, by_cosine)


def pass_a(chunks: Chunks, targets: Targets, target_B: Tensor, *, want_product: bool) -> PassA:
    """Running maximum, sum and product over this rank's chunks.

    Args:
        target_B: target cosines of the whole batch, where the margin ``needs_target_first``.
        want_product: whether anyone needs the gradient of the features.
    """
    batch, width = chunks.features.shape
    maximum_B = chunks.features.new_full((batch,), -torch.inf, dtype=chunks.exact)
    total_B = torch.zeros_like(maximum_B)
    product_BD = maximum_B.new_zeros((batch, width)) if want_product else None
    for begin, end in chunks.spans:
        part, samples, columns = targets.owned.within(begin, end)
        logits_BC, slopes_BC, rows_CD = chunks.logits(begin, end, target_B)
        logits_BC[samples, columns] = targets.logits[part]
        rescale_B = kernels.online_exp_(logits_BC, maximum_B, total_B)
        if product_BD is None:
            continue
        if slopes_BC is not None:
            logits_BC *= slopes_BC
        logits_BC[samples, columns] = 0.0
        if chunks.inverse_norms is not None:
            logits_BC *= chunks.inverse_norms[begin:end]
        product_BD.mul_(rescale_B[:, None]).add_(product(logits_BC.to(rows_CD.dtype), rows_CD))
    return PassA(maximum_B, total_B, product_BD)


def feature_gradient(
    chunks: Chunks, targets: Targets, local: PassA, log_sum_exp: LogSumExp, weight_B: Tensor
) -> Tensor:
    """This rank's part of the gradient by the (unit) features, [B, D]; ``weight_B`` weighs the samples in the loss."""
    assert local.product_BD is not None
    samples, rows, _ = targets.owned
    gradient_BD = local.product_BD * torch.exp(log_sum_exp.below(local.maximum_B))[:, None]
    own = torch.expm1(log_sum_exp.below(targets.logits, samples)) * targets.by_cosine
    if chunks.inverse_norms is not None:
        own *= chunks.inverse_norms[rows]
    gradient_BD[samples] += chunks.weight[rows].to(chunks.exact) * own[:, None]
    return gradient_BD.mul_((weight_B * chunks.margin.scale)[:, None])


def pass_b(
    chunks: Chunks, targets: Targets, target_B: Tensor, log_sum_exp: LogSumExp, counts_B: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of this rank's rows [n, D] and biases [n].

    Args:
        counts_B: 1 for samples that count, 0 for others.
        factor: scalar that multiplies the result; kept out of the products so that small probabilities survive
            in float16.
    """
    grad_weight = torch.empty_like(chunks.weight)
    grad_bias = None if chunks.bias is None else torch.empty_like(chunks.bias)
    own = torch.expm1(log_sum_exp.below(targets.logits, targets.owned.samples)) * targets.by_cosine
    factor = factor * chunks.margin.scale
    for begin, end in chunks.spans:
        part, samples, columns = targets.owned.within(begin, end)
        gradient_BC, slopes_BC, _ = chunks.logits(begin, end, target_B)
        kernels.softmax_(gradient_BC, log_sum_exp.maximum_B, log_sum_exp.log_total_B, counts_B)
        if slopes_BC is not None:
            gradient_BC *= slopes_BC
        gradient_BC[samples, columns] = own[part]
        if grad_bias is not None:
            grad_bias[begin:end] = gradient_BC.sum(dim=0) * factor
        grad_CD = product(gradient_BC.T.to(chunks.features.dtype), chunks.features).mul_(factor)
        if chunks.inverse_norms is not None:
            inverse = chunks.inverse_norms[begin:end]
            unit = chunks.weight[begin:end].to(chunks.exact) * inverse[:, None]
            kernels.unit_rows_backward_(grad_CD, unit, inverse.reciprocal())
        grad_weight[begin:end] = grad_CD
    return grad_weight, grad_bias
