"""The cases of `bert.py`: the recipe's model and step, and its peers, with what is known of their memory beforehand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from peers.bert_ddp import IGNORED, MaskedLoss, step_under_ddp
from support.launch import MIB
from torch import Tensor

import hybridpar as hp
from hybridpar.kernels import draw_normal_rows

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.bert.config import ModelConfig, OptimizerConfig, TrainConfig
from recipes.bert.learner import Batch, Learner
from recipes.bert.model import MaskedEncoder, new_config
from recipes.common.config import GradientsConfig, RowsConfig, RunConfig

# Resident memory of a rank that trains a very small model: interpreter, torch, transformers, gloo, autograd.
PROCESS_BYTES = 410 * MIB
# Of a token and layer, from the forward pass to the backward pass: matrices of D values.
_ACTIVATIONS = 22
# ShardedClassifier's default: products that are kept from the forward pass.
_KEPT_PRODUCTS = 128 * MIB
_STD = 0.02

Optimizer = Literal["sgd", "adamw"]
# One optimizer step; returns a loss whose mean over the ranks is that of the global batch.
Step = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        width: D; a head of attention has 64 of them, and the feed-forward layers have four times as many.
        sequences: of each rank.
        length: tokens of each sequence.
        steps: that are timed, after ``warm_up`` others.
    """

    vocabulary: int
    layers: int
    width: int
    sequences: int
    length: int
    steps: int
    warm_up: int
    lr: float
    optimizer: Optimizer
    precision: Literal["float32", "bfloat16"]

    @property
    def masked(self) -> int:
        """Tokens of each sequence that are predicted."""
        return round(0.15 * self.length)

    def model(self) -> ModelConfig:
        """Sizes of the encoder."""
        return ModelConfig(
            layers=self.layers, hidden=self.width, heads=self.width // 64, intermediate=4 * self.width,
            positions=max(512, self.length), dropout=0.0,
        )  # fmt: skip

    def encoder_bytes(self) -> int:
        """Of the weights of all layers, without the input table."""
        return 4 * (12 * self.width**2 + 13 * self.width) * self.layers + 4 * 520 * self.width

    def table_bytes(self) -> int:
        """Of V x D values."""
        return 4 * self.vocabulary * self.width


