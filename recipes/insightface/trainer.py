"""One training run: steps, verification, checkpoints, and what is left at the end."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridpar as hp
from recipes.insightface.config import OptimizerConfig, TrainConfig, glyph_options
from recipes.insightface.data import IdentityDataset, VerificationPairs
from recipes.insightface.inputs import Batch, Batches
from recipes.insightface.learner import BuildLearner, TorchLearner
from recipes.insightface.metrics import MetricsWriter
from recipes.insightface.progress import Progress
from recipes.insightface.verification import VerificationResult, verify

CHECKPOINTS = "checkpoints"
_MOST_SKIPPED = 10


class Trainer:
    """Holds what one run needs; every method is called by all ranks.

    Args:
        config: of the run.
        dataset: the training set.
        pairs: sets of verification pairs; may be empty.
        group: the ranks.
        build_learner: makes backbone, head and optimizers.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: IdentityDataset,
        pairs: list[VerificationPairs],
        group: hp.Group,
        build_learner: BuildLearner = TorchLearner,
    ) -> None:
        self.config, self.pairs, self.group = config, pairs, group
        least = config.batch // config.accumulate // group.size
        if least < 2 and not config.model.sync_batch_norm:
            raise ValueError(
                f"expected at least 2 samples a rank and pass for batch normalisation, got {least} from --batch "
                f"{config.batch}, --accumulate {config.accumulate} and {group.size} ranks; "
                "raise --batch, or give --model.sync-batch-norm"
            )
        self.num_classes = dataset.num_classes
        wanted = config.gradients.timeline is not None
        self.timeline = hp.Timeline(rank=group.rank) if wanted else hp.NoTimeline()
        self.learner = build_learner(config, dataset.num_classes, group, self.timeline)
        self.order = hp.GlobalOrder(len(dataset), seed=config.seed)
        self.batches = Batches(dataset, self.order, config.data, config.batch // config.accumulate, group)
        self.steps = config.steps or math.ceil(config.epochs * len(dataset) / config.batch)
        self.step = 0
        self.checkpoints = config.run.out / CHECKPOINTS
        self.results: dict[str, VerificationResult] = {}
        self._skipped = 0
        self._stop_asked = False

    @property
    def chief(self) -> bool:
        """Whether this rank reports."""
        return self.group.rank == 0

    def resume(self) -> hp.checkpoint.Checkpoint | None:
        """Go on from the newest complete checkpoint of the run, if there is one."""
        # Incomplete ones count: loading says why they cannot be used.
        some = any(self.checkpoints.glob("step-*")) or hp.checkpoint.newest(self.checkpoints) is not None
        if not self.group.broadcast_json(some if self.chief else None):
            return None
        if self.config.run.resume == "never":
            raise ValueError(
                f"{self.checkpoints}: expected no checkpoints with --run.resume never, got some; "
                "choose another --run.out, or --run.resume auto to go on from the newest"
            )
        # What the command line says of the optimizer counts, not what it said when the checkpoint was written.
        found = self.learner.load(self.checkpoints)
        saved, present = found.extra["data"], self._data_description()
        for name in ("kind", "num_samples", "seed"):
            if saved[name] != present[name]:
                raise ValueError(
                    f"{found.path} was trained with data {name} {saved[name]}, this run has {present[name]}: its place "
                    "in the order of samples means nothing here; use the same, or another --run.out"
                )
        if saved["position"] % self.config.batch:
            raise ValueError(
                f"{found.path} stands at sample {saved['position']}: expected a --batch that divides it, "
                f"got {self.config.batch}"
            )
        self.step = saved["position"] // self.config.batch
        return found

    def _data_description(self) -> dict[str, Any]:
        return {
            "kind": self.config.data.kind,
            "num_samples": self.order.num_samples,
            "seed": self.order.seed,
            "position": self.step * self.config.batch,
        }

    def train(self, metrics: MetricsWriter | None) -> bool:
        """Steps until the end, or until SIGTERM on any rank. Returns whether the end was reached.

        Args:
            metrics: where rank 0 writes; None elsewhere.
        """
        run, config = self.config.run, self.config
        batches = self.batches.between(self.step * config.batch, self.steps * config.batch)
        clock, done = time.perf_counter(), 0
        visible = self.chief and not run.quiet
        with Progress(self.steps, done=self.step, visible=visible) as progress, self._sigterm_asks_to_stop():
            while self.step < self.steps:
                values = self._one_step(itertools.islice(batches, config.accumulate))
                self.step, done = self.step + 1, done + 1
                last = self.step == self.steps
                if self.step % run.log_every == 0 or last:
                    seconds = time.perf_counter() - clock
                    values |= {"samples_per_second": done * config.batch / seconds, "epoch": self._epoch}
                    if metrics is not None:
                        metrics.write(self.step, values)
                    clock, done = time.perf_counter(), 0
                progress.advance(loss=f"{values['loss']:.3f}")
                paused = time.perf_counter()
                stop = self._anyone_asked_to_stop()
                if self.step % run.checkpoint_every == 0 or last or stop:
                    progress.note(f"step {self.step}: checkpoint {self._save_and_measure()}")
                if stop and not last:
                    return False
                if self.step % run.evaluate_every == 0 or last:
                    for name, accuracy in self.evaluate(metrics).items():
                        progress.note(f"step {self.step}: accuracy on {name} {accuracy:.4f}")
                clock += time.perf_counter() - paused
        if self.config.gradients.timeline is not None:
            self.timeline.save(self.config.gradients.timeline, self.group)
        return True

    @property
    def _epoch(self) -> float:
        return self.step * self.config.batch / self.order.num_samples

    def _one_step(self, micro_batches: Iterable[Batch]) -> dict[str, float]:
        """One optimizer step. A step with a non-finite value on any rank is skipped by all of them."""
        rate = learning_rate(self.config.optimizer, self.step, self.steps)
        try:
            loss, norm = self.learner.step(micro_batches, rate)
        except hp.NonFiniteError as error:
            self._skipped += 1
            if self._skipped >= _MOST_SKIPPED:
                raise
            if self.chief:
                print(f"step {self.step + 1} is skipped: {error}", flush=True)
            return {"loss": math.nan, "learning_rate": rate}
        self._skipped = 0
        self.timeline.instant("step", row="computation")
        return {"loss": loss, "learning_rate": rate, "gradient_norm": norm}

    def evaluate(self, metrics: MetricsWriter | None = None) -> dict[str, float]:
        """Verify on every set of pairs, the ranks sharing the images. Returns accuracies, on rank 0 only."""
        self.learner.share_buffers()
        embeddings = [self._embed_together(pairs.images) for pairs in self.pairs]
        if self.chief:
            verified = (verify(each, pairs) for each, pairs in zip(embeddings, self.pairs, strict=True))
            self.results = {result.name: result for result in verified}
        accuracies = {name: result.accuracy for name, result in self.results.items()}
        if metrics is not None and accuracies:
            metrics.write(self.step, {f"accuracy/{name}": value for name, value in accuracies.items()})
        return accuracies

    def _embed_together(self, images: Tensor) -> Tensor:
        bounds = [len(images) * rank // self.group.size for rank in range(self.group.size + 1)]
        mine = images[bounds[self.group.rank] : bounds[self.group.rank + 1]]
        flip, width = self.config.data.flip, self.config.model.embedding_size
        local = hp.together(
            self.group, lambda: self.learner.embed(mine, flip=flip) if len(mine) else torch.zeros(0, width)
        )
        sizes = [after - before for before, after in itertools.pairwise(bounds)]
        return self.group.all_gather(local, sizes)

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        self.learner.share_buffers()
        run = self.config.run
        return self.learner.save(self.checkpoints, step=self.step, extra=self._description(), keep=run.keep)

    def _save_and_measure(self) -> str:
        """Write a checkpoint; where, how large and in what time, as text."""
        began = time.perf_counter()
        path = self.save()
        # Another rank's view of the folder may lag behind, and nobody may fail alone here.
        megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6 if self.chief else 0.0
        return f"{path} ({megabytes:,.0f} MB in {time.perf_counter() - began:.1f} s)"

    def _description(self) -> dict[str, Any]:
        """What resuming, evaluating and exporting need to know."""
        config = self.config
        return {
            "recipe": {
                "model": config.model.name,
                "model_options": config.model.options,
                "embedding_size": config.model.embedding_size,
                "image_shape": list(config.data.image_shape),
                "num_classes": self.num_classes,
                "flip": config.data.flip,
                "glyphs": glyph_options(config) if config.data.kind == "glyphs" else None,
            },
            "data": self._data_description(),
            "config": _jsonable(asdict(config)),
        }

    @contextlib.contextmanager
    def _sigterm_asks_to_stop(self) -> Iterator[None]:
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


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Of step ``step`` (from 0) of ``steps``: a pure function, so that a resumed run needs no other state."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    left = 1.0 - (step - warmup) / max(steps - warmup, 1)
    shape = {"polynomial": left**2, "cosine": 0.5 * (1.0 - math.cos(math.pi * left)), "constant": 1.0}
    return config.learning_rate * shape[config.schedule]


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value
