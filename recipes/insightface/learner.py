"""What a trainer trains: backbone, head and optimizers, in one framework or another."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import hybridpar as hp
from recipes.common.optimizers import options_kept, set_learning_rate
from recipes.insightface.config import OptimizerConfig, TrainConfig
from recipes.insightface.inputs import Batch
from recipes.insightface.recognizer import build_recognizer
from recipes.insightface.verification import embed

Timelines: TypeAlias = hp.Timeline | hp.NoTimeline


class StepResult(NamedTuple):
    """Mean loss of the global batch, and the norm of all gradients before clipping."""

    loss: float
    gradient_norm: float


class Learner(ABC):
    """Backbone, head and optimizers. Every method but ``embed`` and ``export`` is collective.

    Attributes:
        framework: what the backbone is written in, for titles.
    """

    framework: str

    @abstractmethod
    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        """One optimizer step: forward and backward for each of ``config.accumulate`` micro-batches, then the update.

        Raises:
            hp.NonFiniteError: on every rank, and nothing has changed; but a head's own optimizer has stepped its rows
                where the loss was finite and only gradients of the backbone were not.
        """

    @abstractmethod
    def share_buffers(self) -> None:
        """Every rank takes rank 0's batch-norm statistics."""

    @abstractmethod
    def embed(self, images: Tensor, *, flip: bool) -> Tensor:
        """Embeddings as ``verification.embed`` gives them, of images uint8 [M, C, H, W]."""

    @abstractmethod
    def save(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint, as ``hp.checkpoint.save`` does."""

    @abstractmethod
    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        """Take the newest checkpoint's weights and optimizer state, but not its optimizer's options."""

    def export(self, folder: Path) -> list[Path]:
        """On rank 0: write what the framework's own users load, into a folder that exists; returns the files."""
        return []

    def close(self) -> None:
        """Free what the learner holds beyond memory."""
        return


BuildLearner: TypeAlias = Callable[[TrainConfig, int, hp.Group, Timelines], Learner]
"""(configuration, number of classes, ranks, timeline) to a learner."""


class TorchLearner(Learner):
    """Everything in PyTorch: one optimizer over backbone and head, or one of the head's own beside that.

    Args:
        config: of the run.
        num_classes: K.
        group: the ranks.
        timeline: where it is noted when the step computed.
    """

    framework = "PyTorch"

    def __init__(self, config: TrainConfig, num_classes: int, group: hp.Group, timeline: Timelines) -> None:
        self._config, self._group, self._timeline = config, group, timeline
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.recognizer = build_recognizer(config, num_classes, group, self._device, timeline)
        self.optimizer = build_optimizer(config.optimizer, [p for _, p in self.recognizer.named_parameters()])
        self.optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": self.optimizer}
        if self.recognizer.head.row_optimizer is not None:
            self.optimizers["rows"] = self.recognizer.head.row_optimizer

    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        set_learning_rate(self.optimizers.values(), learning_rate)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        clip = self._config.optimizer.clip or math.inf
        with self.recognizer.buffers_kept_on_error():
            loss = self._backward(micro_batches)
            norm = hp.clip_grad_norm_(self.recognizer.named_parameters(), clip, error_if_nonfinite=True)
        with self._timeline.span("optimizer", row="computation"):
            self.optimizer.step()
        return StepResult(float(loss), float(norm))

    def _backward(self, micro_batches: Iterable[Batch]) -> Tensor:
        """Gradients of the mean over the micro-batches, summed over the ranks at the last one. Returns that mean."""
        total, count = torch.zeros((), device=self._device), self._config.accumulate
        bfloat16 = self._config.precision == "bfloat16"
        for number, batch in enumerate(micro_batches, 1):
            synchronised = contextlib.nullcontext() if number == count else self.recognizer.no_sync()
            with synchronised:
                with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=bfloat16):
                    loss = self.recognizer.loss(batch.labels.to(self._device), self._on_device(batch.images))
                (loss / count).backward()
            total += loss.detach() / count
        return total

    def _on_device(self, images: Tensor) -> Tensor:
        channels_last = self._config.model.channels_last
        return images.to(self._device, memory_format=torch.channels_last if channels_last else torch.contiguous_format)

    def share_buffers(self) -> None:
        self.recognizer.share_buffers()

    def embed(self, images: Tensor, *, flip: bool) -> Tensor:
        return embed(self.recognizer.backbone, images, flip=flip, device=self._device)

    def save(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        return hp.checkpoint.save(
            directory,
            step=step,
            model=self.recognizer.backbone,
            head=self.recognizer.head,
            optimizer=self.optimizers,
            extra=extra,
            keep=keep,
            group=self._group,
        )

    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        with options_kept(self.optimizers.values()):
            return hp.checkpoint.load(
                directory,
                model=self.recognizer.backbone,
                head=self.recognizer.head,
                optimizer=self.optimizers,
                group=self._group,
            )


def build_optimizer(config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A torch optimizer as configured."""
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
