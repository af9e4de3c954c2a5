"""Options that every recipe has: the head's rows, how gradients travel, and where a run writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import hybridpar as hp


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

    def build_policy(
        self, *, learning_rate: float, momentum: float, weight_decay: float, seed: int
    ) -> hp.RowPolicy | None:
        """How rows are stepped in the backward pass; None where they are not. Momentum is of sgd."""
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
                return hp.RowAdamW(**common)
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


def check_lengths(batch: int, accumulate: int, steps: int, epochs: float) -> None:
    """Raises ValueError for a batch that cannot be cut, or a run without steps."""
    if accumulate < 1 or batch < 1 or batch % accumulate:
        raise ValueError(f"expected a batch that accumulate divides, got batch {batch}, accumulate {accumulate}")
    if steps < 0 or (steps == 0 and epochs <= 0):
        raise ValueError(f"expected steps or epochs above 0, got steps {steps}, epochs {epochs}")


def check_warmup(warmup: float) -> None:
    """Raises ValueError where it is no share of the steps."""
    if not 0 <= warmup < 1:
        raise ValueError(f"optimizer.warmup: expected a share in [0, 1), got {warmup}")


def check_own_optimizer(rows: RowsConfig, mode: str, clip: float) -> None:
    """Raises ValueError for what does not go with rows that step in the backward pass."""
    if rows.optimizer == "shared":
        return
    wrong = {"--mode hybrid": mode != "hybrid", "--optimizer.clip 0": clip != 0}
    if needed := [option for option, bad in wrong.items() if bad]:
        raise ValueError(
            f"head.optimizer {rows.optimizer}: expected {', '.join(needed)} with it, because "
            "rows step in the backward pass; or give --head.optimizer shared"
        )
