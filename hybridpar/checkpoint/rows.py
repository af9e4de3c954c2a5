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

Places = dict[str, tuple[Tensor, Tensor]]


def shard_name(rank: int, size: int) -> str:
    """File name of one shard."""
    return f"head-{rank:05d}-of-{size:05d}.safetensors"


def read_rows(
    path: Path,
    shards: Sequence[str],
    layout: Layout,
    rank: int,
    like: dict[str, tuple[torch.Size, torch.dtype]],
    into: Mapping[str, Tensor] | None = None,
    places: Places | None = None,
) -> dict[str, Tensor]:
    """The rows that ``layout`` gives to ``rank``, from whichever shards hold them; nothing else is read.

    Args:
        path: the checkpoint directory.
        shards: file names.
        like: shape of a row and dtype, for each tensor wanted.
        into: tensors by name, which are filled where they have that shape, as their own dtype demands, so that no
            second one is needed; those on a device, or of another shape, are left alone. Nothing is written before it
            is known that each class of this rank is there.
        places: what ``locate_rows`` has found, where it was called before.

    Returns:
        A tensor [rows of the rank, ...] for each name in ``like``.

    Raises:
        ValueError: classes of this rank are in no shard, or in two.
    """
    places = locate_rows(path, shards, layout, rank) if places is None else places
    found = {}
    for name, (shape, dtype) in like.items():
        given = None if into is None else into.get(name)
        fits = given is not None and given.is_cpu and given.shape == (layout.rows(rank), *shape)
        found[name] = given if given is not None and fits else torch.empty((layout.rows(rank), *shape), dtype=dtype)
    for shard, (theirs, mine) in places.items():
        with safe_open(path / shard, framework="pt") as file:
            for name, target in found.items():
                source = file.get_slice(name)
                for begin, end, chosen in _spans(theirs):
                    target[mine[chosen]] = source[begin:end][theirs[chosen] - begin].to(target.dtype)
    return found


def locate_rows(path: Path, shards: Sequence[str], layout: Layout, rank: int) -> Places:
    """Where this rank's rows are in each shard, and which they are. Raises as ``read_rows``."""
    places = {}
    times = torch.zeros(layout.rows(rank), dtype=torch.int8)
    for shard in shards:
        with safe_open(path / shard, framework="pt") as file:
            ranks, rows = layout.locate(file.get_tensor(CLASS_IDS))
            theirs = torch.nonzero(ranks == rank).flatten()
            places[shard] = theirs, rows[theirs]
            times[rows[theirs]] += 1
    if bool((times != 1).any()):
        row = int(torch.nonzero(times != 1)[0])
        class_id = int(layout.class_ids(rank, torch.tensor([row])))
        raise ValueError(f"{path}: expected every class in one shard, got class {class_id} in {int(times[row])}")
    return places


def _spans(places: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Stretches of a file, of at most a block, that cover ``places`` (ascending): begin, end, and which places."""
    first = 0
    while first < len(places):
        begin = int(places[first])
        last = int(torch.searchsorted(places, begin + _BLOCK))
        yield begin, int(places[last - 1]) + 1, slice(first, last)
        first = last


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
