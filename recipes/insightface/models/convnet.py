"""A plain small convolutional network: the backbone to take on CPUs for small images such as characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from recipes.insightface.models.layers import check_embedding_size, check_image_shape, check_width, halved, initialise


def _block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.PReLU(out_channels),
    )


class ConvNet(nn.Module):
    """3 x 3 convolution, batch normalisation, PReLU, repeated; then dropout, a linear embedding, batch normalisation.

    Args:
        image_shape: (channels, height, width).
        embedding_size: D.
        channels: output channels of each block; every block halves height and width.
        width: multiplier of the channels.
        dropout: probability of dropping an input of the linear layer.

    Raises ``ValueError`` for impossible sizes.
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
        in_channels, height, columns = check_image_shape(image_shape)
        check_embedding_size(embedding_size)
        if not channels or min(channels) < 1:
            raise ValueError(f"expected one positive channel count per block, got channels={tuple(channels)}")
        check_width(width)
        widths = [in_channels, *(max(1, round(count * width)) for count in channels)]
        self.blocks = nn.Sequential(*(_block(a, b, stride=2) for a, b in itertools.pairwise(widths)))
        positions = halved(height, len(channels)) * halved(columns, len(channels))
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Linear(widths[-1] * positions, embedding_size, bias=False)
        self.embedding_norm = nn.BatchNorm1d(embedding_size)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings [B, D] of normalised images [B, C, H, W]; not of unit length."""
        features: Tensor = self.blocks(images)
        embeddings: Tensor = self.embedding_norm(self.embedding(self.dropout(features.flatten(1))))
        return embeddings
