"""One global order of samples, of which every step takes the next global batch and each rank its slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridpar.comm.group import Group

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 4


class GlobalOrder:
    """Shuffled sample indices; a place in them is one number, whatever the number of ranks.

    Each epoch is a permutation of [0, num_samples) that is computed, not stored: a Feistel network over the next
    power of four, where values beyond the end are walked on (cycle walking, Black and Rogaway 2002). So it costs
    nothing at 10^9 samples, and any position is reached at once after a resume. A batch at the end of an epoch is
    filled from the next one, so all global batches are equal.

    Args:
        num_samples: N, at least 1.
        seed: of the order; the same on all ranks.

    Raises:
        ValueError: no samples.
    """

    def __init__(self, num_samples: int, *, seed: int = 0) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples: expected at least 1, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed
        self._half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)

    def take(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Sample indices and their epochs, int64 [count], from ``position`` (samples taken before) on."""
        if position < 0 or count < 0:
            raise ValueError(f"expected position and count of at least 0, got {position} and {count}")
        epochs, places = np.divmod(np.arange(position, position + count, dtype=np.int64), self.num_samples)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._permute(places[chosen], int(epoch))
        return indices, epochs

    def take_local(self, position: int, global_count: int, group: Group) -> tuple[Int64Array, Int64Array]:
        """This rank's part of ``take(position, global_count)``: contiguous, sizes differing by at most one."""
        first = global_count * group.rank // group.size
        last = global_count * (group.rank + 1) // group.size
        return self.take(position + first, last - first)

    def _permute(self, places: Int64Array, epoch: int) -> Int64Array:
        entropy = [self.seed & 0xFFFF_FFFF_FFFF_FFFF, epoch]
        words = np.random.SeedSequence(entropy).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
        values = self._feistel(places.astype(np.uint64), words)
        while (beyond := values >= self.num_samples).any():
            values[beyond] = self._feistel(values[beyond], words)
        return values.astype(np.int64)

    def _feistel(self, values: UInt64Array, keys: UInt64Array) -> UInt64Array:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E37_79B9_7F4A_7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58_476D_1CE4_E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right
