"""The sharded softmax cross-entropy: two passes over class chunks, one small exchange between the ranks.

# Note [two passes]
Forward, pass A, walks the rows of this rank chunk by chunk: logits of the chunk, margins on the targets it owns,
running maximum and sum of exponentials, and the running product exp(logits) @ rows, rescaled whenever the maximum
grows (as in FlashAttention). The logits of all classes never exist. One all-gather of (maximum, sum, target cosine)
per sample then gives every rank the loss. The running product, rescaled by the global log-sum-exp, already is the
gradient of the features, so its reduce-scatter starts in the forward pass and overlaps with pass B.
Backward, pass B, rereads or recomputes each chunk's products, turns them into probabilities and forms the gradient of
its rows, which an optimizer of rows takes at once, or with those of other micro-batches: Note [micro-batches].

Shapes: b local batch, B global batch, D embedding size, n rows of this rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridpar import kernels
from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.worker import Worker
from hybridpar.head.chunks import Chunks, LogSumExp, Owned, PassA, feature_gradient, owned_samples, pass_a
from hybridpar.head.coverage import DrawnSoFar
from hybridpar.head.margins import Margin
from hybridpar.head.norms import RowNorms
from hybridpar.head.row_gradients import DenseGradients, MicroBatch, pass_b
from hybridpar.head.row_optimizers import RowOptimizer
from hybridpar.head.samplers import Drawn, Sampler
from hybridpar.partition.layout import Layout


@dataclass(frozen=True)
class Problem:
    """What stays the same from step to step.

    Attributes:
        lane, worker: the communicator and thread on which the feature gradient travels during backward.
        feature_factor: multiplies the gradient of the features.
        norms: of the rows.
        kept_bytes: how much memory products may take from the forward pass to the backward pass.
        sampler: which rows take part in training; None for all.
        drawn_so_far: counts what the sampler draws; None where it is.
        optimizer: steps the rows in the backward pass; None where autograd is to have their gradients.
    """

    group: Group
    layout: Layout
    margin: Margin
    lane: Lane
    worker: Worker
    feature_factor: float
    chunk_classes: int | None
    norms: RowNorms
    kept_bytes: int
    sampler: Sampler | None
    drawn_so_far: DrawnSoFar | None
    optimizer: RowOptimizer | None


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
        graph_due: whether the class graph is to be built anew, on any rank.
        draw: how many draws of classes there were before this one.
        near: rows of this rank that the class graph names; see ``Sampler.draw``.
    """

    sizes: list[int]
    labels_B: Tensor
    norms_B: Tensor | None
    wants_gradient: bool
    training: bool
    compute_dtype: torch.dtype
    graph_due: bool = False
    draw: int = 0
    near: Tensor | None = None


