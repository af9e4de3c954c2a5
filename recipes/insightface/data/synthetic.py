"""Images made from the identity number: any number of identities, no table, no storage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.common.hashing import bell, hash_counters
from recipes.insightface.data.dataset import Batch, IdentityDataset, Indices, checked_indices
from recipes.insightface.data.decode import check_image_shape

_WAVES = 6
_IDENTITY_STREAM, _IMAGE_STREAM, _TABLE_STREAM = 1, 2, 3


class SyntheticDataset(IdentityDataset):
    """A smooth random pattern per identity, with a deviation and noise of its own per image.

    Image i shows identity i // images_per_identity of those that are shown. The pattern is a sum of 6 x 6 cosine waves
    per channel whose coefficients are hashes of (seed, identity); an image adds `variation` times as strong
    coefficients hashed from its own number, and noise.

    Args:
        num_classes: identities, 1 .. 2**62 / images_per_identity.
        images_per_identity: at least 1.
        image_shape: (1 or 3, height, width).
        variation: strength of an image's own pattern relative to that of its identity.
        noise: standard deviation of the pixel noise, in gray levels of 255.
        seed: of all patterns; must be the same on all ranks.
        shown: how many of the identities have images, evenly spread; None: all.

    Raises:
        ValueError: arguments outside these ranges.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        images_per_identity: int = 20,
        image_shape: tuple[int, int, int] = (3, 112, 112),
        variation: float = 0.5,
        noise: float = 16.0,
        seed: int = 0,
        shown: int | None = None,
    ) -> None:
        if num_classes < 1 or images_per_identity < 1 or num_classes * images_per_identity > 2**62:
            raise ValueError(
                f"expected at least one identity and one image each, and at most 2**62 images, got {num_classes} x "
                f"{images_per_identity}"
            )
        if not (0 <= variation <= 1 and 0 <= noise <= 128):
            raise ValueError(f"expected variation in [0, 1] and noise in [0, 128], got {variation} and {noise}")
        if shown is not None and not 1 <= shown <= num_classes:
            raise ValueError(f"expected 1 to {num_classes} identities that are shown, got {shown}")
        channels, height, width = check_image_shape(image_shape)
        self.num_classes, self._shown = num_classes, num_classes if shown is None else shown
        self.images_per_identity = images_per_identity
        self.image_shape = (channels, height, width)
        self._seed = seed
        self._variation = round(variation * 64)
        self._rows = _cosines(height)
        self._columns = _cosines(width)
        # Noise is a stretch of one table, at an offset hashed per image: a copy costs less than a hash per pixel.
        words = hash_counters(seed, _TABLE_STREAM, np.arange(1 << 16))
        self._noise_table = np.resize(bell(words) * np.float32(noise), (1 << 16) + channels * height * width)

    def __len__(self) -> int:
        return self._shown * self.images_per_identity

    def labels(self, indices: Indices) -> Tensor:
        return torch.from_numpy(self._identities(checked_indices(indices, len(self))))

    def _identities(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        places = numbers // self.images_per_identity
        # place * classes // shown, whose product might not fit into 64 bits.
        whole, rest = divmod(self.num_classes, self._shown)
        return places * whole + places * rest // self._shown

    def __getitems__(self, indices: Indices) -> Batch:
        numbers = checked_indices(indices, len(self))
        labels = self._identities(numbers)
        patterns = self._patterns(labels, numbers)
        offsets = (hash_counters(self._seed, _IMAGE_STREAM, numbers) >> np.uint64(48)).astype(np.int64)
        for pattern, offset in zip(patterns, offsets, strict=True):
            pattern += self._noise_table[offset : offset + pattern.size].reshape(pattern.shape)
        np.clip(np.rint(patterns, out=patterns), 0, 255, out=patterns)
        return torch.from_numpy(patterns.astype(np.uint8)), torch.from_numpy(labels)

    def _patterns(self, labels: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The patterns without noise, in gray levels: float32 [B, C, H, W].

        Coefficients and cosines are small integers, so every sum below 2**24 is exact in float32 in any order: a
        matrix product cannot make an image depend on its batch or on the machine.
        """
        channels, height, width = self.image_shape
        own = self._coefficients(_IDENTITY_STREAM, labels)
        extra = self._coefficients(_IMAGE_STREAM, numbers) * self._variation // 64
        waves = (own + extra).astype(np.float32).reshape(-1, _WAVES, _WAVES)
        # 36 waves x (2 * 100) x 32 x 32 = 7.4e6 < 2**24
        sums: npt.NDArray[np.float32] = self._rows @ (waves.reshape(-1, _WAVES) @ self._columns.T).reshape(
            -1, _WAVES, width
        )
        # Uniform coefficients of deviation 58 on waves of mean square 1/4 (of 32 x 32) have deviation 58 * 512 * 6.
        sums *= np.float32(48.0 / (58.0 * 512.0 * 6.0))
        sums += np.float32(128.0)
        return sums.reshape(-1, channels, height, width)

    def _coefficients(self, stream: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Integers in [-100, 100] per number, channel and wave: int64 [B, C * 36]; the constant wave is 0."""
        count = self.image_shape[0] * _WAVES * _WAVES
        words = hash_counters(self._seed, stream, numbers[:, None], np.arange(count)[None, :])
        values = ((words >> np.uint64(32)) % np.uint64(201)).astype(np.int64) - 100
        values[:, :: _WAVES * _WAVES] = 0
        return values


def _cosines(side: int) -> npt.NDArray[np.float32]:
    """The first cosine waves over a side, rounded to integers in [-32, 32]: float32 [side, waves]."""
    places = (np.arange(side) + 0.5) / side
    waves: npt.NDArray[np.float64] = np.rint(32.0 * np.cos(np.pi * places[:, None] * np.arange(_WAVES)[None, :]))
    return waves.astype(np.float32)
