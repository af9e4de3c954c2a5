"""What can be set: frozen dataclasses, each field a command-line option, and the presets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

import hybridpar as hp
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
class HeadConfig:
    """The classification head."""

    margin: Literal[
        "adaface", "arcface", "combined", "cosface", "curricularface", "magface", "softmax", "sphereface"
    ] = "arcface"
    """The margin of the target logit."""
    margin_options: dict[str, float] = field(default_factory=dict)
    """The margin's own options, such as: scale 32 margin 0.4."""
    rule: str = "even"
    """Which rank holds which class: even, striped, or a rule that a plugin registers."""
    initial_std: float = 0.01
    """Standard deviation of the initial rows."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rows."""
    optimizer: Literal["shared", "sgd", "adamw", "adagrad"] = "shared"
    """shared: rows are stepped with the backbone's weights; sgd, adamw or adagrad: in the backward pass, each as soon
    as its gradient is known, so that there is no gradient of all rows. Learning rate, momentum and decay are the
    backbone's."""
    state: Literal["float32", "bfloat16"] = "float32"
    """What such an optimizer remembers of the rows."""
    stochastic_rounding: bool = True
    """Such an optimizer rounds bfloat16 rows and state at random, so that small steps are not lost on average."""
    sample_rate: float = 1.0
    """Below 1: in a step only this share of each rank's classes takes part, those of the batch always."""
    hard_share: float = 0.0
    """Above 0: this share of a sample's negatives are the nearest classes of those in the batch, from a class graph."""
    graph_every: int = 1000
    """Steps between class graphs."""
    graph_search: Literal["exact", "faiss"] = "exact"
    """How a class graph is built: exact takes time of the square of the classes; faiss (an extra) is approximate."""
    state_dir: Path | None = None
    """Folder on a disk: rows and what their optimizer remembers live in files there, and may be larger than memory."""

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"head.sample_rate: expected a share in (0, 1], got {self.sample_rate}")
        if not 0 <= self.hard_share <= (self.sample_rate < 1):
            raise ValueError(
                f"head.hard_share: expected a share in [0, 1], and 0 where all classes take part, got "
                f"{self.hard_share} with head.sample_rate {self.sample_rate}"
            )
        own = {
            "head.state bfloat16": self.state != "float32",
            "head.no-stochastic-rounding": not self.stochastic_rounding,
            "head.state-dir": self.state_dir is not None,
        }
        if self.optimizer == "shared" and (given := [option for option, is_given in own.items() if is_given]):
            raise ValueError(
                f"{', '.join(given)}: expected --head.optimizer sgd, adamw or adagrad with it, got shared, whose state "
                "and gradient of all rows are in memory, in the format of the rows"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def build_sampler(self, seed: int) -> hp.Sampler | None:
        """None where all classes take part."""
        if self.sample_rate == 1:
            return None
        if self.hard_share == 0:
            return hp.UniformSampler(rate=self.sample_rate, seed=seed)
        return hp.HardSampler(
            rate=self.sample_rate, uniform=1 - self.hard_share, every=self.graph_every, search=self.graph_search,
            seed=seed,
        )  # fmt: skip

    def build_policy(self, optimizer: OptimizerConfig, seed: int) -> hp.RowPolicy | None:
        """How rows are stepped in the backward pass; None where they are not."""
        common: dict[str, Any] = {
            "lr": optimizer.learning_rate,
            "weight_decay": optimizer.weight_decay,
            "state_dtype": torch.bfloat16 if self.state == "bfloat16" else None,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": seed,
        }
        match self.optimizer:
            case "sgd":
                return hp.RowSGD(momentum=optimizer.momentum, **common)
            case "adamw":
                return hp.RowAdamW(**common)
            case "adagrad":
                return hp.RowAdagrad(**common)
        return None

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
class GradientsConfig:
    """How the gradients of what is replicated travel between the ranks."""

    wire: Literal["same", "bfloat16", "float16"] = "same"
    """The format they travel in; same: their own."""
    error_feedback: bool = False
    """What rounding takes from a gradient is added to the next one."""
    top_k: float = 0.0
    """Above 0: only this fraction of each gradient travels, its largest values; the rest waits for the next step."""
    bucket_mib: float = 0.0
    """Gradients travel in buckets of up to this many MiB; 0: as the hosts ask for."""
    tracks: int = 0
    """Buckets that travel side by side, each on connections of its own; 0: as the hosts ask for."""
    route: Literal["auto", "flat", "striped", "hierarchical"] = "auto"
    """flat: all ranks in one ring; striped: over all --gradients.interfaces; hierarchical: inside hosts, then across;
    auto: what suits the hosts."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of each host to use side by side, such as: eth0 eth1."""
    tune: bool = False
    """Try bucket sizes, tracks and routes in the first steps, and keep the fastest."""
    timeline: Path | None = None
    """Write there, as a Chrome trace, when the last steps computed and communicated."""

    def plan(self) -> hp.Plan:
        """Raises ValueError for values that do not go together."""
        wire = hp.Wire(
            dtype={"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.wire],
            error_feedback=self.error_feedback,
            top_k=self.top_k or None,
        )
        return hp.Plan(
            bucket_bytes=int(self.bucket_mib * (1 << 20)) or None,
            tracks=self.tracks or None,
            route=self.route,
            wire=wire,
        )


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes, and when."""

    out: Path = Path("runs/insightface")
    """Folder for checkpoints, metrics, plots and exports."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest complete checkpoint in --run.out; never: refuse to start where there is one."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end, and on SIGTERM."""
    keep: int = 2
    """Checkpoints to keep."""
    evaluate_every: int = 1000
    """Steps between verifications; one is always done at the end."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events too."""
    export: bool = True
    """At the end write the backbone as ONNX and the class centers as safetensors."""
    quiet: bool = False
    """No progress bar or progress lines."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a recogniser whose classification head is cut by class across ranks."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    run: RunConfig = field(default_factory=RunConfig)
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
        if self.accumulate < 1 or self.batch < 1 or self.batch % self.accumulate:
            raise ValueError(
                f"expected a batch that accumulate divides, got batch {self.batch}, accumulate {self.accumulate}"
            )
        if self.steps < 0 or (self.steps == 0 and self.epochs <= 0):
            raise ValueError(f"expected steps or epochs above 0, got steps {self.steps}, epochs {self.epochs}")
        for name in ("checkpoint_every", "keep", "evaluate_every", "log_every"):
            if getattr(self.run, name) < 1:
                raise ValueError(f"run.{name}: expected at least 1, got {getattr(self.run, name)}")
        self.gradients.plan()
        if not 0 <= self.optimizer.warmup < 1:
            raise ValueError(f"optimizer.warmup: expected a share in [0, 1), got {self.optimizer.warmup}")
        if self.head.optimizer != "shared":
            self._check_own_optimizer()

    def _check_own_optimizer(self) -> None:
        """Of the head, whose rows step in each backward pass."""
        wrong = {
            "--mode hybrid": self.mode != "hybrid",
            "--accumulate 1": self.accumulate != 1,
            "--optimizer.clip 0": self.optimizer.clip != 0,
        }
        if needed := [option for option, bad in wrong.items() if bad]:
            raise ValueError(
                f"head.optimizer {self.head.optimizer}: expected {', '.join(needed)} with it, because "
                "rows step in every backward pass; or give --head.optimizer shared"
            )


def glyph_options(config: TrainConfig) -> dict[str, Any]:
    """The arguments of ``glyph_datasets`` but the image shape: with others, other characters would be kept apart."""
    data = config.data
    return {
        "fonts": [str(path) for path in data.fonts],
        "verification_identities": data.verification_identities,
        "pairs": data.verification_pairs,
        "seed": config.seed,
    }