@dataclass(frozen=True)
class Sample:
    """A rank's batch: ids int64 [b, S], which tokens are predicted, and what they are.

    Attributes:
        positions: int64 [m], among the b * S tokens.
        labels: int64 [m].
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor

    def spread(self) -> Tensor:
        """Labels int64 [b, S], IGNORED elsewhere."""
        everywhere = torch.full_like(self.ids, IGNORED).flatten()
        everywhere[self.positions] = self.labels
        return everywhere.view_as(self.ids)


def draw(work: Work, rank: int) -> Sample:
    """The same for every case. Each sequence has the same number of masked tokens, so that the mean of the ranks' means
    is that of the global batch."""
    generator = torch.Generator().manual_seed(rank)
    shape = work.sequences, work.length
    ids = torch.randint(1, work.vocabulary, shape, generator=generator)
    chosen = torch.rand(shape, generator=generator).argsort(dim=1)[:, : work.masked].sort(dim=1).values
    positions = (chosen + work.length * torch.arange(work.sequences)[:, None]).flatten()
    return Sample(ids, positions, torch.randint(1, work.vocabulary, positions.shape, generator=generator))


@torch.no_grad()
def encoder_of(work: Work) -> MaskedEncoder:
    """Equal on all ranks and in all cases. Its table has the values of the output rows, as if it was tied to them."""
    torch.manual_seed(0)
    encoder = MaskedEncoder(new_config(work.model(), vocab_size=work.vocabulary, pad_token_id=0))
    initial_rows(encoder.bert.embeddings.word_embeddings.weight)
    return encoder


def initial_rows(rows: Tensor) -> Tensor:
    """[V, D], filled with what hp.ShardedClassifier starts with."""
    return draw_normal_rows(rows, torch.arange(len(rows)), seed=0, std=_STD)


class SgdRows(RowsConfig):
    """Rows that step in the backward pass as plain SGD; the recipe offers it with momentum."""

    def build_policy(self, *, learning_rate: float, **_: Any) -> hp.RowPolicy:
        return hp.RowSGD(learning_rate)


def recipe(
    work: Work,
    *,
    mode: Literal["hybrid", "data"] = "hybrid",
    rows_step: bool = False,
    rows_dtype: Literal["float32", "bfloat16"] = "float32",
    wire: Literal["same", "bfloat16"] = "same",
    compress: bool = False,
    fixed_table: bool = False,
) -> Step:
    """The recipe's Learner.

    Args:
        rows_step: in the backward pass.
        wire: format in which gradients travel.
        compress: their exponents, between hosts.
        fixed_table: the input table is not trained.
    """
    group = hp.init()
    encoder = encoder_of(work)
    encoder.bert.embeddings.word_embeddings.weight.requires_grad_(not fixed_table)
    rows_config = SgdRows if rows_step and work.optimizer == "sgd" else RowsConfig
    config = TrainConfig(
        run=RunConfig(out=Path()),  # nothing is written
        model=work.model(),
        head=rows_config(initial_std=_STD, optimizer=work.optimizer if rows_step else "shared", dtype=rows_dtype),
        optimizer=OptimizerConfig(learning_rate=work.lr, weight_decay=0.0, clip=0.0),
        gradients=GradientsConfig(wire=wire, compress_exponents=compress),
        mode=mode,
        precision=work.precision,
    )
    learner = Learner(config, encoder, work.vocabulary, None, group, hp.NoTimeline())
    if work.optimizer == "sgd":  # not one of the recipe's
        weights = [parameter for _, parameter in learner.network.named_parameters()]
        learner.optimizers["optimizer"] = learner.optimizer = torch.optim.SGD(weights, lr=work.lr)
    sample = draw(work, group.rank)
    batch = Batch(sample.labels, (sample.ids, None, sample.positions))
    return lambda: learner.step([batch], work.lr).loss


def torch_ddp(work: Work, *, tied: bool = False, bf16: bool = False) -> Step:
    """Hugging Face's model under torch's DistributedDataParallel."""
    encoder, sample = encoder_of(work), draw(work, dist.get_rank())
    rows = None if tied else initial_rows(torch.empty(work.vocabulary, work.width))
    dtype = torch.bfloat16 if work.precision == "bfloat16" else None
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adamw": partial(torch.optim.AdamW, weight_decay=0.0),
    }
    return step_under_ddp(
        MaskedLoss(encoder.bert, encoder.transform, rows, dtype), sample.ids, sample.spread(),
        partial(kinds[work.optimizer], lr=work.lr), bf16=bf16,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to train the model. Matrices are of V x D float32 values.

    Attributes:
        build: makes the step.
        tables: matrices that a rank has in memory at the worst moment of the backward pass, by the number of ranks;
            without the optimizer's state.
        stepped: those that an optimizer steps.
        tables_at_loss: those that there are together with logits of all tokens; None where there are none such.
        exact: gradients are those of the other cases, but for the order of summation.
        same_losses: steps whose losses are those of the other cases; None for all.
    """

    build: Callable[[Work], Step]
    tables: Callable[[int], float]
    stepped: Callable[[int], float]
    tables_at_loss: int | None = None
    exact: bool = True
    same_losses: int | None = None

    def estimate(self, work: Work, ranks: int) -> int:
        """Bytes that one rank will need at most."""
        adamw = work.optimizer == "adamw"
        tokens = work.sequences * work.length
        most = self.tables(ranks) * work.table_bytes()
        if self.tables_at_loss is None:
            most += _KEPT_PRODUCTS
        else:
            # The logarithms of their softmax, and the gradients of both.
            logits = 3 * 4 * tokens * work.vocabulary
            most = max(most, self.tables_at_loss * work.table_bytes() + logits)
        if adamw:
            # Both moments, and what torch's step makes of the largest one for the time being.
            most += 2 * (self.stepped(ranks) + 1) * work.table_bytes()
        activations = 4 * tokens * work.layers * work.width * _ACTIVATIONS
        return int(PROCESS_BYTES + (5 if adamw else 3) * work.encoder_bytes() + activations + most)


def _cut(cut: float, whole: float) -> Callable[[int], float]:
    return lambda ranks: whole + cut / ranks


def _whole(matrices: float) -> Callable[[int], float]:
    return lambda _: matrices


# Of a table that is trained there are weights, gradient, and the bucket in which it travels. DDP's gradients are views
# of buckets, and autograd makes one before it is copied there; two where the table is tied, and then their sum.
CASES = {
    "hybrid": Case(recipe, _cut(2, whole=3), _cut(1, whole=1)),
    "hybrid rows": Case(partial(recipe, rows_step=True), _cut(1, whole=3), _cut(1, whole=1)),
    "hybrid, fixed table": Case(
        partial(recipe, rows_step=True, fixed_table=True), _cut(1, whole=1), _cut(1, whole=0), same_losses=1
    ),
    "hybrid bf16 wire": Case(partial(recipe, wire="bfloat16"), _cut(2, whole=2.5), _cut(1, whole=1), exact=False),
    "hybrid compressed": Case(partial(recipe, compress=True), _cut(2, whole=3.5), _cut(1, whole=1)),
    "hybrid bf16 compressed": Case(
        partial(recipe, wire="bfloat16", compress=True), _cut(2, whole=3), _cut(1, whole=1), exact=False
    ),
    "hybrid bf16 rows": Case(
        partial(recipe, rows_step=True, rows_dtype="bfloat16", wire="bfloat16"), _cut(0.5, whole=2.5),
        _cut(1, whole=1), exact=False,
    ),
    "data": Case(partial(recipe, mode="data"), _whole(6), _whole(2)),
    "torch DDP": Case(torch_ddp, _whole(5), _whole(2), tables_at_loss=4),
    "torch DDP tied": Case(partial(torch_ddp, tied=True), _whole(5), _whole(1), tables_at_loss=2, same_losses=1),
    "torch DDP bf16": Case(partial(torch_ddp, bf16=True), _whole(6), _whole(2), tables_at_loss=4, exact=False),
}  # fmt: skip
