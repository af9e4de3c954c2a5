"""Reading a sharded head: the best classes of a feature, and the rows of a class."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.head.chunks import Chunks, owned_samples
from hybridpar.head.softmax import Problem


def top_classes(
    problem: Problem, features_bD: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, k: int
) -> tuple[Tensor, Tensor]:
    """Collective. Scores [b, k] descending and int64 class ids [b, k]; see ``ShardedClassifier.predict``."""
    group, layout = problem.group, problem.layout
    sizes: list[int] = group.all_gather(torch.tensor([len(features_bD)], device=weight.device)).tolist()
    unit_bD = features_bD.to(kernels.exact_dtype(weight.dtype))
    if problem.margin.normalized:
        unit_bD = kernels.unit_rows(unit_bD)[0]
    features_BD = group.all_gather(unit_bD.to(dtype), sizes)
    norms = problem.norms.of(weight) if problem.margin.normalized else None
    chunks = Chunks(features_BD, weight, bias, problem.margin, weight.new_zeros(0), problem.chunk_classes, norms)
    scores, rows = _top_rows(chunks, k)
    if not problem.margin.normalized:
        scores *= problem.margin.scale
    ids = layout.class_ids(group.rank, rows.flatten().cpu()).to(weight.device).view_as(rows)
    # Shards may hold fewer than k rows: their candidates are padded with scores that cannot win.
    width = min(k, max(layout.sizes))
    padding = (0, width - scores.shape[1])
    scores = torch.nn.functional.pad(scores, padding, value=-torch.inf)
    ids = torch.nn.functional.pad(ids, padding, value=layout.num_classes)
    all_scores = torch.cat(group.all_gather(scores[None]).unbind(), dim=1)
    all_ids = torch.cat(group.all_gather(ids[None]).unbind(), dim=1)
    start = sum(sizes[: group.rank])
    mine = slice(start, start + len(features_bD))
    return _best(all_scores[mine], all_ids[mine], k)


def _top_rows(chunks: Chunks, k: int) -> tuple[Tensor, Tensor]:
    """The best min(k, n) rows of this rank for each feature of the global batch."""
    batch = len(chunks.features)
    scores = chunks.features.new_empty((batch, 0), dtype=chunks.exact)
    rows = torch.empty((batch, 0), dtype=torch.int64, device=scores.device)
    for begin, end in chunks.spans:
        cosines_BC = chunks.cosines(chunks.products(begin, end), begin, end).T
        chunk_rows = torch.arange(begin, end, device=scores.device).expand(batch, -1)
        if end - begin > k:
            cosines_BC, columns = torch.topk(cosines_BC, k, dim=1)
            chunk_rows = columns + begin
        together = torch.cat([scores, cosines_BC], dim=1)
        scores, rows = _best(together, torch.cat([rows, chunk_rows], dim=1), min(k, together.shape[1]))
    return scores, rows


def _best(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row, equal scores in the order of ids."""
    ids, by_id = torch.sort(ids, dim=1)
    scores, by_score = torch.sort(scores.gather(1, by_id), dim=1, descending=True, stable=True)
    return scores[:, :k].contiguous(), ids.gather(1, by_score)[:, :k].contiguous()


def class_rows(problem: Problem, weight: Tensor, ids: Tensor) -> Tensor:
    """Collective. Rows [m, D] of the given classes; see ``ShardedClassifier.class_centers``."""
    group = problem.group
    sizes: list[int] = group.all_gather(torch.tensor([len(ids)], device=weight.device)).tolist()
    wanted = group.all_gather(ids, sizes)
    owned = owned_samples(problem.layout, group.rank, wanted)
    everyone = weight.new_zeros((len(wanted), weight.shape[1]))
    everyone[owned.samples] = weight[owned.rows]
    return group.reduce_scatter(everyone, sizes)
