"""Pass B of Note [two passes] in softmax.py: the gradients of this rank's rows, chunk by chunk, for whoever takes them.

# Note [micro-batches]
Where one step is cut into micro-batches, each of them has its forward pass, and a backward pass that gives the gradient
of its features. The rows stay as they are until the last one, and what pass B needs is small without the products: the
features of the global batch, and a few numbers a sample. So it is kept, and the last pass B goes over the rows once, as
for one batch of all samples, and takes one step.

A sampler draws anew for each micro-batch, as each loss is a loss of its own. Rows that any of them drew take part in
the step, and each micro-batch adds to the gradients of those that it drew. There, and where a margin that remembers
something changes negatives, the gradients of a chunk are formed for one micro-batch after the other, and added up.

Shapes: as in chunks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.head.chunks import Chunks, LogSumExp, Owned, Targets, matrix_product
from hybridpar.kernels import Chunk, Gradient, Own, Rows


class Sink(Protocol):
    """Takes the gradients of rows, chunk by chunk."""

    def take(self, rows: Rows, gradient: Gradient, sums_C: Tensor | None) -> None:
        """``sums_C``: gradients of the biases, like the rows' still to be multiplied by the factor."""
        ...


class DenseGradients:
    """Gradients of all rows [n, D] and biases [n], as autograd wants them: zero for rows that take no part."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, all_rows: bool) -> None:
        empty = torch.empty_like if all_rows else torch.zeros_like
        self.weight = empty(weight, memory_format=torch.contiguous_format)
        self.bias = None if bias is None else empty(bias)

    def take(self, rows: Rows, gradient: Gradient, sums_C: Tensor | None) -> None:
        if rows.indices is None:
            kernels.project_gradient(rows, gradient, self.weight[rows.selection])
        else:
            part_CD = self.weight.new_empty((rows.size, self.weight.shape[1]))
            kernels.project_gradient(rows, gradient, part_CD)
            self.weight[rows.indices] = part_CD
        if self.bias is not None and sums_C is not None:
            self.bias[rows.selection] = sums_C * gradient.factor


@dataclass(frozen=True)
class MicroBatch:
    """What pass A leaves of one global batch, for pass B.

    Attributes:
        chunks: its rows and features.
        weights_B: what samples weigh in the gradient, 0 for those that do not count.
        factor: scalar that multiplies it; kept out of the products so that small probabilities survive in float16.
    """

    chunks: Chunks
    targets: Targets
    target_B: Tensor
    log_sum_exp: LogSumExp
    weights_B: Tensor
    factor: Tensor

    @cached_property
    def scaled(self) -> float | Tensor:
        """The factor of what ``gradient`` gives. On a device it stays there: reading it would wait."""
        scaled = self.factor * self.chunks.margin.scale
        return float(scaled) if scaled.is_cpu else scaled

    @cached_property
    def _own(self) -> Tensor:
        """Derivatives [T] of the owned samples by the cosine with their own class."""
        targets, samples = self.targets, self.targets.owned.samples
        by_cosine = torch.expm1(self.log_sum_exp.below(targets.logits, samples)) * targets.by_cosine
        return by_cosine * self.weights_B[samples]

    def gradient(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """By the unit rows [C, D] of a chunk, and by its biases [C] where there are some; until the next call."""
        chunks = self.chunks
        within = self.targets.owned.within(begin, end, self._own)
        probabilities_CB, sums_C = self._probabilities(within, begin, end)
        grad_CD = chunks.scratch("gradient", end - begin, chunks.weight.shape[1], chunks.product_dtype)
        return matrix_product(probabilities_CB, chunks.features, grad_CD), sums_C

    def _probabilities(self, own: Own, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """The gradient by the cosines [C, B], in the dtype of the products, and its sums [C] where there are biases."""
        chunks = self.chunks
        products_CB = chunks.products(begin, end)
        scale = chunks.margin.scale
        sums_C = None if chunks.bias is None else torch.empty_like(chunks.bias[begin:end])
        changed = chunks.changed(products_CB, begin, end, self.target_B)
        if changed is None:
            chunk = Chunk(products_CB, chunks.norms(begin, end), chunks.biases(begin, end), scale)
            out_CB = chunks.scratch("weights", end - begin, len(self.target_B), chunks.weight_dtype)
            kernels.to_probabilities(chunk, own, *self.log_sum_exp, self.weights_B, out_CB, sums_C)
        else:
            out_CB, slopes_CB = changed
            chunk = Chunk(out_CB, None, chunks.shifts(begin, end), scale)
            kernels.to_probabilities(chunk, own, *self.log_sum_exp, self.weights_B, out_CB, None)
            out_CB *= slopes_CB
            out_CB[own.classes, own.samples] = own.values
            if sums_C is not None:
                torch.sum(out_CB, dim=1, out=sums_C)
        return out_CB.to(chunks.features.dtype), sums_C


def pass_b(batches: Sequence[MicroBatch], sink: Sink) -> None:
    """Gradients of this rank's rows and biases by all batches together, for the ``sink``."""
    if len(batches) == 1:
        return _one(batches[0], sink)
    if any(batch.chunks.drawn is not None or batch.chunks.margin.changes_negatives for batch in batches):
        return _one_by_one(batches, sink)
    return _one(_merged(batches), sink)


