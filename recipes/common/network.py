"""A backbone and a head under one of the two ways of cutting them: hybrid, and data parallel for comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

import hybridpar as hp
from recipes.common.config import GradientsConfig


class Network(ABC):
    """Common face of both modes.

    Attributes:
        backbone: inputs to features [b, D]; replicated.
        head: the classification head: this rank's classes, or all of them in data mode.
    """

    backbone: nn.Module
    head: hp.ShardedClassifier
    _replicated: hp.DataParallel

    @abstractmethod
    def loss(self, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        """Mean loss of the global batch, the same scalar on every rank. Collective.

        Args:
            labels: int64 [b], of the features that the backbone makes of the inputs.
            inputs: of the backbone.
        """

    @abstractmethod
    def loss_of(self, features: Tensor, labels: Tensor) -> Tensor:
        """The same from features [b, D] that there are already. Collective."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside neither exchange gradients of what is replicated nor step rows: all but the last."""
        with self._replicated.no_sync(), self.head.no_step():
            yield

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

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of backbone and head."""
        self.backbone.train(mode)
        self.head.train(mode)


class HybridNetwork(Network):
    """The backbone replicated, the head cut by class across the ranks."""

    def __init__(self, backbone: nn.Module, head: hp.ShardedClassifier, group: hp.Group, **parallel: Any) -> None:
        self.backbone, self.head = backbone, head
        self._replicated = hp.DataParallel(backbone, group=group, **parallel)

    def loss(self, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        return self.loss_of(self._replicated(*inputs), labels)

    def loss_of(self, features: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(features, labels)
        return loss


class DataNetwork(Network):
    """Backbone and whole head on every rank; all gradients travel."""

    def __init__(self, backbone: nn.Module, head: hp.ShardedClassifier, group: hp.Group, **parallel: Any) -> None:
        self.backbone, self.head = backbone, head
        self._whole_head = hp.ReplicatedClassifier(head, group)
        self._replicated = hp.DataParallel(_Both(backbone, self._whole_head), group=group, **parallel)

    def loss(self, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        loss: Tensor = self._replicated(labels, *inputs)
        return loss

    def loss_of(self, features: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._whole_head(features, labels)
        return loss


class _Both(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        loss: Tensor = self.head(self.backbone(*inputs), labels)
        return loss


def build_network(
    backbone: nn.Module,
    head: hp.ShardedClassifier,
    group: hp.Group,
    gradients: GradientsConfig,
    timeline: hp.Timeline | hp.NoTimeline,
) -> Network:
    """Hybrid where the head is cut over the group, data parallel where it is whole on each of several ranks."""
    mode = HybridNetwork if head.group.size == group.size else DataNetwork
    plan = gradients.plan()
    return mode(backbone, head, group, plan=plan, tune=gradients.tune, wires=[plan.wire], timeline=timeline)