class ShardedSoftmax(torch.autograd.Function):
    """(features [b, D], rows [n, D], biases [n]) -> mean loss of the global batch, the same scalar on every rank."""

    @staticmethod
    def forward(
        ctx: Any, features_bD: Tensor, weight: Tensor, bias: Tensor | None,
        state: Tensor, batch: GlobalBatch, problem: Problem,
    ) -> Tensor:  # fmt: skip
        unit_bD, norms_b = features_bD.to(kernels.exact_dtype(weight.dtype)), None
        if problem.margin.normalized:
            unit_bD, norms_b = kernels.unit_rows(unit_bD)
        features_BD = problem.group.all_gather(unit_bD.to(batch.compute_dtype), batch.sizes)
        owned = owned_samples(problem.layout, problem.group.rank, batch.labels_B)
        drawn = _draw(problem, owned, len(weight), batch)
        owned = owned if drawn is None else owned.among(drawn.rows)
        if problem.optimizer is not None:
            problem.optimizer.catch_up(None if drawn is None else drawn.rows)
        norms = problem.norms.of(weight, owned.rows) if problem.margin.normalized else None
        chunks = Chunks(features_BD, weight, bias, problem.margin, state, problem.chunk_classes, norms, drawn)
        trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        many = problem.optimizer is not None and problem.optimizer.micro_batches.one_of_many
        kept = chunks.keep(problem.kept_bytes) if trains and not many else None
        own_cosines = chunks.target_cosines(owned)
        target_B = _targets_needed_first(problem, owned, own_cosines, batch)
        chunks.state = _next_state(problem.margin, state, target_B, batch)
        targets = chunks.targets(owned, own_cosines, batch.norms_B)
        local = pass_a(chunks, targets, target_B, want_product=batch.wants_gradient)
        log_sum_exp, target_B = _combine(problem, local, own_cosines, owned, batch.compute_dtype)
        state.copy_(chunks.state)  # only now: a step that is refused leaves the margin's memory as it was
        loss, weight_B, by_norm_B = _mean_loss(problem.margin, chunks.state, batch, log_sum_exp, target_B)
        ctx.features_future = None
        if batch.wants_gradient:
            gradient_BD = feature_gradient(chunks, targets, local, log_sum_exp, weight_B)
            ctx.features_future = _start_reduce_scatter(problem, gradient_BD, batch.sizes)
        start = sum(batch.sizes[: problem.group.rank])
        ctx.by_norm_b = None if by_norm_B is None else by_norm_B[start : start + len(features_bD)]
        # What is large is saved, so that it is freed with the graph.
        ctx.save_for_backward(weight, bias, features_BD, norms, unit_bD, kept)
        ctx.problem, ctx.state, ctx.drawn = problem, chunks.state, drawn
        ctx.pass_b_inputs = (targets, target_B, log_sum_exp, (weight_B > 0).to(weight_B.dtype))
        ctx.largest_weight = weight_B.amax() if len(weight_B) else weight_B.new_zeros(())
        ctx.norms_b, ctx.features_dtype = norms_b, features_bD.dtype
        return loss.to(unit_bD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        grad, problem = grads[0], ctx.problem
        # Raises if the rows were changed in place since the forward pass.
        weight, bias, features_BD, norms, unit_bD, kept = ctx.saved_tensors
        grad_weight = grad_bias = grad_features = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            optimizer = problem.optimizer
            later = optimizer is not None and optimizer.micro_batches.held
            chunks = Chunks(
                features_BD, weight, bias, problem.margin, ctx.state, problem.chunk_classes, norms, ctx.drawn,
                None if later else kept,
            )  # fmt: skip
            targets, target_B, log_sum_exp, weights_B = ctx.pass_b_inputs
            batch = MicroBatch(chunks, targets, target_B, log_sum_exp, weights_B, ctx.largest_weight * grad)
            if optimizer is None:
                dense = DenseGradients(weight, bias, all_rows=ctx.drawn is None)
                pass_b([batch], dense)
                grad_weight, grad_bias = dense.weight, dense.bias
            elif later:
                optimizer.micro_batches.add(batch, weight)
            else:
                optimizer.step_by([*optimizer.micro_batches.take(weight), batch], weight, bias)
        if ctx.features_future is not None:
            factor = grad * problem.feature_factor
            grad_features = ctx.features_future.result() * factor
            if ctx.norms_b is not None:
                kernels.unit_rows_backward_(grad_features, unit_bD, ctx.norms_b)
            if ctx.by_norm_b is not None:
                grad_features += unit_bD * (ctx.by_norm_b * factor)[:, None]
            grad_features = grad_features.to(ctx.features_dtype)
        return grad_features, grad_weight, grad_bias, None, None, None


def _draw(problem: Problem, owned: Owned, rows: int, batch: GlobalBatch) -> Drawn | None:
    """Which rows take part; all of them where the head does not train."""
    if problem.sampler is None or not batch.training:
        return None
    positives = torch.unique(owned.host_places)
    rank = problem.group.rank
    drawn = problem.sampler.draw(positives, rows, problem.layout.num_classes, batch.draw, rank, batch.near)
    if problem.drawn_so_far is not None:
        problem.drawn_so_far.add(positives, drawn.rows)
    return drawn


def _targets_needed_first(problem: Problem, owned: Owned, own_cosines: Tensor, batch: GlobalBatch) -> Tensor:
    """Target cosines [B] of the whole batch where the margin needs them before the other logits; else zeros."""
    target_B = own_cosines.new_zeros(len(batch.labels_B))
    if problem.margin.needs_target_first:
        target_B[owned.samples] = own_cosines
        problem.group.all_reduce(target_B)
    return target_B


def _next_state(margin: Margin, state: Tensor, target_B: Tensor, batch: GlobalBatch) -> Tensor:
    """What the margin remembers from this step on; in evaluation mode, a copy of what it remembers."""
    if not batch.training:
        return state.clone()
    valid_B = batch.labels_B >= 0
    norms = None if batch.norms_B is None else batch.norms_B[valid_B]
    return margin.next_state(state, target_B[valid_B] if margin.needs_target_first else None, norms).clone()


class _Exchanged(NamedTuple):
    log_sum_exp: LogSumExp
    target_B: Tensor


def _combine(problem: Problem, local: PassA, own_cosines: Tensor, owned: Owned, products: torch.dtype) -> _Exchanged:
    """The one small exchange: log-sum-exp [B] over all classes and target cosine [B], on every rank the same bits.

    Raises:
        NonFiniteError: on every rank, naming those whose rows gave NaN or Inf.
    """
    mine = own_cosines.new_zeros(1, 3, len(local.maximum_B))
    mine[0, 0], mine[0, 1] = local.maximum_B, local.total_B
    mine[0, 2, owned.samples] = own_cosines
    everyone = problem.group.all_gather(mine)
    if not bool(everyone.isfinite().all()):
        bad = torch.nonzero(~everyone.isfinite().flatten(1).all(dim=1)).flatten().tolist()
        why = f"the features are finite, so rows of the head are not, or products overflow in {products}"
        raise NonFiniteError("logits", tuple(bad), why)
    maximum_RB, total_RB, target_RB = everyone.unbind(dim=1)
    maximum_B = maximum_RB.amax(dim=0)
    total_B = torch.sum(total_RB * torch.exp(maximum_RB - maximum_B), dim=0)
    return _Exchanged(LogSumExp(maximum_B, total_B.log()), target_RB.sum(dim=0))


def _mean_loss(
    margin: Margin, state: Tensor, batch: GlobalBatch, log_sum_exp: LogSumExp, target_B: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss, each sample's weight [B] in it, and its derivative [B] by the feature norm."""
    valid_B = batch.labels_B >= 0
    weight_B = valid_B.to(target_B.dtype) / valid_B.sum().clamp(min=1)
    value_B, _, by_norm_B = margin.target(target_B, batch.norms_B, state)
    log_probability_B = log_sum_exp.below(margin.scale * value_B)
    losses_B = -log_probability_B
    if by_norm_B is not None:
        by_norm_B = by_norm_B * margin.scale * torch.expm1(log_probability_B)
    penalty = None if batch.norms_B is None else margin.penalty(batch.norms_B)
    if penalty is not None:
        losses_B = losses_B + penalty[0]
        by_norm_B = penalty[1] if by_norm_B is None else by_norm_B + penalty[1]
    loss = torch.sum(torch.where(valid_B, losses_B, 0) * weight_B)
    return loss, weight_B, None if by_norm_B is None else by_norm_B * weight_B


def _start_reduce_scatter(problem: Problem, gradient_BD: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
    """Sum the ranks' parts of the feature gradient [B, D]; the future gives this rank's [b, D]."""
    output = gradient_BD.new_empty((sizes[problem.group.rank], gradient_BD.shape[1]))

    def scatter() -> Tensor:
        problem.lane.reduce_scatter(output, gradient_BD.split(list(sizes)))
        return output

    if gradient_BD.is_cuda:  # already asynchronous, and ordered by the stream of this thread
        done: Future[Tensor] = Future()
        done.set_result(scatter())
        return done
    return problem.worker.submit(scatter)
