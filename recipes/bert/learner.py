"""What a run trains: encoder, head and optimizers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp
from recipes.bert.config import OptimizerConfig, TrainConfig
from recipes.bert.model import Encoder, Rows
from recipes.common.network import build_network
from recipes.common.optimizers import options_kept, set_learning_rate


class Batch(NamedTuple):
    """One rank's part of a (micro-)batch.

    Attributes:
        labels: int64 [m], class ids of the features that the encoder makes; all of them count.
        inputs: of the encoder.
    """

    labels: Tensor
    inputs: tuple[Tensor | None, ...]

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(self.labels.to(device), tuple(None if each is None else each.to(device) for each in self.inputs))


class StepResult(NamedTuple):
    """Mean loss of the global batch, and the norm of all gradients before clipping."""

    loss: float
    gradient_norm: float


class Learner:
    """Encoder, head and their optimizers. Every method is collective.

    Args:
        config: of the run.
        encoder: equal on all ranks.
        num_classes: K.
        rows: initial rows of all classes; None draws them.
        group: the ranks.
        timeline: where it is noted when the step computed.
    """

    def __init__(
        self, config: TrainConfig, encoder: Encoder, num_classes: int, rows: Rows | None, group: hp.Group,
        timeline: hp.Timeline | hp.NoTimeline,
    ) -> None:  # fmt: skip
        self._config, self._group, self._timeline = config, group, timeline
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.encoder = encoder.to(self.device)
        head = build_head(config, encoder.config.hidden_size, num_classes, group, self.device)
        if rows is not None:
            put_rows(head, rows)
        self.network = build_network(self.encoder, head, group, config.gradients, timeline)
        self.optimizer = build_optimizer(config.optimizer, list(self.network.named_parameters()))
        self.optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": self.optimizer}
        if head.row_optimizer is not None:
            self.optimizers["rows"] = head.row_optimizer

    @property
    def head(self) -> hp.ShardedClassifier:
        """Of the network."""
        return self.network.head

    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        """One optimizer step over ``config.accumulate`` micro-batches.

        Raises:
            hp.NonFiniteError: on every rank, and nothing has changed; but a head's own optimizer has stepped its rows
                where the loss was finite and only gradients of the encoder were not.
        """
        set_learning_rate(self.optimizers.values(), learning_rate)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.network.train()
        loss = self._backward(list(micro_batches))
        clip = self._config.optimizer.clip or math.inf
        norm = hp.clip_grad_norm_(self.network.named_parameters(), clip, error_if_nonfinite=True)
        with self._timeline.span("optimizer", row="computation"):
            self.optimizer.step()
        return StepResult(float(loss), float(norm))

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """Gradients of the mean over all labels of all micro-batches, whose numbers differ. Returns that mean."""
        parts = []
        for number, (batch, share) in enumerate(zip(batches, self._shares(batches), strict=True), 1):
            synchronised = contextlib.nullcontext() if number == len(batches) else self.network.no_sync()
            with synchronised:
                part = self.loss(batch) * share
                part.backward()
            parts.append(part.detach())
        return torch.stack(parts).sum()

    def _shares(self, batches: Sequence[Batch]) -> list[float]:
        """The part of the step's labels, over all ranks, that each micro-batch has."""
        if len(batches) == 1:
            return [1.0]
        counts = self._group.all_reduce(torch.tensor([len(batch.labels) for batch in batches]))
        return (counts.double() / counts.sum().clamp(min=1)).tolist()

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of the global batch, in the precision of the run."""
        with self._autocast():
            batch = batch.to(self.device)
            return self.network.loss(batch.labels, *batch.inputs)

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[float, Tensor]:
        """In evaluation mode: the mean loss of the global batch, and the best class [m] of each feature."""
        self.network.train(False)
        batch = batch.to(self.device)
        with self._autocast():
            features = self.encoder(*batch.inputs)
            loss = self.network.loss_of(features, batch.labels)
            return float(loss), self.head.predict(features)[1][:, 0]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bfloat16")

    def save(self, directory: Path, *, step: int, extra: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint, as ``hp.checkpoint.save`` does."""
        return hp.checkpoint.save(
            directory, step=step, model=self.encoder, head=self.head, optimizer=self.optimizers, extra=extra,
            keep=keep, group=self._group,
        )  # fmt: skip

    def load(self, directory: Path) -> hp.checkpoint.Checkpoint:
        """Take the newest checkpoint's weights and optimizer state, but not its optimizers' options."""
        with options_kept(self.optimizers.values()):
            return hp.checkpoint.load(
                directory, model=self.encoder, head=self.head, optimizer=self.optimizers, group=self._group
            )


def build_head(
    config: TrainConfig, features: int, num_classes: int, group: hp.Group, device: torch.device
) -> hp.ShardedClassifier:
    """The output layer, cut over the group in hybrid mode, whole in data mode.

    Raises:
        ValueError: there are fewer classes than ranks to cut them over.
    """
    if config.mode == "hybrid" and num_classes < group.size:
        raise ValueError(
            f"expected at least one class for each of {group.size} ranks, got {num_classes}; give --mode data"
        )
    options, optimizer = config.head, config.optimizer
    policy = options.build_policy(
        learning_rate=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        seed=config.seed,
    )
    return hp.ShardedClassifier(
        features,
        num_classes,
        margin=hp.Softmax(),
        rule=options.rule,
        sampler=options.build_sampler(config.seed),
        optimizer=policy,
        dtype=options.torch_dtype,
        seed=config.seed,
        initial_std=options.initial_std,
        state_dir=options.state_dir,
        group=group if config.mode == "hybrid" else hp.Group.alone(),
        device=device,
    )


@torch.no_grad()
def put_rows(head: hp.ShardedClassifier, rows: Rows) -> None:
    """Give the head this rank's part of the rows of all classes."""
    ids = head.layout.class_ids(head.group.rank)
    head.weight.copy_(rows[0][ids])
    assert head.bias is not None
    head.bias.copy_(rows[1][ids])


def build_optimizer(config: OptimizerConfig, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW or LAMB; biases and layer norms, whose names and shapes tell them, do not decay."""
    decaying = [p for name, p in named if p.ndim > 1]
    plain = [p for name, p in named if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": plain, "weight_decay": 0.0}]
    kind = hp.Lamb if config.name == "lamb" else torch.optim.AdamW
    return kind(groups, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
