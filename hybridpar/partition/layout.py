"""Layout: class id <-> (rank, row), for three shapes of partition, none of which holds eight bytes a class.

On every rank the rows lie in ascending order of class id. A layout is a value: it never changes.
"""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Classes handled at a time where a pass over all of them is needed; bounds the temporary memory.
_CHUNK = 1 << 20


class Layout(abc.ABC):
    """A partition of the classes 0 .. num_classes - 1 among the ranks 0 .. num_ranks - 1.

    Made by `Layout.contiguous`, `Layout.striped` or `Layout.from_owners`; not meant to be subclassed elsewhere.
    """

    def __init__(self, num_classes: int, sizes: Sequence[int]) -> None:
        self._num_classes = num_classes
        self._sizes = tuple(sizes)

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> Layout:
        """The first sizes[0] classes on rank 0, the next sizes[1] on rank 1, and so on."""
        return _Contiguous(sizes)

    @staticmethod
    def striped(num_classes: int, num_ranks: int) -> Layout:
        """Class c on rank c % num_ranks, at row c // num_ranks."""
        return _Striped(num_classes, num_ranks)

    @staticmethod
    def from_owners(owners: Sequence[int] | npt.NDArray[Any] | torch.Tensor, num_ranks: int) -> Layout:
        """Class c on rank owners[c]. Holds about 1.25 bytes a class up to 256 ranks, 2.25 up to 65,536.

        Raises:
            TypeError: owners are not integers.
            ValueError: owners are not one-dimensional, or one of them is not a rank.
        """
        return _Owners(_as_owners(owners, num_ranks), num_ranks)

    @property
    def num_classes(self) -> int:
        return self._num_classes

    @property
    def num_ranks(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each rank."""
        return self._sizes

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """ "contiguous", "striped" or "owners"."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held for the mapping."""

    def rows(self, rank: int) -> int:
        """The number of classes of one rank."""
        self._check_rank(rank)
        return self._sizes[rank]

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks and rows of classes, both int64, of the shape and on the device of the ids (int64, any shape).

        Raises:
            TypeError: ids are not int64.
            ValueError: an id is outside 0 .. num_classes - 1.
        """
        _check_numbers(ids, self._num_classes, "class id")
        return self._locate(ids)

    def class_ids(self, rank: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Class ids of the given rows (int64, any shape) of one rank; of all its rows, ascending, where None.

        Raises:
            TypeError: rows are not int64.
            ValueError: no such rank, or a row is outside 0 .. rows(rank) - 1.
        """
        self._check_rank(rank)
        if rows is None:
            return self._all_class_ids(rank)
        _check_numbers(rows, self._sizes[rank], "row")
        return self._class_ids(rank, rows)

    def describe(self) -> dict[str, object]:
        """A short description that JSON can hold; equal descriptions mean equal layouts."""
        return {
            "kind": self.kind,
            "num_classes": self._num_classes,
            "num_ranks": self.num_ranks,
            "sizes": list(self._sizes),
        }

    def __eq__(self, other: object) -> bool:
        """Equal layouts put every class in the same place, whatever they are made of."""
        if not isinstance(other, Layout):
            return NotImplemented
        if self._sizes != other._sizes:
            return False
        if self.kind == other.kind and self.kind != "owners":
            return True
        # Rows follow from the ranks, as they ascend with the class id.
        return all(
            torch.equal(self._locate(ids)[0], other._locate(ids)[0])
            for start in range(0, self._num_classes, _CHUNK)
            for ids in (torch.arange(start, min(start + _CHUNK, self._num_classes)),)
        )

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._sizes[:8])) + (", ..." if self.num_ranks > 8 else "")
        return f"Layout({self.kind}, {self._num_classes} classes on {self.num_ranks} ranks: {shown})"

    @abc.abstractmethod
    def _locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abc.abstractmethod
    def _class_ids(self, rank: int, rows: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def _all_class_ids(self, rank: int) -> torch.Tensor: ...

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"expected a rank from 0 to {self.num_ranks - 1}, got {rank}")


