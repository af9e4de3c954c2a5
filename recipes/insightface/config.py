"""What can be set: frozen dataclasses, each field a command-line option."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import hybridpar as hp
from recipes.common.config import (
    GradientsConfig,
    RowsConfig,
    RunConfig,
    check_lengths,
    check_own_optimizer,
    check_warmup,
)
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
class OptimizerConfig:
    """How weights move."""

    name: Literal["sgd", "adamw"] = "sgd"
    """sgd (with momentum) or adamw."""
    learning_rate: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 5e-4
    """Of all weights, the head's included."""
    schedule: Literal["polynomial", "cosine", "constant"] = "polynomial"
    """How the learning rate falls to 0 after the warm-up; polynomial has power 2."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    clip: float = 0.0
    """Upper limit of the gradient norm over backbone and all shards; 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a recogniser whose classification head is cut by class across ranks."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(out=Path("runs/insightface")))
    mode: Literal["hybrid", "data"] = "hybrid"
    """hybrid: the head is cut by class across ranks; data: every rank holds all of it, for comparison."""
    batch: int = 512
    """Samples of one optimizer step, over all ranks."""
    accumulate: int = 1
    """Forward and backward passes that one step is cut into, to save memory."""
    epochs: float = 20.0
    """Passes over the training set."""
    steps: int = 0
    """Optimizer steps; above 0 it replaces --epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of backbone and head products; weights stay in float32."""
    seed: int = 0
    """Of initial weights, sample order and augmentation."""
    threads: int = 0
    """CPU threads of each rank; 0: the cores of the host divided among its ranks."""
    timeout: float = 300.0
    """Seconds that a rank waits for the others before it gives up."""
    plugins: tuple[str, ...] = ()
    """Python files or modules to import first, such as one that registers a partition rule."""

    def __post_init__(self) -> None:
        check_lengths(self.batch, self.accumulate, self.steps, self.epochs)
        check_warmup(self.optimizer.warmup)
        check_own_optimizer(self.head, self.mode, self.optimizer.clip)


def glyph_options(config: TrainConfig) -> dict[str, Any]:
    """The arguments of ``glyph_datasets`` but the image shape: with others, other characters would be kept apart."""
    data = config.data
    return {
        "fonts": [str(path) for path in data.fonts],
        "verification_identities": data.verification_identities,
        "pairs": data.verification_pairs,
        "seed": config.seed,
    }
