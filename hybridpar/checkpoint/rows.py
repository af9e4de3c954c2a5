"""Head shards: rows by class id, so that any number of ranks and any rule can read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybridpar.partition import Layout

CLASS_IDS = "class_ids"
CLASS_GRAPH = "class_graph"
_BLOCK = 1 << 16


def shard_name(rank: int, size: int) -> str:
    """File name of one shard."""
    return f"head-{rank:05d}-of-{size:05d}.safetensors"


class RowFiles:
    """The shards of a checkpoint, as one rank reads them, block by block.

    Args:
        path: the checkpoint directory.
        shards: file names.
        layout, rank: which classes are wanted, in which order.

    Raises:
        ValueError: classes of this rank are in no shard, or in two.
    """

    def __init__(self, path: Path, shards: Sequence[str], layout: Layout, rank: int) -> None:
        self._path, self._shards, self._layout, self._rank = path, shards, layout, rank
        times = torch.zeros(layout.rows(rank), dtype=torch.int8)
        for shard in shards:
            with safe_open(path / shard, framework="pt") as file:
                for _, rows in self._blocks(file):
                    times.index_add_(0, rows, times.new_ones(len(rows)))
        if bool((times != 1).any()):
            row = int(torch.nonzero(times != 1)[0])
            class_id = int(layout.class_ids(rank, torch.tensor([row])))
            raise ValueError(f"{path}: expected every class in one shard, got class {class_id} in {int(times[row])}")

    def read(
        self, like: Mapping[str, tuple[torch.Size, torch.dtype]], into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The rows of this rank; nothing else is read.

        Args:
            like: shape of a row and dtype, for each tensor wanted.
            into: tensors by name, which are filled where they have that shape, as their own dtype demands, so that no
                second one is needed; those on a device, or of another shape, are left alone.

        Returns:
            A tensor [rows of the rank, ...] for each name in ``like``.
        """
        count = self._layout.rows(self._rank)
        found = {}
        for name, (shape, dtype) in like.items():
            given = None if into is None else into.get(name)
            fits = given is not None and given.is_cpu and given.shape == (count, *shape)
            found[name] = given if given is not None and fits else torch.empty((count, *shape), dtype=dtype)
        for shard in self._shards:
            with safe_open(self._path / shard, framework="pt") as file:
                sources = {name: file.get_slice(name) for name in found}
                for theirs, mine in self._blocks(file):
                    begin, end = int(theirs[0]), int(theirs[-1]) + 1
                    for name, target in found.items():
                        target[mine] = sources[name][begin:end][theirs - begin].to(target.dtype)
        return found

    def _blocks(self, file: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of a shard that this rank wants, ascending and at most a block apart, and which of its rows they are."""
        class_ids = file.get_slice(CLASS_IDS)
        for begin in range(0, class_ids.get_shape()[0], _BLOCK):
            ranks, rows = self._layout.locate(class_ids[begin : begin + _BLOCK])
            theirs = torch.nonzero(ranks == self._rank).flatten()
            if len(theirs):
                yield begin + theirs, rows[theirs]


def row_likes(described: dict[str, Any], optimizer_names: Collection[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What the manifest says of the tensors in the shards, as ``read_rows`` takes it.

    Args:
        optimizer_names: optimizers whose state is wanted as well as the parameters.
    """
    return {
        name: (torch.Size(shape), getattr(torch, dtype))
        for name, (shape, dtype) in described.items()
        if "/" not in name or name.split("/")[0] in optimizer_names
    }


def describe_rows(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Shape of a row and dtype of each tensor in a shard."""
    return {
        name: [list(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()
    }
