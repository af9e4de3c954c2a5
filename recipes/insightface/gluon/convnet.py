"""The counterpart in Gluon of ``recipes.insightface.models.convnet``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import hybridpar.mxnet  # noqa: F401 - before mxnet

# isort: split
import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from recipes.insightface.models.layers import halved

Array = Any  # of mxnet, which has no types: an NDArray, or a Symbol while a graph is built

# torch's: moving statistics keep 0.9 of what they were, and 1e-5 is added to the variance.
_NORM = {"momentum": 0.9, "epsilon": 1e-5}


class PReLU(HybridBlock):  # type: ignore[misc]
    """max(x, 0) + slope * min(x, 0), one slope a channel.

    MXNet's own operator of that name takes five times as long as the convolutions around it on a CPU. Here the slopes
    are a depthwise 1 x 1 convolution, which oneDNN computes.

    Args:
        channels: C of the images [B, C, H, W].
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._channels = channels
        with self.name_scope():
            self.alpha = self.params.get("alpha", shape=(channels,), init=mx.init.Constant(0.25))

    def hybrid_forward(self, F: Any, images: Array, alpha: Array) -> Array:
        positive = F.Activation(images, act_type="relu")
        slopes = F.reshape(alpha, (-1, 1, 1, 1))
        sizes = {"kernel": (1, 1), "num_filter": self._channels, "num_group": self._channels}
        return positive + F.Convolution(images - positive, slopes, no_bias=True, **sizes)


def _block(in_channels: int, out_channels: int) -> HybridBlock:
    block = nn.HybridSequential()
    block.add(
        nn.Conv2D(out_channels, 3, strides=2, padding=1, use_bias=False, in_channels=in_channels),
        nn.BatchNorm(in_channels=out_channels, **_NORM),
        PReLU(out_channels),
    )
    return block


class ConvNet(HybridBlock):  # type: ignore[misc]
    """3 x 3 convolution, batch normalisation, PReLU, repeated; then dropout, a linear embedding, batch normalisation.

    The same function as torch's ConvNet of the same arguments, in training too, but that the moving variance is of
    the batch as it is (divided by n), where torch's estimates that of the population (divided by n - 1).

    Args:
        image_shape: (channels, height, width).
        embedding_size: D.
        channels: output channels of each block; every block halves height and width.
        width: multiplier of the channels.
        dropout: probability of dropping an input of the linear layer.
    """

    def __init__(
        self,
        *,
        image_shape: Sequence[int],
        embedding_size: int,
        channels: Sequence[int] = (32, 64, 128, 256),
        width: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        in_channels, height, columns = image_shape
        widths = [in_channels, *(max(1, round(count * width)) for count in channels)]
        positions = halved(height, len(channels)) * halved(columns, len(channels))
        with self.name_scope():
            self.blocks = nn.HybridSequential()
            self.blocks.add(*(_block(a, b) for a, b in itertools.pairwise(widths)))
            self.dropout = nn.Dropout(dropout)
            self.embedding = nn.Dense(embedding_size, use_bias=False, in_units=widths[-1] * positions)
            self.embedding_norm = nn.BatchNorm(in_channels=embedding_size, **_NORM)

    def hybrid_forward(self, F: Any, images: Array) -> Array:
        """Embeddings [B, D] of normalised images [B, C, H, W]; not of unit length."""
        return self.embedding_norm(self.embedding(self.dropout(self.blocks(images))))
