"""The sharded softmax cross-entropy: two passes over class chunks, one small exchange between the ranks.

# Note [two passes]
Forward, pass A, walks the rows of this rank chunk by chunk: logits of the chunk, margins on the targets it owns,
running maximum and sum of exponentials, and the running product exp(logits) @ rows, rescaled whenever the maximum
grows (as in FlashAttention). The logits of all classes never exist. One all-gather of (maximum, sum, target cosine)
per sample then gives every rank the loss. The running product, rescaled by the global log-sum-exp, already is the
gradient of the features, so its reduce-scatter starts in the forward pass and overlaps with pass B.
Backward, pass B, recomputes each chunk's logits, turns them into probabilities and forms the gradient of its rows.

Shapes: b local batch, B global batch, D embedding size, n rows of this rank, C rows of a chunk, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridpar.comm.group import Group
from hybridpar.comm.lanes import Lane
from hybridpar.comm.worker import Worker
from hybridpar.head.margins import Margin
from hybridpar.kernels import softmax_reference as kernels
from hybridpar.partition.layout import Layout


@dataclass(frozen=True)
class Problem:
    """What stays the same from step to step."""

    group: Group
    layout: Layout
    margin: Margin
    lane: Lane
    worker: Worker
    feature_factor: float
    chunk_classes: int | None


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks know about this step before the features travel.

    Attributes:
        sizes: samples of each rank.
        labels_B: int64 global class ids, -1 where ignored.
        norms_B: feature norms where the margin uses them.
        wants_gradient: whether any rank's features need a gradient.
        training: whether the margin's state moves on.
        compute_dtype: of the matrix products.
    """

    sizes: list[int]
    labels_B: Tensor
    norms_B: Tensor | None
    wants_gradient: bool
    training: bool
    compute_dtype: torch.dtype


class Owned(NamedTuple):
    """The samples whose class lives here: their positions in the batch and their rows, sorted by row."""

    samples: Tensor
    rows: Tensor

    def within(self, begin: int, end: int) -> tuple[slice, Tensor, Tensor]:
        """Which of them fall into rows [begin, end): their slice, samples, and columns of that chunk."""
        first, last = torch.searchsorted(self.rows, torch.tensor([begin, end], device=self.rows.device)).tolist()
        part = slice(first, last)
        return part, self.samples[part], self.rows[part] - begin


