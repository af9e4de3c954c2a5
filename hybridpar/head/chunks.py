"""One rank's share of the softmax: its rows against the features of the global batch, chunk by chunk.

Nothing here communicates. See Note [two passes] in softmax.py.

Shapes: B global batch, D embedding size, n rows of this rank, m of them that take part, C of a chunk, T samples whose
class lives here. Chunks lie class by class, [C, B].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.head.margins import Margin
from hybridpar.head.samplers import Drawn
from hybridpar.kernels import Chunk, Own, Rows
from hybridpar.partition.layout import Layout


class Owned(NamedTuple):
    """The samples whose class lives on this rank, sorted by row.

    Attributes:
        samples: their positions [T] in the global batch.
        rows: the rows [T] of their classes.
        places: where these are among the rows that take part.
        host_places: the same on the CPU, so that cutting them into chunks waits for no device.
    """

    samples: Tensor
    rows: Tensor
    places: Tensor
    host_places: Tensor

    def among(self, rows: Tensor) -> Owned:
        """The same where only some rows take part: int64 on the CPU, ascending, all of theirs among them."""
        host_places = torch.searchsorted(rows, self.rows.cpu())
        return self._replace(places=host_places.to(self.places.device), host_places=host_places)

    def within(self, begin: int, end: int, values: Tensor) -> Own:
        """Those at places [begin, end), with their ``values`` [T], as the kernels take them."""
        first, last = torch.searchsorted(self.host_places, torch.tensor([begin, end])).tolist()
        return Own(self.places[first:last] - begin, self.samples[first:last], values[first:last])


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
    """The samples whose class is a row of ``rank``; labels below 0 are nobody's. All rows take part."""
    host_labels = labels_B.cpu()
    valid = torch.nonzero(host_labels >= 0).flatten()
    ranks, rows = layout.locate(host_labels[valid])
    mine = torch.nonzero(ranks == rank).flatten()
    host_rows, order = torch.sort(rows[mine])
    device = labels_B.device
    places = host_rows.to(device)
    return Owned(valid[mine[order]].to(device), places, places, host_rows)


