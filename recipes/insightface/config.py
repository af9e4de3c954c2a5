"""What can be set: frozen dataclasses, each field a command-line option."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import hybridpar as hp
from recipes.common.config import RowsConfig, ScheduleConfig, TrainingConfig
from recipes.insightface.data import AugmentPolicy

MARGINS: dict[str, type[hp.Margin]] = {
    "adaface": hp.AdaFace,
    "arcface": hp.ArcFace,
    "combined": hp.CombinedMargin,
    "cosface": hp.CosFace,
    "curricularface": hp.CurricularFace,
    "magface": hp.MagFace,
    "softmax": hp.Softmax,
    "sphereface": hp.SphereFace,
}


@dataclass(frozen=True)
class DataConfig:
    """Images with identities, and pairs to verify with."""

    kind: Literal["glyphs", "records", "folders", "synthetic"] = "glyphs"
    """glyphs: characters in the fonts that matplotlib ships; records: an InsightFace record set (train.rec, train.idx,
    property); folders: one folder of images per identity, or a .zip of such; synthetic: images made from the id."""
    path: Path | None = None
    """The record set's folder, or the folder or .zip file of images."""
    fonts: tuple[Path, ...] = ()
    """Further font files, or folders of them, for glyphs."""
    image_size: int = 112
    """Height and width of the images, in pixels; others are resized."""
    channels: Literal[1, 3] = 3
    """1: gray, 3: colour."""
    bins: tuple[Path, ...] = ()
    """InsightFace .bin pair files to verify with."""
    pairs: Path | None = None
    """A text list of pairs to verify with: two image names and 1 (same) or 0 on each line."""
    pairs_root: Path | None = None
    """The folder or .zip file that the names in --data.pairs are relative to."""
    verification_identities: float = 0.0
    """Identities kept apart from training to make pairs of (glyphs, folders); below 1 a fraction, 0 none."""
    verification_pairs: int = 6000
    """How many pairs to make of them."""
    identities: int = 10_000
    """Identities of synthetic data."""
    images_per_identity: int = 20
    """Images of each synthetic identity."""
    shown: int = 0
    """Of synthetic identities only so many, evenly spread, have images, so that a short run sees them again; 0: all."""
    flip: bool = False
    """Average an image with its mirror image when verifying: for faces, not for characters."""
    augment: AugmentPolicy = field(default_factory=AugmentPolicy)
    """Random changes to training images."""
    cache_mib: int = 1024
    """Decode a whole training set into memory, once, where that takes no more than this many MiB a rank."""
    workers: int = 0
    """Processes of each rank that fetch and decode images; 0: the rank itself."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return (self.channels, self.image_size, self.image_size)


@dataclass(frozen=True)
class ModelConfig:
    """The backbone."""

    name: str = "iresnet50"
    """convnet, mobilefacenet, iresnet18, iresnet34, iresnet50, iresnet100 or iresnet200."""
    options: dict[str, float] = field(default_factory=dict)
    """The model's own options, such as: width 0.5 dropout 0.1."""
    embedding_size: int = 512
    """Width of the embedding."""
    channels_last: bool = True
    """Keep channels next to each other in memory: a fifth faster on CPUs, and what GPU tensor cores want."""
    sync_batch_norm: bool = False
    """Batch normalisation over the global batch: training then does not depend on the number of ranks."""


@dataclass(frozen=True)
class HeadConfig(RowsConfig):
    """The classification head."""

    margin: Literal[
        "adaface", "arcface", "combined", "cosface", "curricularface", "magface", "softmax", "sphereface"
    ] = "arcface"
    """The margin of the target logit."""
    margin_options: dict[str, float] = field(default_factory=dict)
    """The margin's own options, such as: scale 32 margin 0.4."""

    def build_margin(self) -> hp.Margin:
        """Raises ValueError for an option that the margin does not have."""
        margin = MARGINS[self.margin]
        known = {option.name for option in fields(margin)}
        unknown = sorted(set(self.margin_options) - known)
        if unknown:
            raise ValueError(f"margin {self.margin} has the options {', '.join(sorted(known))}; got {unknown}")
        return margin(**self.margin_options)


@dataclass(frozen=True)
class OptimizerConfig(ScheduleConfig):
    """How weights move."""

    name: Literal["sgd", "adamw"] = "sgd"
    """sgd (with momentum) or adamw."""
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 5e-4
    """Of all weights, the head's included."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """Train a recogniser whose classification head is cut by class across ranks."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def glyph_options(config: TrainConfig) -> dict[str, Any]:
    """The arguments of ``glyph_datasets`` but the image shape: with others, other characters would be kept apart."""
    data = config.data
    return {
        "fonts": [str(path) for path in data.fonts],
        "verification_identities": data.verification_identities,
        "pairs": data.verification_pairs,
        "seed": config.seed,
    }