class _Contiguous(Layout):
    kind = "contiguous"

    def __init__(self, sizes: Sequence[int]) -> None:
        sizes = [int(size) for size in sizes]
        if not sizes or min(sizes) < 0:
            raise ValueError(f"expected a size of zero or more classes for each of one or more ranks, got {sizes}")
        super().__init__(sum(sizes), sizes)
        self._ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
        self._starts = self._ends - torch.tensor(sizes, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes + self._starts.nbytes

    def _locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # right=True passes over ranks without classes, which start where they end.
        ranks = torch.searchsorted(self._ends.to(ids.device), ids.contiguous(), right=True)
        return ranks, ids - self._starts.to(ids.device)[ranks]

    def _class_ids(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        return rows + int(self._starts[rank])

    def _all_class_ids(self, rank: int) -> torch.Tensor:
        return torch.arange(int(self._starts[rank]), int(self._ends[rank]))


class _Striped(Layout):
    kind = "striped"

    def __init__(self, num_classes: int, num_ranks: int) -> None:
        if num_classes < 0 or num_ranks < 1:
            raise ValueError(f"expected zero or more classes and one or more ranks, got {num_classes} and {num_ranks}")
        super().__init__(num_classes, [(num_classes - r + num_ranks - 1) // num_ranks for r in range(num_ranks)])

    @property
    def nbytes(self) -> int:
        return 0

    def _locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.div(ids, self.num_ranks, rounding_mode="floor")
        return ids - rows * self.num_ranks, rows

    def _class_ids(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.num_ranks + rank

    def _all_class_ids(self, rank: int) -> torch.Tensor:
        return torch.arange(self._sizes[rank]).mul_(self.num_ranks).add_(rank)


class _Owners(Layout):
    """Note [rows from owners]

    Only the owner of each class is stored, in the smallest unsigned type, cut into blocks; for each block and rank one
    number says how many classes of the rank lie in earlier blocks. The row of a class is that number plus the count of
    its owner earlier in its block; the class of a row is found by bisecting those numbers and then counting in one
    block. Blocks of 16 classes a rank bound the table to 4 / 16 bytes a class (uint32), and the search to one block.
    """

    kind = "owners"

    def __init__(self, owners: npt.NDArray[Any], num_ranks: int) -> None:
        num_classes = len(owners)
        self._block = max(256, 1 << (16 * num_ranks - 1).bit_length())
        blocks = -(-num_classes // self._block)
        self._owners = np.zeros((blocks, self._block), dtype=owners.dtype)
        self._owners.reshape(-1)[:num_classes] = owners
        counts = np.zeros((blocks + 1, num_ranks), dtype=np.uint32 if num_classes < 1 << 32 else np.int64)
        for first in range(0, blocks, max(1, _CHUNK // self._block)):
            part = owners[first * self._block : (first + max(1, _CHUNK // self._block)) * self._block]
            cell = np.arange(len(part)) // self._block * num_ranks + part
            here = -(-len(part) // self._block)
            counts[first + 1 : first + 1 + here] = np.bincount(cell, minlength=here * num_ranks).reshape(here, -1)
        self._before = np.cumsum(counts, axis=0, dtype=counts.dtype, out=counts)
        super().__init__(num_classes, [int(size) for size in self._before[-1]])

    @property
    def nbytes(self) -> int:
        return self._owners.nbytes + self._before.nbytes

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "owners_sha256": self._digest}

    @functools.cached_property
    def _digest(self) -> str:
        """Of the owners as little-endian uint32, so that it does not depend on how they are held."""
        digest = hashlib.sha256()
        flat = self._owners.reshape(-1)[: self.num_classes]
        for start in range(0, self.num_classes, _CHUNK):
            digest.update(flat[start : start + _CHUNK].astype("<u4").tobytes())
        return digest.hexdigest()

    def _locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = ids.detach().reshape(-1).cpu().numpy()
        ranks = self._owners.reshape(-1)[flat]
        rows = np.empty(len(flat), dtype=np.int64)
        for part in self._parts(len(flat)):
            block, place = np.divmod(flat[part], self._block)
            same = self._owners[block] == ranks[part, None]
            same &= np.arange(self._block) < place[:, None]
            rows[part] = self._before[block, ranks[part]] + np.count_nonzero(same, axis=1)
        return _like(ranks.astype(np.int64), ids), _like(rows, ids)

    def _class_ids(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.detach().reshape(-1).cpu().numpy()
        before = np.ascontiguousarray(self._before[:, rank])
        blocks = np.searchsorted(before, flat.astype(before.dtype), side="right") - 1
        ids = np.empty(len(flat), dtype=np.int64)
        for part in self._parts(len(flat)):
            block = blocks[part]
            wanted = flat[part] - before[block]
            nth = np.cumsum(self._owners[block] == rank, axis=1, dtype=np.int32)
            # The first place where the count has passed the wanted number.
            ids[part] = block * self._block + np.argmax(nth > wanted[:, None], axis=1)
        return _like(ids, rows)

    def _all_class_ids(self, rank: int) -> torch.Tensor:
        ids = np.empty(self._sizes[rank], dtype=np.int64)
        flat = self._owners.reshape(-1)[: self.num_classes]
        done = 0
        for start in range(0, self.num_classes, _CHUNK):
            found = np.flatnonzero(flat[start : start + _CHUNK] == rank)
            ids[done : done + len(found)] = found + start
            done += len(found)
        return torch.from_numpy(ids)

    def _parts(self, length: int) -> list[slice]:
        """Slices short enough that one block for each of their elements is at most a chunk."""
        step = max(1, _CHUNK // self._block)
        return [slice(start, start + step) for start in range(0, length, step)]


def owner_dtype(num_ranks: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned type that can hold every rank."""
    return next(kind for kind in (np.uint8, np.uint16, np.uint32) if num_ranks - 1 <= np.iinfo(kind).max)


def as_integers(values: object, what: str) -> npt.NDArray[Any]:
    """Any one-dimensional sequence of integers as an array; `what` names it in errors."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected {what} as a one-dimensional sequence, got shape {array.shape}")
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"expected {what} as integers, got {array.dtype}; convert them with .astype(int)")
    return array


def _as_owners(owners: Sequence[int] | npt.NDArray[Any] | torch.Tensor, num_ranks: int) -> npt.NDArray[Any]:
    if num_ranks < 1:
        raise ValueError(f"expected one or more ranks, got {num_ranks}")
    array = as_integers(owners, "owners")
    if array.size and not (array.min() >= 0 and array.max() < num_ranks):
        first = int(np.flatnonzero((array < 0) | (array >= num_ranks))[0])
        raise ValueError(f"expected ranks from 0 to {num_ranks - 1} as owners, got {array[first]} for class {first}")
    return array.astype(owner_dtype(num_ranks))


def _check_numbers(numbers: torch.Tensor, limit: int, what: str) -> None:
    if numbers.dtype != torch.int64:
        raise TypeError(f"expected {what}s as torch.int64, got {numbers.dtype}; call .long() on them")
    if numbers.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(numbers))
    if low < 0 or high >= limit:
        flat = numbers.reshape(-1)
        position = int(((flat < 0) | (flat >= limit)).nonzero()[0])
        raise ValueError(f"expected each {what} in [0, {limit}), got {int(flat[position])} at position {position}")


def _like(values: npt.NDArray[np.int64], wanted: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).reshape(wanted.shape).to(wanted.device)