def default_chunk_classes(batch: int, embedding_size: int, device: torch.device) -> int:
    """Rows per chunk, at least 256: on the CPU such that its logits and rows stay near the caches (about 2 MiB).

    Elsewhere a chunk of any size costs the host a dozen launches, so there it is of about 256 MiB.
    """
    wanted = 2 << 20 if device.type == "cpu" else 256 << 20
    return max(256, wanted // (4 * max(batch + embedding_size, 1)) // 64 * 64)


def matrix_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right in ``out``. Half precision is accumulated in float32, and on the CPU rounded to its own dtype."""
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda and out.dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(left, right))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class Chunks:
    """The rows of this rank that take part, chunk by chunk, with the products of the global batch and each.

    Args:
        features_BD: unit features (raw ones for a linear softmax), in the dtype of the matrix products.
        weight, bias: rows [n, D] and biases [n] or None.
        margin: of the head.
        state: what the margin remembers, as of this step.
        chunk_classes: C; None chooses by cache size.
        inverse_norms: 1 / max(norm, 1e-12) of each row [n]; None for a linear softmax.
        drawn: which rows take part; None for all of them.
        kept: products [k, B] of the first rows: what pass A leaves for pass B, so far as memory may be used for it.
    """

    def __init__(
        self,
        features_BD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        margin: Margin,
        state: Tensor,
        chunk_classes: int | None,
        inverse_norms: Tensor | None,
        drawn: Drawn | None = None,
        kept: Tensor | None = None,
    ) -> None:
        self.features, self.weight, self.margin, self.state = features_BD, weight.detach(), margin, state
        self.exact = torch.promote_types(kernels.exact_dtype(weight.dtype), kernels.exact_dtype(features_BD.dtype))
        self.drawn = drawn
        self._drawn = None if drawn is None else drawn.rows.to(weight.device)
        self.length = len(weight) if drawn is None else len(drawn.rows)
        # Row kernels take the norms of all rows, in the exact dtype of the rows.
        self._row_norms = inverse_norms
        self.inverse_norms = self._taking_part(inverse_norms)
        self.bias = self._taking_part(None if bias is None else bias.detach())
        shifts = None if drawn is None else drawn.shifts
        self._shifts = None if shifts is None else shifts.to(weight.device, self.exact, copy=True).div_(margin.scale)
        self._added = _sum(self.bias, self._shifts)
        self.kept = kept
        # CUDA gives products of half precision in float32 at no cost; libraries for the CPU round them.
        rounded = features_BD.is_cpu and kernels.exact_dtype(features_BD.dtype) == self.exact
        self.product_dtype = features_BD.dtype if rounded else self.exact
        # Of what is made of the products, for the next product. Where they are wider, the kernels round on the way.
        self.weight_dtype = self.product_dtype
        if not features_BD.is_cpu and self.product_dtype == torch.float32:
            self.weight_dtype = features_BD.dtype
        self._chunk_classes = chunk_classes
        self._size = chunk_classes or default_chunk_classes(len(features_BD), weight.shape[1], weight.device)
        self._features_DB = features_BD.T
        self._scratch: dict[str, Tensor] = {}

    def _taking_part(self, values: Tensor | None) -> Tensor | None:
        """[m] of [n]."""
        if values is None:
            return None
        return (values if self._drawn is None else values[self._drawn]).to(self.exact)

    def against(self, features_BD: Tensor) -> Chunks:
        """The same rows, where all take part, with other features."""
        assert self.drawn is None
        return Chunks(
            features_BD, self.weight, self.bias, self.margin, self.state, self._chunk_classes, self._row_norms
        )

    @property
    def size(self) -> int:
        """Rows of a chunk, but for the last one."""
        return self._size

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of each chunk."""
        size, length = self._size, self.length
        return ((begin, min(begin + size, length)) for begin in range(0, length, size))

    def keep(self, budget_bytes: int) -> Tensor | None:
        """From now on, keep the products of as many rows as fit into so much memory."""
        row_bytes = max(len(self.features), 1) * self.product_dtype.itemsize
        rows = budget_bytes // row_bytes
        rows = self.length if rows >= self.length else rows // self._size * self._size  # whole chunks
        self.kept = self.features.new_empty((rows, len(self.features)), dtype=self.product_dtype) if rows else None
        return self.kept

    def block(self, begin: int, end: int) -> Rows:
        """The rows of a chunk, for kernels."""
        return self.rows_at(begin, end) if self._drawn is None else self.rows_at(0, end - begin, self._drawn[begin:end])

    def rows_at(self, begin: int, end: int, indices: Tensor | None = None) -> Rows:
        """Any rows of the rank, for kernels: [begin, end), or those of the ``indices`` [end - begin]."""
        return Rows(self.weight, self._row_norms, begin, end - begin, indices)

    def scratch(self, name: str, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory [count, width] that lasts until the next chunk asks for it by this name."""
        memory = self._scratch.get(name)
        if memory is None or memory.dtype != dtype or memory.shape[1] != width or len(memory) < count:
            most = max(count, min(self._size, self.length))
            memory = self._scratch[name] = self.features.new_empty((most, width), dtype=dtype)
        return memory[:count]

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [C, D] in the dtype of the matrix products."""
        if self._drawn is None and self.weight.dtype == self.features.dtype:
            return self.weight[begin:end]
        rows_CD = self.scratch("rows", end - begin, self.weight.shape[1], self.features.dtype)
        kernels.load_rows(self.block(begin, end), rows_CD)
        return rows_CD

    def products(self, begin: int, end: int) -> Tensor:
        """Rows times features, [C, B]; kept ones, or computed: into what is to be kept, if there is room."""
        if self.kept is not None and end <= len(self.kept):
            return self.kept[begin:end]
        return self.compute_products(self.rows(begin, end), begin, end)

    def compute_products(self, rows_CD: Tensor, begin: int, end: int) -> Tensor:
        """The same, computed."""
        if self.kept is not None and end <= len(self.kept):
            out = self.kept[begin:end]
        else:
            out = self.scratch("products", end - begin, len(self.features), self.product_dtype)
        return matrix_product(rows_CD, self._features_DB, out)

    def norms(self, begin: int, end: int) -> Tensor | None:
        """1 / norm [C] of a chunk."""
        return None if self.inverse_norms is None else self.inverse_norms[begin:end]

    def biases(self, begin: int, end: int) -> Tensor | None:
        """[C] of a chunk, with what is added to logits, in units of the scale."""
        return None if self._added is None else self._added[begin:end]

    def shifts(self, begin: int, end: int) -> Tensor | None:
        """[C] of a chunk: what is added to logits, in units of the scale."""
        return None if self._shifts is None else self._shifts[begin:end]

    def cosines(self, products_CB: Tensor, begin: int, end: int) -> Tensor:
        """Cosines [C, B], or with a linear softmax w . x + b; exact."""
        cosines_CB = products_CB.to(self.exact, copy=True)
        if (norms_C := self.norms(begin, end)) is not None:
            cosines_CB *= norms_C[:, None]
        if self.bias is not None:
            cosines_CB += self.bias[begin:end, None]
        return cosines_CB

    def changed(self, products_CB: Tensor, begin: int, end: int, target_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where the margin changes negatives: what they become, and the derivatives of that, [C, B]; else None."""
        if not self.margin.changes_negatives:
            return None
        cosines_CB = self.cosines(products_CB, begin, end)
        slopes_BC = self.margin.negatives_(cosines_CB.T, target_B, self.state)
        return cosines_CB, torch.ones_like(cosines_CB) if slopes_BC is None else slopes_BC.T

    def target_cosines(self, owned: Owned) -> Tensor:
        """Cosines [T] (or x . w + b) of the owned samples with their own class, in full precision."""
        features = self.features[owned.samples].to(self.exact)
        cosines = torch.sum(features * self.weight[owned.rows].to(self.exact), dim=1)
        if self.inverse_norms is not None:
            cosines *= self.inverse_norms[owned.places]
        return cosines if self.bias is None else cosines + self.bias[owned.places]

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
    partial_BD = maximum_B.new_empty((batch, width), dtype=chunks.product_dtype)
    for begin, end in chunks.spans:
        rows_CD = chunks.rows(begin, end)
        products_CB = chunks.compute_products(rows_CD, begin, end)
        weights_CB, rescale_B = _exponentials(chunks, targets, target_B, products_CB, maximum_B, total_B, begin, end)
        if product_BD is not None:
            matrix_product(weights_CB.T, rows_CD, partial_BD)
            product_BD.mul_(rescale_B[:, None]).add_(partial_BD)
    return PassA(maximum_B, total_B, product_BD)


def _exponentials(
    chunks: Chunks, targets: Targets, target_B: Tensor, products_CB: Tensor,
    maximum_B: Tensor, total_B: Tensor, begin: int, end: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The factors [C, B] of a chunk's rows in the product, in its dtype, and those [B] of rescaling."""
    own = targets.owned.within(begin, end, targets.logits)
    norms_C, scale = chunks.norms(begin, end), chunks.margin.scale
    changed = chunks.changed(products_CB, begin, end, target_B)
    if changed is None:
        chunk = Chunk(products_CB, norms_C, chunks.biases(begin, end), scale)
        out_CB = chunks.scratch("weights", end - begin, len(target_B), chunks.weight_dtype)
        rescale_B = kernels.add_exponentials(chunk, own, maximum_B, total_B, out_CB)
    else:
        out_CB, slopes_CB = changed
        chunk = Chunk(out_CB, None, chunks.shifts(begin, end), scale)
        rescale_B = kernels.add_exponentials(chunk, own, maximum_B, total_B, out_CB)
        out_CB *= slopes_CB if norms_C is None else slopes_CB * norms_C[:, None]
    return out_CB.to(chunks.features.dtype), rescale_B


def feature_gradient(
    chunks: Chunks, targets: Targets, local: PassA, log_sum_exp: LogSumExp, weight_B: Tensor
) -> Tensor:
    """This rank's part of the gradient by the (unit) features, [B, D]; ``weight_B`` weighs the samples in the loss."""
    assert local.product_BD is not None
    samples, rows, places, _ = targets.owned
    gradient_BD = local.product_BD * torch.exp(log_sum_exp.below(local.maximum_B))[:, None]
    own = torch.expm1(log_sum_exp.below(targets.logits, samples)) * targets.by_cosine
    if chunks.inverse_norms is not None:
        own *= chunks.inverse_norms[places]
    gradient_BD[samples] += chunks.weight[rows].to(chunks.exact) * own[:, None]
    return gradient_BD.mul_((weight_B * chunks.margin.scale)[:, None])
