"""A small recogniser that is trained in pieces: on N ranks with checkpoints in between, and dense in one go."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.head.cases import has_bias

INPUTS, EMBEDDING, CLASSES, BATCH, STEPS, STOP = 5, 6, 11, 9, 6, 3
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.02),
}


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    margin: Any = field(default_factory=hp.ArcFace)
    optimizer: str = "sgd"
    sharded: bool = True
    dtype: torch.dtype = torch.float64


@functools.cache
def start() -> tuple[nn.Module, Tensor, Tensor, tuple[tuple[Tensor, Tensor], ...]]:
    """Initial backbone, rows [K, D] and bias [K], and the global batches."""
    # No bias before the batch norm: its gradient is exactly 0, and AdamW would blow up the rounding.
    first = nn.Linear(INPUTS, 8, bias=False)
    backbone = nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, EMBEDDING)).double()
    # A generator of its own: threads ask for this at once, and share the global one.
    draw = torch.Generator().manual_seed(6)
    for parameter in backbone.parameters():
        parameter.data.normal_(generator=draw)
    kind: dict[str, Any] = {"dtype": torch.float64, "generator": draw}
    rows, bias = torch.randn(CLASSES, EMBEDDING, **kind), torch.randn(CLASSES, **kind)
    batches = tuple(
        (torch.randn(BATCH, INPUTS, **kind), torch.randint(CLASSES, (BATCH,), generator=draw)) for _ in range(STEPS)
    )
    return backbone, rows, bias, batches


class Trainee:
    """Backbone, head and optimizer of one rank."""

    def __init__(self, group: hp.Group, setting: Setting, rule: Any = "even") -> None:
        backbone, rows, bias, _ = start()
        self.group, self.setting = group, setting
        body = hp.SyncBatchNorm.convert(copy.deepcopy(backbone), group).to(setting.dtype)
        self.backbone = hp.DataParallel(body, group=group)
        self.head = hp.ShardedClassifier(
            EMBEDDING,
            CLASSES,
            margin=setting.margin,
            rule=rule,
            dtype=setting.dtype,
            group=group if setting.sharded else hp.Group.alone(),
        )
        ids = self.head.layout.class_ids(self.head.group.rank)
        self.head.weight.data.copy_(rows[ids])
        if self.head.bias is not None:
            self.head.bias.data.copy_(bias[ids])
        self.optimizer = OPTIMIZERS[setting.optimizer]([*self.backbone.parameters(), *self.head.parameters()])

    def train(self, first: int, last: int) -> list[float]:
        """Steps [first, last) of the global order; their losses."""
        losses = []
        for images, labels in start()[3][first:last]:
            bounds = [BATCH * rank // self.group.size for rank in range(self.group.size + 1)]
            mine = slice(bounds[self.group.rank], bounds[self.group.rank + 1])
            self.optimizer.zero_grad()
            features = self.backbone(images[mine].to(self.setting.dtype))
            if self.setting.sharded:
                loss = self.head(features, labels[mine])
                loss.backward()
            else:
                self._replicated_head(features, labels, bounds)
                loss = features.new_zeros(())
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def _replicated_head(self, features: Tensor, labels: Tensor, bounds: list[int]) -> None:
        """Every rank computes the loss of the whole batch; only its own features get their gradient from it."""
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        whole = self.group.all_gather(features.detach(), sizes).requires_grad_()
        self.head(whole, labels).backward()
        assert whole.grad is not None
        features.backward(whole.grad.split(sizes)[self.group.rank])

    def save(self, directory: Path, step: int, **arguments: Any) -> Path:
        settings: dict[str, Any] = {"model": self.backbone, "head": self.head, "optimizer": self.optimizer}
        return hp.checkpoint.save(directory, step=step, group=self.group, **(settings | arguments))

    def load(self, directory: Path, **arguments: Any) -> hp.checkpoint.Checkpoint:
        settings: dict[str, Any] = {"model": self.backbone, "head": self.head, "optimizer": self.optimizer}
        return hp.checkpoint.load(directory, group=self.group, **(settings | arguments))

    def state(self) -> dict[str, Any]:
        """All that training has moved; what is cut by class comes with the ids of this rank's classes."""
        found: dict[str, Any] = {f"model.{name}": value.clone() for name, value in self.backbone.state_dict().items()}
        found |= {f"head.{name}": parameter.detach().clone() for name, parameter in self.head.named_parameters()}
        named = {f"model.{n}": p for n, p in self.backbone.module.named_parameters()}
        named |= {f"head.{n}": p for n, p in self.head.named_parameters()}
        found |= _optimizer_state(self.optimizer, named)
        found["margin_state"] = self.head.margin_state.clone()
        return found | {"ids": self.head.layout.class_ids(self.head.group.rank)}


def _optimizer_state(optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{name}/{slot}": value.clone()
        for name, parameter in named.items()
        for slot, value in optimizer.state[parameter].items()
    }


@functools.cache
def dense_run(setting: Setting, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The same training without interruption on one process in plain torch: losses, and what it has moved."""
    first, weight, offsets, batches = start()
    backbone, rows, bias = copy.deepcopy(first), nn.Parameter(weight.clone()), nn.Parameter(offsets.clone())
    head = {"head.weight": rows} | ({"head.bias": bias} if has_bias(setting.margin) else {})
    optimizer = OPTIMIZERS[setting.optimizer]([*backbone.parameters(), *head.values()])
    state, losses = initial_state(setting.margin), []
    for images, labels in batches[:steps]:
        optimizer.zero_grad()
        loss, state = dense_loss(
            backbone(images), rows, labels, setting.margin, bias if has_bias(setting.margin) else None, state
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = {f"model.{n}": p for n, p in backbone.named_parameters()} | head
    found = {f"model.{name}": value.clone() for name, value in backbone.state_dict().items()}
    found |= {name: parameter.detach().clone() for name, parameter in head.items()}
    found |= _optimizer_state(optimizer, named)
    return losses, found | {"margin_state": torch.empty(0) if state is None else state}


def assert_state(found: dict[str, Any], dense: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """A rank's `Trainee.state()` is its part of the dense run's."""
    ids = found["ids"]
    assert found.keys() - {"ids"} == dense.keys()
    for name, expected in dense.items():
        if name.startswith("head.") and expected.ndim:
            expected = expected[ids]
        ours = found[name]
        torch.testing.assert_close(
            ours, expected.to(ours.dtype), rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