def owned_samples(layout: Layout, rank: int, labels_B: Tensor) -> Owned:
    """The samples whose class is a row of ``rank``."""
    valid = torch.nonzero(labels_B >= 0).flatten()
    ranks, rows = layout.locate(labels_B[valid].cpu())
    mine = torch.nonzero(ranks == rank).flatten()
    rows, order = torch.sort(rows[mine])
    return Owned(valid[mine[order].to(labels_B.device)], rows.to(labels_B.device))


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, accumulated and returned in float32, or in float64 for float64."""
    with torch.autocast(left.device.type, enabled=False):  # the dtype was chosen once, for all ranks
        if left.dtype in (torch.float32, torch.float64):
            return left @ right
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        return (left @ right).float()


class Chunks:
    """The rows of this rank, chunk by chunk, with the logits of the global batch against each."""

    def __init__(
        self, problem: Problem, features_BD: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor,
        inverse_norms: Tensor | None,
    ) -> None:  # fmt: skip
        self.margin, self.state = problem.margin, state
        self.features, self.weight, self.bias = features_BD, weight, bias
        self.exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.inverse_norms = inverse_norms
        self.size = problem.chunk_classes or default_chunk_classes(len(features_BD), weight.shape[1])

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        rows = len(self.weight)
        return ((begin, min(begin + self.size, rows)) for begin in range(0, rows, self.size))

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [C, D] in the dtype of the matrix products."""
        return self.weight[begin:end].to(self.features.dtype)

    def cosines(self, rows_CD: Tensor, begin: int, end: int) -> Tensor:
        """Cosines [B, C], or with a linear softmax the logits."""
        cosines_BC = product(self.features, rows_CD.T)
        if self.inverse_norms is not None:
            cosines_BC *= self.inverse_norms[begin:end]
        if self.bias is not None:
            cosines_BC += self.bias[begin:end]
        return cosines_BC

    def logits(self, begin: int, end: int, target_B: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits [B, C] with the margin's change of negatives, the derivatives of that, and the rows [C, D]."""
        rows_CD = self.rows(begin, end)
        cosines_BC = self.cosines(rows_CD, begin, end)
        slopes_BC = self.margin.negatives_(cosines_BC, target_B, self.state)
        return cosines_BC.mul_(self.margin.scale), slopes_BC, rows_CD

    def target_cosines(self, owned: Owned) -> Tensor:
        """Cosines (or linear logits) of the owned samples with their own class, in full precision."""
        features = self.features[owned.samples].to(self.exact)
        cosines = torch.sum(features * self.weight[owned.rows].to(self.exact), dim=1)
        if self.inverse_norms is not None:
            cosines *= self.inverse_norms[owned.rows]
        return cosines if self.bias is None else cosines + self.bias[owned.rows]


def default_chunk_classes(batch: int, embedding_size: int) -> int:
    """Rows per chunk such that its logits and rows stay near the caches (about 2 MiB), at least 256."""
    return max(256, (2 << 20) // (4 * max(batch + embedding_size, 1)) // 64 * 64)


def inverse_row_norms(problem: Problem, weight: Tensor) -> Tensor | None:
    """1 / max(norm, 1e-12) of each row, or None where rows are not normalised."""
    if not problem.margin.normalized:
        return None
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=exact)
    return norms.clamp_(min=1e-12).reciprocal_()


class PassA(NamedTuple):
    """What pass A leaves on this rank."""

    maximum_B: Tensor
    total_B: Tensor
    product_BD: Tensor | None


def pass_a(chunks: Chunks, owned: Owned, target_B: Tensor, norms_B: Tensor | None, want_product: bool) -> PassA:
    """Note [two passes]: running maximum, sum and product over this rank's chunks."""
    batch, width = chunks.features.shape
    options = {"dtype": chunks.exact, "device": chunks.features.device}
    maximum_B = torch.full((batch,), -torch.inf, **options)  # type: ignore[call-overload]
    total_B = torch.zeros(batch, **options)  # type: ignore[call-overload]
    product_BD = torch.zeros(batch, width, **options) if want_product else None  # type: ignore[call-overload]
    norms = None if norms_B is None else norms_B[owned.samples]
    own = chunks.margin.target(target_B[owned.samples], norms, chunks.state)
    for begin, end in chunks.spans:
        part, samples, columns = owned.within(begin, end)
        logits_BC, slopes_BC, rows_CD = chunks.logits(begin, end, target_B)
        logits_BC[samples, columns] = chunks.margin.scale * own.value[part]
        rescale_B = kernels.online_exp_(logits_BC, maximum_B, total_B)
        if product_BD is None:
            continue
        if slopes_BC is not None:
            slopes_BC[samples, columns] = 1.0
            logits_BC *= slopes_BC
        logits_BC[samples, columns] *= own.by_cosine[part]
        if chunks.inverse_norms is not None:
            logits_BC *= chunks.inverse_norms[begin:end]
        product_BD.mul_(rescale_B[:, None]).add_(product(logits_BC.to(rows_CD.dtype), rows_CD))
    return PassA(maximum_B, total_B, product_BD)


def pass_b(
    chunks: Chunks, owned: Owned, target_B: Tensor, norms_B: Tensor | None, log_sum_exp_B: Tensor, weight_B: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Note [two passes]: gradients of this rank's rows [n, D] and biases [n]; ``weight_B`` weighs the samples."""
    grad_weight = torch.empty_like(chunks.weight)
    grad_bias = None if chunks.bias is None else torch.empty_like(chunks.bias)
    norms = None if norms_B is None else norms_B[owned.samples]
    own = chunks.margin.target(target_B[owned.samples], norms, chunks.state)
    scale = chunks.margin.scale
    for begin, end in chunks.spans:
        part, samples, columns = owned.within(begin, end)
        gradient_BC, slopes_BC, _ = chunks.logits(begin, end, target_B)
        gradient_BC[samples, columns] = scale * own.value[part]
        kernels.softmax_(gradient_BC, log_sum_exp_B, weight_B)
        gradient_BC[samples, columns] -= weight_B[samples]
        if slopes_BC is not None:
            slopes_BC[samples, columns] = 1.0
            gradient_BC *= slopes_BC
        gradient_BC[samples, columns] *= own.by_cosine[part]
        if grad_bias is not None:
            grad_bias[begin:end] = gradient_BC.sum(dim=0)
        grad_CD = product(gradient_BC.T.to(chunks.features.dtype), chunks.features).mul_(scale)
        if chunks.inverse_norms is not None:
            inverse = chunks.inverse_norms[begin:end]
            unit = chunks.weight[begin:end].to(chunks.exact) * inverse[:, None]
            kernels.unit_rows_backward_(grad_CD, unit, inverse.reciprocal())
        grad_weight[begin:end] = grad_CD
    return grad_weight, grad_bias


def _sum_of_owned(problem: Problem, owned: Owned, values: Tensor, batch: int) -> Tensor:
    """[B]: each sample's value, from the rank that owns its class."""
    everyone = values.new_zeros(batch)
    everyone[owned.samples] = values
    return problem.group.all_reduce(everyone)


class ShardedSoftmax(torch.autograd.Function):
    """(features [b, D], rows [n, D], biases [n]) -> mean loss of the global batch, the same scalar on every rank."""

    @staticmethod
    def forward(
        ctx: Any, features_bD: Tensor, weight: Tensor, bias: Tensor | None,
        state: Tensor, batch: GlobalBatch, problem: Problem,
    ) -> Tensor:  # fmt: skip
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        unit_bD, norms_b = features_bD.to(exact), None
        if problem.margin.normalized:
            unit_bD, norms_b = kernels.unit_rows(unit_bD)
        features_BD = problem.group.all_gather(unit_bD.to(batch.compute_dtype), batch.sizes)
        labels_B, margin = batch.labels_B, problem.margin
        valid_B = labels_B >= 0
        owned = owned_samples(problem.layout, problem.group.rank, labels_B)
        inverse_norms = inverse_row_norms(problem, weight)
        chunks = Chunks(problem, features_BD, weight, bias, state, inverse_norms)
        own = chunks.target_cosines(owned)
        target_B = _sum_of_owned(problem, owned, own, len(labels_B)) if margin.needs_target_first else None
        if batch.training:
            # The margin's memory moves before it is used; what pass B must see again is this step's value.
            norms = None if batch.norms_B is None else batch.norms_B[valid_B]
            state.copy_(margin.next_state(state, None if target_B is None else target_B[valid_B], norms))
        chunks.state = state.clone()
        if target_B is None:
            target_B = own.new_zeros(len(labels_B))
            target_B[owned.samples] = own
        local = pass_a(chunks, owned, target_B, batch.norms_B, batch.wants_gradient)
        log_sum_exp_B, target_B = _combine(problem, local, own, owned)
        loss, weight_B, by_norm_B = _mean_loss(margin, chunks.state, batch, log_sum_exp_B, target_B)
        ctx.features_future = None
        if batch.wants_gradient:
            ctx.features_future = _send_features_gradient(
                problem, batch.sizes, chunks, owned, local, log_sum_exp_B, target_B, weight_B, batch.norms_B
            )
        start = sum(batch.sizes[: problem.group.rank])
        ctx.by_norm_b = None if by_norm_B is None else by_norm_B[start : start + len(features_bD)]
        ctx.save_for_backward(weight, bias)
        ctx.chunks, ctx.owned, ctx.batch, ctx.problem = chunks, owned, batch, problem
        ctx.results = (target_B, log_sum_exp_B, weight_B)
        ctx.unit_bD, ctx.norms_b, ctx.features_dtype = unit_bD, norms_b, features_bD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        grad = grads[0]
        weight, bias = ctx.saved_tensors  # raises if the rows were changed in place since the forward pass
        target_B, log_sum_exp_B, weight_B = ctx.results
        grad_weight = grad_bias = grad_features = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            ctx.chunks.weight, ctx.chunks.bias = weight, bias
            grad_weight, grad_bias = pass_b(
                ctx.chunks, ctx.owned, target_B, ctx.batch.norms_B, log_sum_exp_B, weight_B * grad
            )
        if ctx.features_future is not None:
            grad_features = ctx.features_future.result() * (grad * ctx.problem.feature_factor)
            if ctx.norms_b is not None:
                kernels.unit_rows_backward_(grad_features, ctx.unit_bD, ctx.norms_b)
            if ctx.by_norm_b is not None:
                scaled_b = ctx.by_norm_b * (grad * ctx.problem.feature_factor)
                grad_features += ctx.unit_bD * scaled_b[:, None]
            grad_features = grad_features.to(ctx.features_dtype)
        return grad_features, grad_weight, grad_bias, None, None, None


def _combine(problem: Problem, local: PassA, own: Tensor, owned: Owned) -> tuple[Tensor, Tensor]:
    """The one small exchange: log-sum-exp [B] over all classes and target cosine [B], on every rank the same bits."""
    mine = torch.zeros(1, 3, len(local.maximum_B), dtype=own.dtype, device=own.device)
    mine[0, 0], mine[0, 1] = local.maximum_B, local.total_B
    mine[0, 2, owned.samples] = own
    maximum_RB, total_RB, target_RB = problem.group.all_gather(mine).unbind(dim=1)
    maximum_B = maximum_RB.amax(dim=0)
    total_B = torch.sum(total_RB * torch.exp(maximum_RB - maximum_B), dim=0)
    return maximum_B + total_B.log(), target_RB.sum(dim=0)


def _mean_loss(
    margin: Margin, state: Tensor, batch: GlobalBatch, log_sum_exp_B: Tensor, target_B: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss, each sample's weight in it, and its derivative [B] by the feature norm."""
    valid_B = batch.labels_B >= 0
    weight_B = valid_B.to(target_B.dtype) / valid_B.sum().clamp(min=1)
    value_B, _, by_norm_B = margin.target(target_B, batch.norms_B, state)
    target_logit_B = margin.scale * value_B
    losses_B = log_sum_exp_B - target_logit_B
    if by_norm_B is not None:
        by_norm_B = by_norm_B * margin.scale * (torch.exp(target_logit_B - log_sum_exp_B) - 1)
    penalty = None if batch.norms_B is None else margin.penalty(batch.norms_B)
    if penalty is not None:
        losses_B = losses_B + penalty[0]
        by_norm_B = penalty[1] if by_norm_B is None else by_norm_B + penalty[1]
    loss = torch.sum(torch.where(valid_B, losses_B, 0) * weight_B)
    return loss, weight_B, None if by_norm_B is None else by_norm_B * weight_B


def _send_features_gradient(
    problem: Problem, sizes: Sequence[int], chunks: Chunks, owned: Owned, local: PassA,
    log_sum_exp_B: Tensor, target_B: Tensor, weight_B: Tensor, norms_B: Tensor | None,
) -> Future[Tensor]:  # fmt: skip
    """Finish the gradient by the (unit) features [B, D] of this rank's classes, and start its reduce-scatter."""
    assert local.product_BD is not None
    gradient_BD = local.product_BD.mul_(torch.exp(local.maximum_B - log_sum_exp_B)[:, None])
    norms = None if norms_B is None else norms_B[owned.samples]
    by_cosine = chunks.margin.target(target_B[owned.samples], norms, chunks.state).by_cosine
    rows = chunks.weight[owned.rows].to(chunks.exact)
    if chunks.inverse_norms is not None:
        by_cosine = by_cosine * chunks.inverse_norms[owned.rows]
    gradient_BD[owned.samples] -= rows * by_cosine[:, None]
    gradient_BD *= (weight_B * chunks.margin.scale)[:, None]
    output = gradient_BD.new_empty((sizes[problem.group.rank], gradient_BD.shape[1]))

    def scatter() -> Tensor:
        problem.lane.reduce_scatter(output, gradient_BD.split(list(sizes)))
        return output

    if gradient_BD.is_cuda:  # already asynchronous, and ordered by the stream of this thread
        done: Future[Tensor] = Future()
        done.set_result(scatter())
        return done
    return problem.worker.submit(scatter)
