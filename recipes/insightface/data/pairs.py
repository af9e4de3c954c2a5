"""Verification pairs: two images, same identity or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.insightface.data.dataset import IdentityDataset

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VerificationPairs:
    """P pairs over M images.

    Attributes:
        images: uint8 [M, C, H, W].
        first, second: int64 [P], rows of `images`.
        same: bool [P], True where both images show one identity.
        name: for reports.
    """

    images: Tensor
    first: Tensor
    second: Tensor
    same: Tensor
    name: str

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise TypeError(f"expected images uint8 [M, C, H, W], got {self.images.dtype} {list(self.images.shape)}")
        for rows in (self.first, self.second):
            if rows.dtype != torch.int64 or rows.shape != self.same.shape:
                raise TypeError(f"expected int64 rows {list(self.same.shape)}, got {rows.dtype} {list(rows.shape)}")
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.images):
                raise ValueError(
                    f"expected rows in [0, {len(self.images)}), got {int(rows.min())} .. {int(rows.max())}"
                )
        if self.same.dtype != torch.bool or self.same.dim() != 1:
            raise TypeError(f"expected same as bool [P], got {self.same.dtype} {list(self.same.shape)}")

    def __len__(self) -> int:
        return len(self.same)


def draw_pairs(labels: Int64Array, count: int, *, seed: int) -> tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]:
    """Draw distinct pairs of images, half of one identity and half of two, alternating.

    Where the labels do not allow `count` distinct pairs, as many as possible are drawn, still balanced.

    Args:
        labels: int64 [M].
        count: pairs wanted, at least 2.
        seed: of the draw.

    Returns:
        first, second (int64 [P], first < second) and same (bool [P]).

    Raises:
        ValueError: no identity has two images, or there is only one identity.
    """
    order = np.argsort(labels, kind="stable").astype(np.int64)
    sizes = np.unique(labels, return_counts=True)[1].astype(np.int64)
    same_total = int((sizes * (sizes - 1) // 2).sum())
    other_total = len(labels) * (len(labels) - 1) // 2 - same_total
    half = min(count // 2, same_total, other_total)
    if half < 1:
        raise ValueError(
            f"expected at least two pairs, and identities that allow them, got {count} pairs wanted from {len(sizes)} "
            f"identities with {len(labels)} images; two identities and one of two images are the least"
        )
    rng = np.random.default_rng(seed)
    same_pairs = _same_pairs(order, sizes, rng.choice(same_total, half, replace=False))
    other_pairs = _other_pairs(order, sizes, rng.choice(other_total, half, replace=False))
    pairs = np.sort(np.stack([same_pairs, other_pairs], axis=1).reshape(-1, 2), axis=1)
    return pairs[:, 0].copy(), pairs[:, 1].copy(), np.tile(np.array([True, False]), half)


def pairs_from_dataset(
    dataset: IdentityDataset, indices: Sequence[int] | Int64Array, count: int, *, seed: int, name: str
) -> VerificationPairs:
    """Draw pairs (see `draw_pairs`) among the given images of a set and decode those that are used."""
    chosen = np.asarray(indices, dtype=np.int64)
    first, second, same = draw_pairs(dataset.labels(chosen).numpy(), count, seed=seed)
    used, rows = np.unique(np.concatenate([first, second]), return_inverse=True)
    images, _ = dataset.__getitems__(chosen[used])
    return VerificationPairs(
        images=images,
        first=torch.from_numpy(rows[: len(first)].astype(np.int64)),
        second=torch.from_numpy(rows[len(first) :].astype(np.int64)),
        same=torch.from_numpy(same),
        name=name,
    )


def split_identities(num_identities: int, verification: float, *, seed: int) -> tuple[Int64Array, Int64Array]:
    """Split identity numbers into those to train on and those kept for verification, both ascending.

    Args:
        num_identities: identities in all.
        verification: below 1 a fraction, else a count.
        seed: of the choice.

    Raises:
        ValueError: fewer than two identities would be left on either side, or a count that is not whole.
    """
    kept = round(verification * num_identities) if verification < 1 else int(verification)
    if verification >= 1 and kept != verification:
        raise ValueError(
            f"expected a fraction below 1 or a whole number of verification identities, got {verification}"
        )
    if not 2 <= kept <= num_identities - 2:
        raise ValueError(
            f"expected at least 2 identities to verify with and 2 to train on, got {kept} of {num_identities} for "
            f"verification"
        )
    order = np.random.default_rng(seed).permutation(num_identities).astype(np.int64)
    return np.sort(order[kept:]), np.sort(order[:kept])


def _same_pairs(order: Int64Array, sizes: Int64Array, ranks: Int64Array) -> Int64Array:
    """The pairs at the given ranks in the list of all same-identity pairs, identity by identity: int64 [P, 2]."""
    totals = sizes * (sizes - 1) // 2
    ends = np.cumsum(totals)
    starts = np.cumsum(sizes) - sizes
    groups = np.searchsorted(ends, ranks, side="right")
    within = ranks - (ends - totals)[groups]
    # Pair number q of a group is (low, high) with q = high * (high - 1) / 2 + low; the float64 root is exact enough for
    # identities of up to 2**26 images.
    high = ((1.0 + np.sqrt(1.0 + 8.0 * within)) / 2.0).astype(np.int64)
    low = within - high * (high - 1) // 2
    return np.stack([order[starts[groups] + low], order[starts[groups] + high]], axis=1)


def _other_pairs(order: Int64Array, sizes: Int64Array, ranks: Int64Array) -> Int64Array:
    """The pairs at the given ranks in the list of all pairs of two identities, image by image: int64 [P, 2]."""
    # Sorted by identity, an image pairs with all that come after its own identity.
    next_identity = np.repeat(np.cumsum(sizes), sizes)
    later = len(order) - next_identity
    ends = np.cumsum(later)
    places = np.searchsorted(ends, ranks, side="right")
    within = ranks - (ends - later)[places]
    return np.stack([order[places], order[next_identity[places] + within]], axis=1)
