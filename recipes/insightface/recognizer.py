"""Backbone and head under the two ways of cutting them: hybrid, and data parallel for comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import hybridpar as hp
from recipes.insightface.config import TrainConfig
from recipes.insightface.models import build_model


class Recognizer(ABC):
    """Common face of both modes.

    Attributes:
        backbone: images [b, C, H, W] to embeddings [b, D]; replicated.
        head: the classification head: this rank's classes, or all of them in data mode.
    """

    backbone: nn.Module
    head: hp.ShardedClassifier
    _replicated: hp.DataParallel

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the global batch, the same scalar on every rank. Collective."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside do not exchange gradients of what is replicated."""
        return self._replicated.no_sync()

    def buffers_kept_on_error(self) -> AbstractContextManager[None]:
        """A step that raises leaves no trace in batch-norm statistics."""
        return self._replicated.buffers_kept_on_error()

    def share_buffers(self) -> None:
        """Collective: every rank takes rank 0's batch-norm statistics."""
        self._replicated.broadcast_buffers()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that is trained on this rank, but rows that the head's own optimizer steps."""
        yield from ((f"backbone.{name}", parameter) for name, parameter in self.backbone.named_parameters())
        if self.head.row_optimizer is None:
            yield from ((f"head.{name}", parameter) for name, parameter in self.head.named_parameters())


class HybridRecognizer(Recognizer):
    """The backbone replicated, the head cut by class across the ranks."""

    def __init__(self, backbone: nn.Module, head: hp.ShardedClassifier, group: hp.Group, **parallel: Any) -> None:
        self.backbone, self.head = backbone, head
        self._replicated = hp.DataParallel(backbone, group=group, **parallel)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self._replicated(images), labels)
        return loss


class DataRecognizer(Recognizer):
    """Backbone and whole head on every rank; all gradients travel."""

    def __init__(self, backbone: nn.Module, head: hp.ShardedClassifier, group: hp.Group, **parallel: Any) -> None:
        self.backbone, self.head = backbone, head
        both = _Both(backbone, hp.ReplicatedClassifier(head, group))
        self._replicated = hp.DataParallel(both, group=group, **parallel)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._replicated(images, labels)
        return loss


class _Both(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(images), labels)
        return loss


def build_recognizer(
    config: TrainConfig, num_classes: int, group: hp.Group, device: torch.device, timeline: hp.Timeline | hp.NoTimeline
) -> Recognizer:
    """Build backbone and head as configured, equal on every rank for equal seeds."""
    torch.manual_seed(config.seed)
    backbone = build_model(
        config.model.name,
        image_shape=config.data.image_shape,
        embedding_size=config.model.embedding_size,
        **config.model.options,
    ).to(device)
    if config.model.channels_last:
        backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.model.sync_batch_norm:
        backbone = hp.SyncBatchNorm.convert(backbone, group)
    hybrid = config.mode == "hybrid"
    head = build_head(config, num_classes, group if hybrid else hp.Group.alone(), device)
    mode = HybridRecognizer if hybrid else DataRecognizer
    plan, tune = config.gradients.plan(), config.gradients.tune
    return mode(backbone, head, group, plan=plan, tune=tune, wires=[plan.wire], timeline=timeline)


def build_head(config: TrainConfig, num_classes: int, group: hp.Group, device: torch.device) -> hp.ShardedClassifier:
    """The head as configured, cut over ``group``."""
    options = config.head
    return hp.ShardedClassifier(
        config.model.embedding_size,
        num_classes,
        margin=options.build_margin(),
        rule=options.rule,
        sampler=options.build_sampler(config.seed),
        optimizer=options.build_policy(config.optimizer, config.seed),
        dtype=options.torch_dtype,
        seed=config.seed,
        initial_std=options.initial_std,
        state_dir=options.state_dir,
        group=group,
        device=device,
    )
