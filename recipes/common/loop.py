"""The loop of a training run: steps, metrics, evaluations, checkpoints, SIGTERM, and going on where it stopped."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import hybridpar as hp
from recipes.common.checkpoints import CHECKPOINTS
from recipes.common.config import TrainingConfig
from recipes.common.metrics import MetricsWriter
from recipes.common.progress import Progress

_MOST_SKIPPED = 10

BatchT = TypeVar("BatchT")


class Run(ABC, Generic[BatchT]):
    """A training run; every method is called by all ranks.

    Its place is one number, the samples taken so far from one global order: it means the same on any number of ranks.

    Args:
        config: of the run.
        num_samples: of the training set.
        group: the ranks.

    Attributes:
        order: of the samples.
        steps: of the whole run.
        step: steps done.
        timeline: where it is noted when what happened.
        checkpoints: folder of the checkpoints.
    """

    def __init__(self, config: TrainingConfig, num_samples: int, group: hp.Group) -> None:
        self.settings, self.group = config, group
        self.order = hp.GlobalOrder(num_samples, seed=config.seed)
        self.steps = config.steps_of(num_samples)
        self.step = 0
        self.timeline = hp.NoTimeline() if config.gradients.timeline is None else hp.Timeline(rank=group.rank)
        self.checkpoints = config.run.out / CHECKPOINTS
        self._skipped = 0
        self._stop_asked = False

    @abstractmethod
    def batches(self, first: int, last: int) -> Iterator[BatchT]:
        """What this rank takes of the samples at positions [first, last), for one pass after the other."""

    @abstractmethod
    def learn(self, batches: Iterator[BatchT], rate: float) -> dict[str, float]:
        """One optimizer step with the next batches; what is to be recorded of it, "loss" among it.

        Raises:
            hp.NonFiniteError: on every rank: the step is skipped.
        """

    @abstractmethod
    def evaluate(self, metrics: MetricsWriter | None = None) -> dict[str, str]:
        """Judge what was learnt so far, record it, and return what to say of it on rank 0."""

    @abstractmethod
    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        """Go on from the newest checkpoint there."""

    @abstractmethod
    def write(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint, as ``hp.checkpoint.save`` does."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What evaluating and exporting need to know, as JSON can hold it."""

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """What must be the same where the run goes on, so that its place means the same."""

    @property
    def chief(self) -> bool:
        """Whether this rank reports."""
        return self.group.rank == 0

    def resume(self) -> hp.checkpoint.Checkpoint | None:
        """Go on from the newest complete checkpoint of the run, if there is one.

        Raises:
            ValueError: there is one and there must not be, or it was trained on other data.
        """
        # Incomplete ones count: loading says why they cannot be used.
        some = any(self.checkpoints.glob("step-*")) or hp.checkpoint.newest(self.checkpoints) is not None
        if not self.group.broadcast_json(some if self.chief else None):
            return None
        if self.settings.run.resume == "never":
            raise ValueError(
                f"{self.checkpoints}: expected no checkpoints with --run.resume never, got some; "
                "choose another --run.out, or --run.resume auto to go on from the newest"
            )
        found = self.load(self.checkpoints)
        saved = found.extra["data"]
        for name, mine in self._data().items():
            if name != "position" and saved.get(name) != mine:
                raise ValueError(
                    f"{found.path} was trained with data {name} {saved.get(name)}, this run has {mine}: its place "
                    "in the order of samples means nothing here; use the same, or another --run.out"
                )
        if saved["position"] % self.settings.batch:
            raise ValueError(
                f"{found.path} stands at sample {saved['position']}: expected a --batch that divides it, "
                f"got {self.settings.batch}"
            )
        self.step = saved["position"] // self.settings.batch
        return found

    def _data(self) -> dict[str, Any]:
        order = {"num_samples": self.order.num_samples, "seed": self.order.seed}
        return {**self.describe_data(), **order, "position": self.step * self.settings.batch}

    def train(self, metrics: MetricsWriter | None) -> bool:
        """Steps until the end, or until SIGTERM on any rank. Returns whether the end was reached.

        Args:
            metrics: where rank 0 writes; None elsewhere.
        """
        options, batch = self.settings.run, self.settings.batch
        batches = self.batches(self.step * batch, self.steps * batch)
        clock, done = time.perf_counter(), 0
        visible = self.chief and not options.quiet
        with Progress(self.steps, done=self.step, visible=visible) as progress, self._sigterm_asks_to_stop():
            while self.step < self.steps:
                values = self._learn(batches)
                self.step, done = self.step + 1, done + 1
                last = self.step == self.steps
                if self.step % options.log_every == 0 or last:
                    seconds = time.perf_counter() - clock
                    values |= {"samples_per_second": done * batch / seconds, "epoch": self._epoch}
                    if metrics is not None:
                        metrics.write(self.step, values)
                    clock, done = time.perf_counter(), 0
                progress.advance(loss=f"{values['loss']:.3f}")
                paused = time.perf_counter()
                stop = self._anyone_asked_to_stop()
                if self.step % options.checkpoint_every == 0 or last or stop:
                    progress.note(f"step {self.step}: checkpoint {self._save_and_measure()}")
                if stop and not last:
                    return False
                if self.step % options.evaluate_every == 0 or last:
                    for name, text in self.evaluate(metrics).items():
                        progress.note(f"step {self.step}: {name} {text}")
                clock += time.perf_counter() - paused
        if self.settings.gradients.timeline is not None:
            self.timeline.save(self.settings.gradients.timeline, self.group)
        return True

    @property
    def _epoch(self) -> float:
        return self.step * self.settings.batch / self.order.num_samples

    def _learn(self, batches: Iterator[BatchT]) -> dict[str, float]:
        """One optimizer step. A step with a non-finite value on any rank is skipped by all of them."""
        rate = self.settings.optimizer.rate(self.step, self.steps)
        try:
            values = self.learn(batches, rate)
        except hp.NonFiniteError as error:
            self._skipped += 1
            if self._skipped >= _MOST_SKIPPED:
                raise
            if self.chief:
                print(f"step {self.step + 1} is skipped: {error}", flush=True)
            return {"loss": math.nan, "learning_rate": rate}
        self._skipped = 0
        self.timeline.instant("step", row="computation")
        return {**values, "learning_rate": rate}

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        extra = {**self.describe(), "data": self._data()}
        return self.write(self.checkpoints, step=self.step, extra=extra, keep=self.settings.run.keep)

    def _save_and_measure(self) -> str:
        """Write a checkpoint; where, how large and in what time, as text."""
        began = time.perf_counter()
        path = self.save()
        # Another rank's view of the folder may lag behind, and nobody may fail alone here.
        megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6 if self.chief else 0.0
        return f"{path} ({megabytes:,.0f} MB in {time.perf_counter() - began:.1f} s)"

    @contextlib.contextmanager
    def _sigterm_asks_to_stop(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # a rank that is a thread: signals are the business of whoever started it
            return

        def ask(*_: object) -> None:
            self._stop_asked = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _anyone_asked_to_stop(self) -> bool:
        """Ranks get SIGTERM at different moments, but must leave the loop together."""
        return bool(self.group.all_reduce(torch.tensor([self._stop_asked], dtype=torch.int64), "max"))


def as_json(value: Any) -> Any:
    """Configurations as JSON can hold them: tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
