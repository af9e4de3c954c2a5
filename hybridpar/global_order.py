"""One global order of samples, of which every step takes the next global batch and each rank its slice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridpar.comm.group import Group

_ROUNDS = 4


class GlobalOrder:
    """Shuffled sample indices whose position is one number, whatever the number of ranks.

    Each epoch is a permutation of [0, num_samples) that is computed, not stored: a Feistel network over the next
    power of four, with values beyond the end walked on (cycle walking, Black and Rogaway 2002). So it costs nothing
    at 10^9 samples, and any position can be reached at once after a resume. The last, smaller batch of an epoch is
    filled from the next epoch, so all global batches are equal.

    Args:
        num_samples: N, at least 1.
        global_batch: samples of one step over all ranks; at least one for each rank.
        seed: of the order.
    """

    def __init__(self, num_samples: int, global_batch: int, *, seed: int = 0) -> None:
        if num_samples < 1 or global_batch < 1:
            raise ValueError(f"expected at least one sample and a batch of one, got {num_samples} and {global_batch}")
        self.num_samples, self.global_batch, self.seed = num_samples, global_batch, seed
        self._half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)

    def epoch(self, step: int) -> float:
        """Epochs done before step ``step``."""
        return step * self.global_batch / self.num_samples

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        """Sample indices and their epochs, int64 [global_batch], of step ``step`` (counted from 0)."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs, places = np.divmod(positions, self.num_samples)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._permute(places[chosen], int(epoch))
        return indices, epochs

    def local_batch(self, step: int, group: Group) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        """This rank's slice of ``batch(step)``: contiguous, sizes differing by at most one."""
        indices, epochs = self.batch(step)
        bounds = [self.global_batch * rank // group.size for rank in range(group.size + 1)]
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        return indices[mine], epochs[mine]

    def steps(self, first: int, last: int, group: Group) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:  # type: ignore[type-arg]
        """(step, indices, epochs) of this rank for the steps in [first, last)."""
        return ((step, *self.local_batch(step, group)) for step in range(first, last))

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:  # type: ignore[type-arg]
        keys = np.random.default_rng([self.seed & 0xFFFF_FFFF_FFFF_FFFF, epoch]).integers(
            0, 2**63, size=_ROUNDS, dtype=np.uint64
        )
        values = self._feistel(places.astype(np.uint64), keys)
        while (beyond := values >= self.num_samples).any():
            values[beyond] = self._feistel(values[beyond], keys)
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E37_79B9_7F4A_7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58_476D_1CE4_E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right
