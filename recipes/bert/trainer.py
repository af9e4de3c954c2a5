"""One training run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hybridpar as hp
from recipes.bert.config import TrainConfig
from recipes.bert.learner import Batch, Learner
from recipes.bert.task import Task
from recipes.common.loop import Run, as_json
from recipes.common.metrics import MetricsWriter


class Trainer(Run[Batch]):
    """Holds what one run needs; every method is called by all ranks.

    Args:
        config: of the run.
        task: what is learnt.
        group: the ranks.

    Raises:
        ValueError: a rank would have no sequence in some pass.
    """

    def __init__(self, config: TrainConfig, task: Task, group: hp.Group) -> None:
        self.config, self.task = config, task
        if self.config.micro_batch < group.size:
            raise ValueError(
                f"expected at least one sequence for each of {group.size} ranks in a pass, got --batch {config.batch} "
                f"and --accumulate {config.accumulate}"
            )
        super().__init__(config, task.num_samples, group)
        torch.manual_seed(config.seed)
        encoder, rows = hp.together(group, task.start)
        self.learner = Learner(config, encoder, task.num_classes, rows, group, self.timeline)
        # From here on, ranks differ in what dropout leaves out.
        torch.manual_seed(config.seed + group.rank)
        self.results: dict[str, float] = {}

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        for position in range(first, last, self.config.micro_batch):
            yield self.task.batch(*self.order.take_local(position, self.config.micro_batch, self.group))

    def learn(self, batches: Iterator[Batch], rate: float) -> dict[str, float]:
        loss, norm = self.learner.step(itertools.islice(batches, self.config.accumulate), rate)
        return {"loss": loss, "gradient_norm": norm}

    def evaluate(self, metrics: MetricsWriter | None = None) -> dict[str, str]:
        """Judge on what is held out, the ranks sharing it."""
        self.results = self.task.evaluate(self.learner.judge, self.group, self.config.micro_batch)
        if metrics is not None:
            metrics.write(self.step, {f"held_out/{name}": value for name, value in self.results.items()})
        return {"held out": ", ".join(f"{name} {value:.4g}" for name, value in self.results.items())}

    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        return self.learner.load(directory)

    def write(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        return self.learner.save(directory, step=step, extra=extra, keep=keep)

    def describe_data(self) -> dict[str, Any]:
        return self.task.describe()

    def describe(self) -> dict[str, Any]:
        return {
            "recipe": {
                "task": self.config.task,
                "bert": self.learner.encoder.config.to_dict(),
                "num_classes": self.task.num_classes,
                "labels": None if self.task.labels is None else list(self.task.labels.values()),
            },
            "config": as_json(asdict(self.config)),
        }
