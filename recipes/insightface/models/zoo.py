"""Backbones by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recipes.insightface.models.convnet import ConvNet
from recipes.insightface.models.iresnet import STAGE_DEPTHS, IResNet
from recipes.insightface.models.mobilefacenet import MobileFaceNet

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "convnet": ConvNet,
    "mobilefacenet": MobileFaceNet,
    **{f"iresnet{depth}": functools.partial(IResNet, depth=depth) for depth in sorted(STAGE_DEPTHS)},
}

MODEL_NAMES: tuple[str, ...] = tuple(_BUILDERS)
"""convnet (small images on CPUs), mobilefacenet, iresnet18 ... iresnet200."""


def build_model(name: str, *, image_shape: Sequence[int], embedding_size: int, **options: Any) -> nn.Module:
    """Build a backbone that maps normalised images [B, C, H, W] to embeddings [B, embedding_size].

    Args:
        name: one of :data:`MODEL_NAMES`.
        image_shape: (channels, height, width), at least 8 x 8; sizes need not be multiples of anything.
        embedding_size: D.
        options: the model's own. convnet: ``channels``, ``width``, ``dropout``; mobilefacenet: ``width``; iresnet*:
            ``width``, ``dropout``.

    Raises ``ValueError`` for an unknown name, an option that the model does not have, or impossible sizes.
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"expected a model among {', '.join(MODEL_NAMES)}, got {name!r}")
    known = set(inspect.signature(builder).parameters) - {"image_shape", "embedding_size", "depth"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"model {name} has the options {', '.join(sorted(known))}; got {', '.join(unknown)}")
    return builder(image_shape=image_shape, embedding_size=embedding_size, **options)


def count_parameters(model: nn.Module) -> int:
    """Number of learnable elements."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
