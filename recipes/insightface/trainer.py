"""One training run: steps, verification, checkpoints, and what is left at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridpar as hp
from recipes.common.loop import Run, as_json
from recipes.common.metrics import MetricsWriter
from recipes.insightface.config import TrainConfig, glyph_options
from recipes.insightface.data import IdentityDataset, VerificationPairs
from recipes.insightface.inputs import Batch, Batches
from recipes.insightface.learner import BuildLearner, TorchLearner
from recipes.insightface.verification import VerificationResult, verify


class Trainer(Run[Batch]):
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
        self.config, self.pairs = config, pairs
        least = config.micro_batch // group.size
        if least < 2 and not config.model.sync_batch_norm:
            raise ValueError(
                f"expected at least 2 samples a rank and pass for batch normalisation, got {least} from --batch "
                f"{config.batch}, --accumulate {config.accumulate} and {group.size} ranks; "
                "raise --batch, or give --model.sync-batch-norm"
            )
        self.num_classes = dataset.num_classes
        super().__init__(config, len(dataset), group)
        self.learner = build_learner(config, dataset.num_classes, group, self.timeline)
        self._batches = Batches(dataset, self.order, config.data, config.micro_batch, group)
        self.results: dict[str, VerificationResult] = {}

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        return self._batches.between(first, last)

    def learn(self, batches: Iterator[Batch], rate: float) -> dict[str, float]:
        loss, norm = self.learner.step(itertools.islice(batches, self.config.accumulate), rate)
        return {"loss": loss, "gradient_norm": norm}

    def evaluate(self, metrics: MetricsWriter | None = None) -> dict[str, str]:
        """Verify on every set of pairs, the ranks sharing the images. Returns accuracies, on rank 0 only."""
        self.learner.share_buffers()
        embeddings = [self._embed_together(pairs.images) for pairs in self.pairs]
        if self.chief:
            verified = (verify(each, pairs) for each, pairs in zip(embeddings, self.pairs, strict=True))
            self.results = {result.name: result for result in verified}
        accuracies = {name: result.accuracy for name, result in self.results.items()}
        if metrics is not None and accuracies:
            metrics.write(self.step, {f"accuracy/{name}": value for name, value in accuracies.items()})
        return {f"accuracy on {name}": f"{accuracy:.4f}" for name, accuracy in accuracies.items()}

    def _embed_together(self, images: Tensor) -> Tensor:
        bounds = [len(images) * rank // self.group.size for rank in range(self.group.size + 1)]
        mine = images[bounds[self.group.rank] : bounds[self.group.rank + 1]]
        flip, width = self.config.data.flip, self.config.model.embedding_size
        local = hp.together(
            self.group, lambda: self.learner.embed(mine, flip=flip) if len(mine) else torch.zeros(0, width)
        )
        sizes = [after - before for before, after in itertools.pairwise(bounds)]
        return self.group.all_gather(local, sizes)

    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        return self.learner.load(directory)

    def write(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        self.learner.share_buffers()
        return self.learner.save(directory, step=step, extra=extra, keep=keep)

    def describe_data(self) -> dict[str, Any]:
        return {"kind": self.config.data.kind}

    def describe(self) -> dict[str, Any]:
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
            "config": as_json(asdict(config)),
        }
