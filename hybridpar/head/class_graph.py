"""The class graph: which classes lie nearest to each one, by the cosine of their rows.

# Note [class graph]
Each rank keeps the ids of the k nearest classes, of all ranks, for its own rows and for no others: 4 k bytes a row. In
a step every rank knows the labels of all, so it knows whose neighbours each rank will send: one all-gather of k ids for
each class of the batch, out of which every rank picks the rows that it holds. That costs (classes of the batch) x k,
however many classes there are. The inverse graph, "which of my rows are neighbours of class c", would save the small
all-gather, but has to be indexed by the classes of all ranks on each of them: memory that more ranks do not make less.

While the graph is built the rows travel, a block of each rank's at a time, and each rank compares its own rows with the
block. Candidates stay where they are wanted; if the rows to be looked up travelled instead, every rank's candidates
would have to follow them, which with many ranks is more than the rows themselves. Beside the graph a rank holds 4 k
bytes a row (the cosines so far), one block of rows, and one tile of products; faiss holds its own block, and which
lists each row looks at: 384 bytes a row.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridpar import kernels
from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group
from hybridpar.partition.layout import Layout

log = logging.getLogger("hybridpar")

SEARCHES = ("exact", "faiss")
_TILE = 16 << 20  # bytes of a tile of products, and of a block of rows where the search is exact
_QUERIES = 512
_IVF_BLOCK = 128 << 20  # bytes of a block of rows in an index
_IVF_QUERIES = 4096
_PROBES = 32  # lists looked into for each row


@dataclass(frozen=True)
class GraphPolicy:
    """What a sampler wants of the class graph.

    Attributes:
        neighbors: k, how many of each class.
        every: steps after which it is built anew.
        search: how neighbours are found.
    """

    neighbors: int
    every: int
    search: Literal["exact", "faiss"]

    def unavailable(self) -> ImportError | None:
        """Why this machine cannot build it."""
        if self.search != "faiss":
            return None
        try:
            importlib.import_module("faiss")
        except ImportError as error:
            return ImportError(
                f"search='faiss': expected the package faiss, got none that loads ({error}); "
                "pip install 'hybridpar[faiss]', or use search='exact'"
            )
        return None

    def empty(self, rows: int, classes: int) -> Tensor:
        """The graph of ``rows`` classes before it is built: [rows, min(k, classes - 1)] of -1."""
        kind = torch.int32 if classes <= torch.iinfo(torch.int32).max else torch.int64
        return torch.full((rows, min(self.neighbors, classes - 1)), -1, dtype=kind)


def nearest_rows(group: Group, layout: Layout, graph: Tensor, labels_B: Tensor) -> Tensor:
    """Collective: rows of this rank that are neighbours of the batch's classes.

    Args:
        graph: [n, k] class ids, -1 for none.
        labels_B: int64, the same on every rank; labels below 0 are of no class.

    Returns:
        int64 [m] on the CPU, none twice, the nearest first: first neighbours of all classes, then second ones. Classes
        of the batch may be among them.
    """
    classes = torch.unique(labels_B).cpu()
    ranks, rows = layout.locate(classes[classes >= 0])
    sizes = torch.bincount(ranks, minlength=group.size).tolist()
    mine = rows[ranks == group.rank].to(graph.device)
    by_rank = group.all_gather(graph[mine], sizes).cpu()
    by_class = torch.empty_like(by_rank)
    by_class[torch.argsort(ranks, stable=True)] = by_rank
    ids = by_class.T.flatten().long()
    ranks, rows = layout.locate(ids[ids >= 0])
    near = rows[ranks == group.rank].numpy()
    _, first = np.unique(near, return_index=True)
    return torch.from_numpy(near[np.sort(first)])


@torch.no_grad()
def build_graph(group: Group, layout: Layout, weight: Tensor, graph: Tensor, policy: GraphPolicy) -> None:
    """Collective: fill ``graph`` [n, k] with the nearest classes of each row, the nearest first.

    Equal cosines are in no particular order, and cosines are equal or not by the rounding of the products. An index of
    faiss may miss neighbours; where it finds fewer than k, the rest is -1.

    Args:
        weight: rows [n, D] of this rank.

    Raises:
        NonFiniteError: rows hold NaN or Inf; on every rank.
    """
    started = time.monotonic()
    search: _Search = _Exact(weight) if policy.search == "exact" else _Ivf(group, layout, weight)
    own = layout.class_ids(group.rank).to(weight.device, graph.dtype)
    cosines = torch.full(graph.shape, -torch.inf, dtype=search.dtype, device=graph.device)
    graph.fill_(-1)
    for block in _blocks(group, layout, weight, search.block_rows(group.size)):
        search.load(block.unit_MD)
        ids_M = block.ids_M.to(graph.device, graph.dtype)
        # One more than k: each row finds itself.
        wanted = min(graph.shape[1] + 1, len(ids_M))
        for begin in range(0, len(weight), search.queries):
            span = slice(begin, min(begin + search.queries, len(weight)))
            found, places = search.best(span, wanted)
            ids = torch.where(places >= 0, ids_M[places.clamp(min=0)], -1)
            found.masked_fill_((ids < 0) | (ids == own[span, None]), -torch.inf)
            _keep_best(cosines[span], graph[span], found, ids)
    graph.masked_fill_(cosines == -torch.inf, -1)
    if group.rank == 0:
        took = time.monotonic() - started
        log.info("class graph: %d nearest of %d classes in %.1f s", graph.shape[1], layout.num_classes, took)


def _keep_best(cosines_CK: Tensor, ids_CK: Tensor, more: Tensor, more_ids: Tensor) -> None:
    """In place: the best k of what there was and what there is more."""
    all_ids = torch.cat([ids_CK, more_ids], dim=1)
    best, places = torch.topk(torch.cat([cosines_CK, more], dim=1), cosines_CK.shape[1], dim=1)
    cosines_CK.copy_(best)
    ids_CK.copy_(all_ids.gather(1, places))


class _Block(NamedTuple):
    """Rows [M, D] of all ranks, scaled to length 1, and their class ids [M]."""

    unit_MD: Tensor
    ids_M: Tensor


def _blocks(group: Group, layout: Layout, weight: Tensor, size: int) -> Iterator[_Block]:
    """Collective: all rows of all ranks, at most ``size`` of each rank at a time."""
    for begin in range(0, max(layout.sizes), size):
        spans = [(min(begin, rows), min(begin + size, rows)) for rows in layout.sizes]
        numbers = [torch.arange(first, last) for first, last in spans]
        yield _gathered(group, layout, weight, numbers)


def _gathered(group: Group, layout: Layout, weight: Tensor, numbers: list[Tensor]) -> _Block:
    """Collective: the given rows (int64, on the CPU) of each rank."""
    sizes = [len(rows) for rows in numbers]
    rows_MD = group.all_gather(weight.detach()[numbers[group.rank].to(weight.device)], sizes)
    finite = rows_MD.isfinite().all(dim=1)
    if not bool(finite.all()):  # everyone sees the same rows
        bad = [rank for rank, part in enumerate(finite.split(sizes)) if not bool(part.all())]
        raise NonFiniteError("rows of the head", tuple(bad), "found as the class graph was built")
    ids_M = torch.cat([layout.class_ids(rank, rows) for rank, rows in enumerate(numbers)])
    return _Block(kernels.unit_rows(rows_MD.to(kernels.exact_dtype(weight.dtype)))[0], ids_M)


class _Search(ABC):
    """Finds, for rows of this rank, the best of a block.

    Attributes:
        queries: rows looked up at a time.
        dtype: of what they are compared by: cosines, each row's multiplied by some number of its own.
    """

    queries: int
    dtype: torch.dtype

    @abstractmethod
    def block_rows(self, ranks: int) -> int:
        """Rows of each rank in a block."""

    @abstractmethod
    def load(self, unit_MD: Tensor) -> None:
        """Make this the block."""

    @abstractmethod
    def best(self, span: slice, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` best of the block for each row of ``span``, [C, count], and their places in it, or -1."""


