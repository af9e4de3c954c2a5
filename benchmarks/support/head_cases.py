"""The cases of `hybrid.py`: each a head of some kind behind one linear layer, with what is known of it beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peers.dense_logits import DenseLogitsHead
from peers.loss_parallel import LossParallelHead
from peers.whole_head import BackboneAndWholeHead
from support.launch import MIB
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp
from hybridpar.kernels import draw_normal_rows

# Resident memory of a rank that trains a very small head: interpreter, torch, gloo, autograd.
PROCESS_BYTES = 340 * MIB
# Products that a head keeps for the backward pass at most, as it is built here.
KEPT_BYTES = 128 * MIB
# Relative; float32 over different orders of summation.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        batch: samples of each rank.
        steps: that are timed, after ``warm_up`` others.
    """

    classes: int
    embedding: int
    batch: int
    steps: int
    warm_up: int
    lr: float
    momentum: float = 0.9
    std: float = 0.01


@dataclass(frozen=True)
class Model:
    """One rank's part: inputs and labels to loss; what is trained; what follows backward, before the optimizer."""

    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    after_backward: Callable[[], None] = lambda: None


class BackboneAndHead(nn.Module):
    """Inputs and labels to loss."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


def hybrid(work: Work, backbone: nn.Module, **options: Any) -> Model:
    group = hp.init()
    replicated = hp.DataParallel(backbone, group=group)
    head = hp.ShardedClassifier(work.embedding, work.classes, initial_std=work.std, group=group, **options)
    rows = [head.weight] if head.row_optimizer is None else []
    return Model(lambda inputs, labels: head(replicated(inputs), labels), [*backbone.parameters(), *rows])


def rows_step(work: Work, backbone: nn.Module, **options: Any) -> Model:
    return hybrid(work, backbone, optimizer=hp.RowSGD(work.lr, momentum=work.momentum), **options)


def rows_step_bf16(work: Work, backbone: nn.Module) -> Model:
    return rows_step(work, backbone, compute_dtype=torch.bfloat16)


def half_rows_step(work: Work, backbone: nn.Module, **options: Any) -> Model:
    policy = hp.RowSGD(work.lr, momentum=work.momentum, state_dtype=torch.bfloat16)
    return hybrid(work, backbone, optimizer=policy, dtype=torch.bfloat16, **options)


def rows_step_sampled(work: Work, backbone: nn.Module) -> Model:
    return rows_step(work, backbone, compute_dtype=torch.bfloat16, sampler=hp.UniformSampler(rate=0.1))


def half_rows_step_sampled(work: Work, backbone: nn.Module) -> Model:
    return half_rows_step(work, backbone, sampler=hp.UniformSampler(rate=0.1))


def data(work: Work, backbone: nn.Module) -> Model:
    group = hp.init()
    head = hp.ShardedClassifier(work.embedding, work.classes, initial_std=work.std, group=hp.Group.alone())
    both = BackboneAndHead(backbone, hp.ReplicatedClassifier(head, group))
    return Model(hp.DataParallel(both, group=group), list(both.parameters()))


def softmax(work: Work, backbone: nn.Module) -> Model:
    return rows_step(work, backbone, compute_dtype=torch.bfloat16, margin=hp.Softmax(bias=False))


def torch_loss_parallel(work: Work, backbone: nn.Module) -> Model:
    per_rank = math.ceil(work.classes / dist.get_world_size())
    first = per_rank * dist.get_rank()
    head = LossParallelHead(initial_rows(work, first, min(first + per_rank, work.classes)))
    return Model(
        lambda inputs, labels: head(backbone(inputs), labels),
        [*backbone.parameters(), head.weight],
        lambda: sum_gradients(backbone),
    )


def sum_gradients(backbone: nn.Module) -> None:
    for parameter in backbone.parameters():
        dist.all_reduce(parameter.grad)


def dense_sampled(work: Work, backbone: nn.Module) -> Model:
    return dense_logits(work, backbone, rate=0.1)


def dense_logits(work: Work, backbone: nn.Module, rate: float = 1.0) -> Model:
    per_rank = math.ceil(work.classes / dist.get_world_size())
    first = per_rank * dist.get_rank()
    head = DenseLogitsHead(initial_rows(work, first, min(first + per_rank, work.classes)), first, rate=rate)
    return Model(
        lambda inputs, labels: head(backbone(inputs), labels),
        [*backbone.parameters(), head.weight],
        lambda: sum_gradients(backbone),
    )


def torch_ddp(work: Work, backbone: nn.Module) -> Model:
    model = DistributedDataParallel(BackboneAndWholeHead(backbone, initial_rows(work, 0, work.classes)))
    return Model(model, list(model.parameters()))


def initial_rows(work: Work, first: int, end: int) -> Tensor:
    """The rows that hp.ShardedClassifier starts with."""
    rows = torch.empty(end - first, work.embedding)
    return draw_normal_rows(rows, torch.arange(first, end), seed=0, std=work.std)


@dataclass(frozen=True)
class Case:
    """One way to train the head.

    Attributes:
        cut: whether a rank holds its share of the classes, or all of them.
        row_copies: matrices as large as a rank's rows that are in memory together at the worst moment.
        logits_copies: the same for matrices of a rank's logits.
        keeps_products: whether products are kept for the backward pass, as far as they may.
        own_rows: matrices that the head cannot do without: rows, momentum, and where there is one the gradient.
        tolerance: by how much its losses may differ from those of the first case with the same loss, relative; None
            where they are of a sample.
        loss: which it is.
    """

    build: Callable[[Work, nn.Module], Model]
    cut: bool
    row_copies: int
    logits_copies: int = 0
    own_rows: float = 3
    tolerance: float | None = LOSS_TOLERANCE
    loss: str = "ArcFace"
    keeps_products: bool = False

    def rows_bytes(self, work: Work, ranks: int) -> int:
        """Of the rows that one rank holds."""
        return 4 * work.embedding * math.ceil(work.classes / (ranks if self.cut else 1))

    def estimate(self, work: Work, ranks: int) -> int:
        """Bytes that one rank will need at most."""
        rows = math.ceil(work.classes / (ranks if self.cut else 1))
        logits = 4 * rows * work.batch * (ranks if self.cut else 1)
        kept = min(logits, KEPT_BYTES) if self.keeps_products else 0
        return PROCESS_BYTES + kept + self.row_copies * self.rows_bytes(work, ranks) + self.logits_copies * logits


CASES = {
    # Rows, gradient, momentum.
    "hybrid": Case(hybrid, cut=True, row_copies=3, keeps_products=True),
    # Rows and momentum, and the products that are kept.
    "rows": Case(rows_step, cut=True, row_copies=2, keeps_products=True, own_rows=2),
    # Products are rounded to 8 bits, and so are, at every step, the sums of them that make the features' gradient.
    "rows bf16": Case(rows_step_bf16, cut=True, row_copies=2, keeps_products=True, own_rows=2, tolerance=1e-2),
    "bf16 rows": Case(half_rows_step, cut=True, row_copies=1, keeps_products=True, own_rows=1, tolerance=1e-2),
    "rate 0.1": Case(rows_step_sampled, cut=True, row_copies=2, keeps_products=True, own_rows=2, tolerance=None),
    "bf16 rate 0.1": Case(
        half_rows_step_sampled, cut=True, row_copies=1, keeps_products=True, own_rows=1, tolerance=None
    ),
    # And the bucket in which the gradient travels. It lies in shared memory: each rank's resident memory counts pages
    # of the other ranks' buckets too, the machine holds them once.
    "data": Case(data, cut=False, row_copies=4, logits_copies=0),
    # And unit rows, their gradient, and two temporaries of the normalisation's backward pass.
    "dense logits": Case(dense_logits, cut=True, row_copies=7, logits_copies=4),
    "dense 0.1": Case(dense_sampled, cut=True, row_copies=7, logits_copies=1, tolerance=None),
    "softmax": Case(softmax, cut=True, row_copies=2, keeps_products=True, own_rows=2, tolerance=1e-2, loss="softmax"),
    "loss parallel": Case(torch_loss_parallel, cut=True, row_copies=4, logits_copies=4, loss="softmax"),
    # And the bucket, which DistributedDataParallel builds anew after the first step.
    "torch DDP": Case(torch_ddp, cut=False, row_copies=9, logits_copies=4),
}
