"""Buckets: which tensors travel together. A pure function of what all ranks know."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are sent as one.

    Attributes:
        dtype: of all members.
        members: indices of the tensors, in the order in which they lie in the bucket.
        counts: elements of each member.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.counts)


def plan_buckets(
    counts: Sequence[int], dtypes: Sequence[torch.dtype], order: Sequence[int], limit_bytes: int
) -> tuple[Bucket, ...]:
    """Cut tensors into buckets.

    Args:
        counts, dtypes: of each tensor.
        order: every index once, in the order in which the tensors are expected to be ready.
        limit_bytes: a bucket is closed before it would grow beyond this; a larger tensor has a bucket of its own.

    Returns:
        Buckets in the order in which their last member is expected; tensors keep their order within a dtype.

    Raises:
        ValueError: order is not a permutation, or limit_bytes is below 1.
    """
    if sorted(order) != list(range(len(counts))):
        raise ValueError(f"expected order to name each of {len(counts)} tensors once, got {list(order)[:20]}")
    if limit_bytes < 1:
        raise ValueError(f"expected limit_bytes >= 1, got {limit_bytes}")
    closed: list[tuple[int, Bucket]] = []
    open_members: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    place = {index: position for position, index in enumerate(order)}

    def close(dtype: torch.dtype) -> None:
        members = tuple(open_members.pop(dtype))
        filled[dtype] = 0
        closed.append((place[members[-1]], Bucket(dtype, members, tuple(counts[index] for index in members))))

    for index in order:
        dtype = dtypes[index]
        if filled.get(dtype) and (filled[dtype] + counts[index]) * dtype.itemsize > limit_bytes:
            close(dtype)
        open_members.setdefault(dtype, []).append(index)
        filled[dtype] = filled.get(dtype, 0) + counts[index]
    for dtype in list(open_members):
        close(dtype)
    return tuple(bucket for _, bucket in sorted(closed, key=lambda item: item[0]))


def check_same_tensors(
    group: Group, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> None:
    """Collective: every rank must register the same names, shapes and dtypes in the same order.

    Raises:
        CommunicationError: on every rank, naming the first tensor that differs and what the ranks have.
    """
    mine = [
        f"{name}: {str(dtype).removeprefix('torch.')}{list(shape)}"
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    digests = group.all_gather_json(digest)
    if len(set(digests)) == 1:
        return
    everyone = group.all_gather_json(mine)
    length = max(map(len, everyone))
    columns = ([theirs[i] if i < len(theirs) else "nothing" for theirs in everyone] for i in range(length))
    index, differing = next((i, column) for i, column in enumerate(columns) if len(set(column)) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(differing):
        ranks.setdefault(text, []).append(rank)
    sides = "; ".join(f"{text} on rank{'s' * (len(at) > 1)} {', '.join(map(str, at))}" for text, at in ranks.items())
    raise CommunicationError(
        f"the ranks registered different tensors, first at position {index}: {sides}. "
        "Build the same model on every rank",
        rank=group.rank,
        operation="register",
        tensor=differing[group.rank],
    )
