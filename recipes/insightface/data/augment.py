"""Mild random changes to a batch of images, each a pure function of (seed, epoch, sample id)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.common.hashing import bell, hash_counters, uniform


@dataclass(frozen=True)
class AugmentPolicy:
    """How much images are changed; every field at 0 switches that change off, so `AugmentPolicy()` is none at all.

    Attributes:
        shift: largest move along each axis, as a fraction of the side.
        rotate: largest turn to either side, in degrees.
        scale: largest relative change of size; 0.1 draws factors from 1/1.1 to 1.1, log-uniformly.
        shear: largest horizontal shear, as a tangent.
        flip: probability of a left-right mirror image. For faces, not for characters.
        brightness: largest change of all pixels, as a fraction of the full range.
        contrast: largest relative change of the deviation from middle gray.
        noise: standard deviation of the noise of each pixel, as a fraction of the full range.
        erase: probability that a rectangle is painted gray.
        erase_side: largest side of that rectangle, as a fraction of the image's side.
    """

    shift: float = 0.0
    rotate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0
    erase: float = 0.0
    erase_side: float = 0.4

    def __post_init__(self) -> None:
        for name in ("shift", "rotate", "scale", "shear", "brightness", "contrast", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} of at least 0, got {getattr(self, name)}")
        for name in ("flip", "erase", "erase_side"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected {name} in [0, 1], got {getattr(self, name)}")

    @property
    def moves(self) -> bool:
        """Whether pixels change their place."""
        return any((self.shift, self.rotate, self.scale, self.shear, self.flip))


GLYPH_POLICY = AugmentPolicy(shift=0.06, rotate=8.0, scale=0.12, shear=0.12, brightness=0.1, contrast=0.2, noise=0.03)
FACE_POLICY = AugmentPolicy(shift=0.03, rotate=5.0, scale=0.05, flip=0.5, brightness=0.1, contrast=0.15)


class _Draw(IntEnum):
    """The number of each random value of a sample."""

    SHIFT_X = 0
    SHIFT_Y = 1
    ROTATE = 2
    SCALE = 3
    SHEAR = 4
    FLIP = 5
    BRIGHTNESS = 6
    CONTRAST = 7
    ERASE = 8
    ERASE_HEIGHT = 9
    ERASE_WIDTH = 10
    ERASE_TOP = 11
    ERASE_LEFT = 12


_NOISE_STREAM = 0x6E6F697365


def normalize(images: Tensor) -> Tensor:
    """uint8 images of any shape to float32 in [-1, 1]: 0 becomes -1, 255 becomes 1. Raises TypeError otherwise."""
    if images.dtype != torch.uint8:
        raise TypeError(f"expected uint8 images, got {images.dtype}")
    return images.to(torch.float32).div_(127.5).sub_(1.0)


def augment(images: Tensor, sample_ids: Tensor, *, seed: int, epoch: int, policy: AugmentPolicy) -> Tensor:
    """Normalise a batch and change it at random.

    Each random value is a hash of (seed, epoch, sample id, number of the draw), so a sample's result does not depend
    on its batch, its rank or the number of ranks.

    Args:
        images: uint8 [B, C, H, W].
        sample_ids: int64 [B], one number per sample, the same wherever the sample is met.
        seed: of the run.
        epoch: pass over the data; another epoch changes a sample in another way.
        policy: what is changed and how much.

    Returns:
        float32 [B, C, H, W] in [-1, 1], on the device of the images.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that do not belong together.
    """
    if images.dim() != 4 or sample_ids.shape != images.shape[:1]:
        raise ValueError(
            f"expected images [B, C, H, W] and sample ids [B], got {list(images.shape)} and {list(sample_ids.shape)}"
        )
    if sample_ids.dtype != torch.int64:
        raise TypeError(f"expected int64 sample ids, got {sample_ids.dtype}")
    pixels = normalize(images)
    if policy == AugmentPolicy() or len(images) == 0:
        return pixels
    ids = sample_ids.cpu().numpy()[:, None]
    draws = uniform(seed, epoch, ids, np.arange(len(_Draw))[None, :])
    if policy.moves:
        grid = _sampling_grid(draws, policy, images.shape[2], images.shape[3]).to(pixels.device)
        pixels = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if policy.contrast:
        pixels = pixels * _column(1.0 + policy.contrast * _signed(draws, _Draw.CONTRAST), pixels)
    if policy.brightness:
        # The normalised range is 2 wide.
        pixels = pixels + _column(2.0 * policy.brightness * _signed(draws, _Draw.BRIGHTNESS), pixels)
    if policy.noise:
        words = hash_counters(seed, _NOISE_STREAM, epoch, ids, np.arange(pixels[0].numel())[None, :])
        noise = torch.from_numpy(bell(words)).view(pixels.shape).to(pixels.device)
        pixels = pixels + noise.mul_(2.0 * policy.noise)
    if policy.erase:
        erased = torch.from_numpy(_erased(draws, policy, images.shape[2], images.shape[3])).to(pixels.device)
        pixels = pixels.masked_fill(erased, 0.0)
    return pixels.clamp(-1.0, 1.0)


def _signed(draws: npt.NDArray[np.float64], draw: _Draw) -> npt.NDArray[np.float64]:
    """A column of draws, stretched to [-1, 1)."""
    return 2.0 * draws[:, draw] - 1.0


def _column(values: npt.NDArray[np.float64], like: Tensor) -> Tensor:
    """One float32 value per sample, shaped to broadcast over its pixels."""
    return torch.from_numpy(values.astype(np.float32)).view(-1, 1, 1, 1).to(like.device)


def _sampling_grid(draws: npt.NDArray[np.float64], policy: AugmentPolicy, height: int, width: int) -> Tensor:
    """Where each output pixel is read, as grid_sample wants it: float32 [B, H, W, 2], (x, y) in [-1, 1].

    Written out with elementwise operations: a batched matrix product, as in affine_grid, may round differently for
    another batch size, and a sample must not depend on its batch.
    """
    angle = math.radians(policy.rotate) * _signed(draws, _Draw.ROTATE)
    zoom = np.exp(-math.log1p(policy.scale) * _signed(draws, _Draw.SCALE))
    shear = policy.shear * _signed(draws, _Draw.SHEAR)
    mirror = np.where(draws[:, _Draw.FLIP] < policy.flip, -1.0, 1.0)
    cosine, sine = np.cos(angle) * zoom, np.sin(angle) * zoom
    aspect = height / width
    # Rotation * shear in pixels; the normalised axes of a non-square image have different units, hence the aspect.
    rows = (
        (mirror * cosine, mirror * (cosine * shear - sine) * aspect, mirror * 2.0 * policy.shift, _Draw.SHIFT_X),
        (sine / aspect, sine * shear + cosine, np.ones_like(sine) * 2.0 * policy.shift, _Draw.SHIFT_Y),
    )
    x = ((2.0 * torch.arange(width, dtype=torch.float32) + 1.0) / width - 1.0).view(1, 1, width)
    y = ((2.0 * torch.arange(height, dtype=torch.float32) + 1.0) / height - 1.0).view(1, height, 1)
    grid = torch.empty((len(draws), height, width, 2), dtype=torch.float32)
    for axis, (along_x, along_y, reach, draw) in enumerate(rows):
        of_x, of_y, offset = (
            torch.from_numpy(values.astype(np.float32)).view(-1, 1, 1)
            for values in (along_x, along_y, reach * _signed(draws, draw))
        )
        torch.add(of_x * x, of_y * y + offset, out=grid[..., axis])
    return grid


def _erased(draws: npt.NDArray[np.float64], policy: AugmentPolicy, height: int, width: int) -> npt.NDArray[np.bool_]:
    """True inside the erased rectangle: bool [B, 1, H, W]."""
    inside = []
    for side, size, start in (
        (height, _Draw.ERASE_HEIGHT, _Draw.ERASE_TOP),
        (width, _Draw.ERASE_WIDTH, _Draw.ERASE_LEFT),
    ):
        length = np.ceil(draws[:, size] * policy.erase_side * side)
        first = np.floor(draws[:, start] * (side - length + 1))
        place = np.arange(side)[None, :]
        inside.append((place >= first[:, None]) & (place < (first + length)[:, None]))
    chosen = draws[:, _Draw.ERASE] < policy.erase
    mask: npt.NDArray[np.bool_] = (inside[0] & chosen[:, None])[:, None, :, None] & inside[1][:, None, None, :]
    return mask
