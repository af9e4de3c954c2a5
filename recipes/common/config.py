"""Options that every recipe has: the head's rows, how gradients travel, and where a run writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import hybridpar as hp
from recipes.common.schedule import Schedule, learning_rate


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
    compress_exponents: bool = False
    """Between hosts float32 and bfloat16 take fewer bytes, and every bit arrives; for slow networks."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of each host to use side by side, such as: eth0 eth1."""
    tune: bool = False
    """Try bucket sizes, tracks, routes and compressed exponents in the first steps, and keep the fastest."""
    timeline: Path | None = None
    """Write there, as a Chrome trace, when the last steps computed and communicated."""

    def __post_init__(self) -> None:
        self.plan()

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
            compress_exponents=self.compress_exponents,
        )


@dataclass(frozen=True)
class RowsConfig:
    """The rows of the classification head, and how they are stepped."""

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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

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

    def build_policy(
        self,
        *,
        learning_rate: float,
        weight_decay: float,
        seed: int,
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> hp.RowPolicy | None:
        """How rows are stepped in the backward pass; None where they are not. Momentum is of sgd, betas of adamw."""
        common: dict[str, Any] = {
            "lr": learning_rate,
            "weight_decay": weight_decay,
            "state_dtype": torch.bfloat16 if self.state == "bfloat16" else None,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": seed,
        }
        match self.optimizer:
            case "sgd":
                return hp.RowSGD(momentum=momentum, **common)
            case "adamw":
                return hp.RowAdamW(betas=betas, **common)
            case "adagrad":
                return hp.RowAdagrad(**common)
        return None


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes, and when."""

    out: Path
    """Folder for checkpoints, metrics, plots and exports."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest complete checkpoint in --run.out; never: refuse to start where there is one."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end, and on SIGTERM."""
    keep: int = 2
    """Checkpoints to keep."""
    evaluate_every: int = 1000
    """Steps between evaluations; one is always done at the end."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events too."""
    export: bool = True
    """At the end write the trained model in the formats that others load."""
    quiet: bool = False
    """No progress bar or progress lines."""

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep", "evaluate_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"run.{name}: expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class ScheduleConfig:
    """How fast weights move."""

    learning_rate: float = 0.1
    """Peak learning rate."""
    schedule: Schedule = "polynomial"
    """How the learning rate falls to 0 after the warm-up; polynomial has power 2."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    clip: float = 0.0
    """Upper limit of the gradient norm over all that is trained, the head's shards included; 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optimizer.warmup: expected a share in [0, 1), got {self.warmup}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step ``step`` (from 0) of ``steps``."""
        return learning_rate(self.learning_rate, step, steps, warmup=self.warmup, schedule=self.schedule)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What every training run can be told, whatever it trains."""

    run: RunConfig
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    head: RowsConfig = field(default_factory=RowsConfig)
    optimizer: ScheduleConfig = field(default_factory=ScheduleConfig)
    mode: Literal["hybrid", "data"] = "hybrid"
    """hybrid: the head is cut by class across ranks; data: every rank holds all of it, for few classes."""
    batch: int = 256
    """Samples of one optimizer step, over all ranks."""
    accumulate: int = 1
    """Forward and backward passes that one step is cut into, to save memory."""
    epochs: float = 1.0
    """Passes over the training set."""
    steps: int = 0
    """Optimizer steps; above 0 it replaces --epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of all products; weights stay in float32."""
    seed: int = 0
    """Of all that is left to chance: initial weights, order of the samples, how they are changed."""
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
        if self.head.optimizer == "shared":
            return
        wrong = {"--mode hybrid": self.mode != "hybrid", "--optimizer.clip 0": self.optimizer.clip != 0}
        if needed := [option for option, bad in wrong.items() if bad]:
            raise ValueError(
                f"head.optimizer {self.head.optimizer}: expected {', '.join(needed)} with it, because "
                "rows step in the backward pass; or give --head.optimizer shared"
            )

    @property
    def micro_batch(self) -> int:
        """Samples of one pass, over all ranks."""
        return self.batch // self.accumulate

    def steps_of(self, samples: int) -> int:
        """Steps of the whole run over a training set of so many samples."""
        return self.steps or math.ceil(self.epochs * samples / self.batch)
