"""MobileFaceNet (Chen, Liu, Gao, Han: "MobileFaceNets", 2018): about one million parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from recipes.insightface.models.layers import (
    check_embedding_size,
    check_image_shape,
    check_width,
    halved,
    initialise,
    is_small,
)

# Table 1 of the paper: expansion, output channels, repeats, stride of the first repeat.
_BOTTLENECKS = ((2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1))
_STEM_CHANNELS = 64
_LAST_CHANNELS = 512


def _scaled(channels: int, width: float) -> int:
    """Channels times the width multiplier, rounded to a multiple of 8, which vector units like."""
    return max(8, int(channels * width / 8 + 0.5) * 8)


def _conv(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution with batch normalisation and no activation (a "linear" one in the paper's words)."""
    return [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
    ]


class Bottleneck(nn.Module):
    """Inverted residual: 1 x 1 expansion, 3 x 3 depthwise, linear 1 x 1; a shortcut where the shapes agree."""

    def __init__(self, in_channels: int, out_channels: int, *, expansion: int, stride: int) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.shortcut = stride == 1 and in_channels == out_channels
        self.layers = nn.Sequential(
            *_conv(in_channels, inner, 1),
            nn.PReLU(inner),
            *_conv(inner, inner, 3, stride=stride, groups=inner),
            nn.PReLU(inner),
            *_conv(inner, out_channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Feature map [B, C_in, H, W] to [B, C_out, H / stride, W / stride]."""
        out: Tensor = self.layers(x)
        return x + out if self.shortcut else out


class MobileFaceNet(nn.Module):
    """MobileFaceNet for any image size: a global depthwise convolution covers whatever the last feature map measures.

    Images whose shorter side is below 64 pixels keep their size in the first convolution (stride 1 where the paper,
    for 112 x 112, has 2); everything else is the paper's Table 1.

    Args:
        image_shape: (channels, height, width).
        embedding_size: D; the paper has 128.
        width: multiplier of all channel counts but the embedding's, rounded to multiples of 8.

    Raises ``ValueError`` for impossible sizes.
    """

    def __init__(self, *, image_shape: Sequence[int], embedding_size: int, width: float = 1.0) -> None:
        super().__init__()
        in_channels, height, columns = check_image_shape(image_shape)
        check_embedding_size(embedding_size)
        check_width(width)
        small = is_small(height, columns)
        channels = _scaled(_STEM_CHANNELS, width)
        layers: list[nn.Module] = [
            *_conv(in_channels, channels, 3, stride=1 if small else 2),
            nn.PReLU(channels),
            *_conv(channels, channels, 3, groups=channels),
            nn.PReLU(channels),
        ]
        for expansion, unscaled, repeats, stride in _BOTTLENECKS:
            for repeat in range(repeats):
                out_channels = _scaled(unscaled, width)
                layers.append(
                    Bottleneck(channels, out_channels, expansion=expansion, stride=stride if repeat == 0 else 1)
                )
                channels = out_channels
        last = _scaled(_LAST_CHANNELS, width)
        halvings = 3 if small else 4
        kernel = (halved(height, halvings), halved(columns, halvings))
        self.layers = nn.Sequential(*layers, *_conv(channels, last, 1), nn.PReLU(last))
        self.global_depthwise = nn.Conv2d(last, last, kernel, groups=last, bias=False)
        self.global_norm = nn.BatchNorm2d(last)
        self.embedding = nn.Linear(last, embedding_size, bias=False)
        self.embedding_norm = nn.BatchNorm1d(embedding_size)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings [B, D] of normalised images [B, C, H, W]; not of unit length."""
        pooled: Tensor = self.global_norm(self.global_depthwise(self.layers(images)))
        embeddings: Tensor = self.embedding_norm(self.embedding(pooled.flatten(1)))
        return embeddings