class _Exact(_Search):
    """All products. The rows looked up need no scaling: it would not change their order."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.dtype = weight.detach(), kernels.exact_dtype(weight.dtype)
        self._unit_DM = self._products = weight.new_empty(0, dtype=self.dtype)
        self.queries = _QUERIES

    def block_rows(self, ranks: int) -> int:
        most = min(_TILE // self._weight.shape[1], _TILE // self.queries) // self.dtype.itemsize
        return max(1, most // ranks)

    def load(self, unit_MD: Tensor) -> None:
        self._unit_DM = unit_MD.T
        self._products = unit_MD.new_empty(min(self.queries, len(self._weight)), len(unit_MD))

    def best(self, span: slice, count: int) -> tuple[Tensor, Tensor]:
        rows_CD = self._weight[span].to(self.dtype)
        # Into memory that is there already, which also keeps autocast away.
        products_CM = torch.mm(rows_CD, self._unit_DM, out=self._products[: len(rows_CD)])
        return torch.topk(products_CM, count, dim=1)


class _Ivf(_Search):
    """Only products with rows that lie near the same centres: faiss's inverted lists.

    Centres come from a sample of all rows, and each row's nearest centres are found once. Collective.
    """

    def __init__(self, group: Group, layout: Layout, weight: Tensor) -> None:
        faiss: Any = importlib.import_module("faiss")
        self._weight, self.dtype, self.queries = weight.detach(), torch.float32, _IVF_QUERIES
        lists = min(4 * math.isqrt(layout.num_classes), layout.num_classes)
        self._index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(weight.shape[1]), weight.shape[1], lists, faiss.METRIC_INNER_PRODUCT
        )
        self._index.cp.min_points_per_centroid = 1  # no warning where classes are few
        self._index.nprobe = min(_PROBES, lists)
        block = _IVF_BLOCK // (4 * weight.shape[1])
        self._index.train(_floats(_sample(group, layout, weight, min(40 * lists, max(10 * lists, block)))))
        spans = (slice(begin, begin + self.queries) for begin in range(0, len(weight), self.queries))
        self._centres = [self._index.quantizer.search(self._rows(span), self._index.nprobe) for span in spans]

    def block_rows(self, ranks: int) -> int:
        return max(1, _IVF_BLOCK // (4 * self._weight.shape[1]) // ranks)

    def load(self, unit_MD: Tensor) -> None:
        self._index.reset()
        self._index.add(_floats(unit_MD))

    def best(self, span: slice, count: int) -> tuple[Tensor, Tensor]:
        nearness, centres = self._centres[span.start // self.queries]
        products, places = self._index.search_preassigned(self._rows(span), count, centres, nearness)
        device = self._weight.device
        return torch.from_numpy(products).to(device), torch.from_numpy(places).to(device)

    def _rows(self, span: slice) -> np.ndarray[Any, np.dtype[np.float32]]:
        return _floats(kernels.unit_rows(self._weight[span].float())[0])


def _sample(group: Group, layout: Layout, weight: Tensor, count: int) -> Tensor:
    """Collective: at least ``count`` rows, or all, evenly out of those of every rank; [M, D] of length 1."""
    share = min(1.0, count / layout.num_classes)
    numbers = []
    for rows in layout.sizes:
        taken = math.ceil(share * rows)
        numbers.append(torch.arange(taken) * rows // max(taken, 1))
    return _gathered(group, layout, weight, numbers).unit_MD


def _floats(rows: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As faiss takes them."""
    array: np.ndarray[Any, np.dtype[np.float32]] = rows.float().contiguous().cpu().numpy()
    return array