def _one(batch: MicroBatch, sink: Sink) -> None:
    factor = batch.scaled
    for begin, end in batch.chunks.spans:
        grad_CD, sums_C = batch.gradient(begin, end)
        sink.take(batch.chunks.block(begin, end), Gradient(grad_CD, factor), sums_C)


def _merged(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One batch of all samples. All rows take part, and what the margin remembers matters for targets only."""
    chunks = batches[0].chunks.against(torch.cat([batch.chunks.features for batch in batches]))
    factors = torch.stack([batch.factor for batch in batches])
    largest = factors.abs().amax()
    shares = factors / torch.where(largest == 0, 1, largest)
    weights_B = torch.cat([batch.weights_B * share for batch, share in zip(batches, shares.unbind(), strict=True)])
    firsts = itertools.accumulate((len(batch.weights_B) for batch in batches), initial=0)
    owned = [batch.targets.owned for batch in batches]
    host_places, host_order = torch.sort(torch.cat([each.host_places for each in owned]))
    order = host_order.to(weights_B.device)
    samples = torch.cat([each.samples + first for each, first in zip(owned, firsts, strict=False)])[order]
    rows = torch.cat([each.rows for each in owned])[order]
    logits = torch.cat([batch.targets.logits for batch in batches])[order]
    by_cosine = torch.cat([batch.targets.by_cosine for batch in batches])[order]
    targets = Targets(Owned(samples, rows, host_places.to(order.device), host_places), logits, by_cosine)
    parts = zip(*(batch.log_sum_exp for batch in batches), strict=True)
    log_sum_exp = LogSumExp(*(torch.cat(part) for part in parts))
    target_B = torch.cat([batch.target_B for batch in batches])
    return MicroBatch(chunks, targets, target_B, log_sum_exp, weights_B, largest)


def _one_by_one(batches: Sequence[MicroBatch], sink: Sink) -> None:
    first = batches[0].chunks
    taking_part = _any_drawn(batches)
    count = len(first.weight) if taking_part is None else len(taking_part)
    size = min(batch.chunks.size for batch in batches)
    exact = max((batch.chunks.exact for batch in batches), key=lambda dtype: dtype.itemsize)
    total_CD = first.weight.new_empty((min(size, count), first.weight.shape[1]), dtype=exact)
    sums_C = None if first.bias is None else total_CD.new_empty(len(total_CD))
    for begin in range(0, count, size):
        end = min(begin + size, count)
        rows = None if taking_part is None else taking_part[begin:end]
        grad_CD = total_CD[: end - begin].zero_()
        by_bias_C = None if sums_C is None else sums_C[: end - begin].zero_()
        for batch in batches:
            _add(batch, begin, end, rows, grad_CD, by_bias_C)
        block = first.rows_at(begin, end) if rows is None else first.rows_at(0, len(rows), rows.to(grad_CD.device))
        sink.take(block, Gradient(grad_CD, 1.0), by_bias_C)


def _any_drawn(batches: Sequence[MicroBatch]) -> Tensor | None:
    """Rows that take part in any of the batches, ascending, int64 on the CPU; None for all."""
    drawn = [batch.chunks.drawn for batch in batches]
    rows = [each.rows for each in drawn if each is not None]
    return torch.unique(torch.cat(rows)) if len(rows) == len(drawn) else None


def _add(
    batch: MicroBatch, begin: int, end: int, rows: Tensor | None, grad_CD: Tensor, by_bias_C: Tensor | None
) -> None:
    """What one batch adds to the gradients of a chunk: rows [begin, end), or the given ones, ascending."""
    drawn, at = batch.chunks.drawn, None
    if drawn is not None:
        bounds = [begin, end] if rows is None else [int(rows[0]), int(rows[-1]) + 1]
        first, last = torch.searchsorted(drawn.rows, torch.tensor(bounds)).tolist()
        mine = drawn.rows[first:last]
        at = (mine - begin if rows is None else torch.searchsorted(rows, mine)).to(grad_CD.device)
        begin, end = first, last
    if begin == end:
        return
    values_CD, sums_C = batch.gradient(begin, end)
    _add_rows(grad_CD, at, values_CD, batch.scaled)
    if by_bias_C is not None and sums_C is not None:
        _add_rows(by_bias_C, at, sums_C, batch.scaled)


def _add_rows(total: Tensor, at: Tensor | None, values: Tensor, factor: float | Tensor) -> None:
    """Add ``factor * values`` to the places ``at`` of the first dimension, none of which is named twice; None: all."""
    if not isinstance(factor, float):
        values, factor = values.to(total.dtype) * factor, 1.0
    if at is None:
        total.add_(values, alpha=factor)
    else:
        total.index_add_(0, at, values.to(total.dtype), alpha=factor)
