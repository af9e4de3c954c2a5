"""Compressed images to and from uint8 arrays."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

UInt8Array = npt.NDArray[np.uint8]


def check_image_shape(image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (channels, height, width) when it is 1 or 3 channels and positive sides, else raise ValueError."""
    channels, height, width = image_shape
    if channels not in (1, 3) or height < 1 or width < 1:
        raise ValueError(f"expected an image shape (1 or 3 channels, height, width), got {image_shape}")
    return channels, height, width


def decode_image(data: bytes, image_shape: tuple[int, int, int], *, origin: str) -> UInt8Array:
    """Decode JPEG, PNG or another format that Pillow reads, to uint8 [C, H, W].

    Channels: 3 is RGB, 1 is gray (ITU-R 601-2 luma). An image of another size is resized with an antialiasing
    bilinear filter, without keeping its aspect.

    Raises:
        ValueError: the bytes are not a whole image; names `origin`.
    """
    channels, height, width = image_shape
    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{origin}: expected a whole JPEG or PNG image, got {len(data)} bytes: {error}") from error
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def stored_size(data: bytes, *, origin: str) -> tuple[int, int]:
    """(height, width) of a compressed image, from its header. Raises ValueError naming `origin` when it has none."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return opened.height, opened.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{origin}: expected a JPEG or PNG image, got {len(data)} bytes: {error}") from error


def encode_png(pixels: UInt8Array) -> bytes:
    """Encode uint8 [C, H, W], one or three channels, as PNG (lossless)."""
    image = Image.fromarray(pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0))
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()
