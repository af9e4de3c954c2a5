"""IResNet: the residual network of the ArcFace paper (Deng et al. 2019, section 3.1), 18 to 200 layers."""

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

STAGE_DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    200: (6, 26, 60, 6),
}
"""Residual units in each of the four stages, by the network's depth."""

_STAGE_CHANNELS = (64, 128, 256, 512)


class ImprovedUnit(nn.Module):
    """The improved residual unit: BN - 3 x 3 conv - BN - PReLU - 3 x 3 conv (with the stride) - BN, plus the input.

    The last batch normalisation starts at zero, so that every unit starts as the identity and a deep network trains
    from the first step (Goyal et al. 2017, section 5.1).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.PReLU(out_channels),
            nn.Conv2d(out_channels, out_channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def start_as_identity(self) -> None:
        """Zero the scale of the last batch normalisation."""
        last = self.layers[-1]
        assert isinstance(last, nn.BatchNorm2d)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Feature map [B, C_in, H, W] to [B, C_out, H / stride, W / stride]."""
        out: Tensor = self.layers(x) + self.shortcut(x)
        return out


class IResNet(nn.Module):
    """IResNet with the output BN - dropout - FC - BN ("option E" of the paper).

    Images whose shorter side is below 64 pixels keep their size in the first stage (stride 1 where the paper, for
    112 x 112, has 2).

    Args:
        image_shape: (channels, height, width).
        embedding_size: D; the paper has 512.
        depth: 18, 34, 50, 100 or 200.
        width: multiplier of the four stages' channel counts.
        dropout: probability of dropping an input of the fully connected layer; the paper has 0.4.

    Raises ``ValueError`` for impossible sizes and depths.
    """

    def __init__(
        self,
        *,
        image_shape: Sequence[int],
        embedding_size: int,
        depth: int,
        width: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        in_channels, height, columns = check_image_shape(image_shape)
        check_embedding_size(embedding_size)
        if depth not in STAGE_DEPTHS:
            raise ValueError(f"expected an IResNet depth among {sorted(STAGE_DEPTHS)}, got {depth}")
        check_width(width)
        small = is_small(height, columns)
        stage_channels = [max(1, round(channels * width)) for channels in _STAGE_CHANNELS]
        channels = stage_channels[0]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.PReLU(channels)
        )
        units: list[ImprovedUnit] = []
        for stage, (units_of_stage, out_channels) in enumerate(zip(STAGE_DEPTHS[depth], stage_channels, strict=True)):
            for unit in range(units_of_stage):
                stride = 2 if unit == 0 and not (stage == 0 and small) else 1
                units.append(ImprovedUnit(channels, out_channels, stride=stride))
                channels = out_channels
        self.units = nn.Sequential(*units)
        halvings = 3 if small else 4
        positions = halved(height, halvings) * halved(columns, halvings)
        self.output_norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Linear(channels * positions, embedding_size)
        self.embedding_norm = nn.BatchNorm1d(embedding_size)
        initialise(self)
        for each in units:
            each.start_as_identity()

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings [B, D] of normalised images [B, C, H, W]; not of unit length."""
        features: Tensor = self.dropout(self.output_norm(self.units(self.stem(images))))
        embeddings: Tensor = self.embedding_norm(self.embedding(features.flatten(1)))
        return embeddings
