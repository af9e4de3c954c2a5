"""Pieces that the backbones share: checks of the image shape, feature-map sizes, initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

SMALLEST_SIDE = 8
"""Height and width below this leave nothing to convolve after three halvings."""

SMALL_IMAGE_SIDE = 64
"""Images with a shorter side than this skip the first halving, so that the last feature map keeps several positions."""


def check_image_shape(image_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width); raise ``ValueError`` where they cannot be an image for these backbones."""
    if len(image_shape) != 3:
        raise ValueError(
            f"expected image_shape as (channels, height, width), got {len(image_shape)} numbers: {tuple(image_shape)}"
        )
    channels, height, width = (int(size) for size in image_shape)
    if channels < 1:
        raise ValueError(f"expected at least one image channel, got image_shape {tuple(image_shape)}")
    if min(height, width) < SMALLEST_SIDE:
        raise ValueError(
            f"expected images of at least {SMALLEST_SIDE} x {SMALLEST_SIDE} pixels, got {height} x {width} (height x "
            "width); resize the images when the data is prepared"
        )
    return channels, height, width


def check_embedding_size(embedding_size: int) -> None:
    """Raise ``ValueError`` for an embedding without elements."""
    if embedding_size < 1:
        raise ValueError(f"expected a positive embedding_size, got {embedding_size}")


def check_width(width: float) -> None:
    """Raise ``ValueError`` for a multiplier that leaves no channels."""
    if not 0 < width < math.inf:
        raise ValueError(f"expected a positive, finite width multiplier, got {width}")


def is_small(height: int, width: int) -> bool:
    """Whether the first halving is left out for images of this size."""
    return min(height, width) < SMALL_IMAGE_SIDE


def halved(size: int, times: int) -> int:
    """Side of the feature map after ``times`` 3 x 3 convolutions with stride 2 and padding 1 (each rounds up)."""
    for _ in range(times):
        size = (size + 1) // 2
    return size


def initialise(model: nn.Module) -> None:
    """He initialisation of convolutions for PReLU slopes of 0.25, Glorot for linear layers, unit batch normalisation.

    Convolutions: He et al. 2015, eq. 15 (fan-out keeps the scale of the gradients). A depthwise convolution counts
    only the outputs that one input channel reaches, which torch's own fan computation does not know.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            kernel = module.kernel_size[0] * module.kernel_size[1]
            fan_out = kernel * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2.0 / ((1.0 + 0.25**2) * fan_out)))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
