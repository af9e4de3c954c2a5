"""A step of the recipe, on any number of ranks, is a step of transformers' own BertForMaskedLM in one process."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM

import hybridpar as hp
from recipes.bert.config import ModelConfig, OptimizerConfig, TextConfig, TrainConfig
from recipes.bert.learner import Batch, Learner
from recipes.bert.model import MaskedEncoder, new_config
from recipes.common.config import RowsConfig, RunConfig
from tests.ranks import run_threads

V, D, S, B, STEPS = 37, 16, 9, 8, 3
MODEL = ModelConfig(layers=2, hidden=D, heads=2, intermediate=24, positions=S, dropout=0.0)


def _config(mode: str, accumulate: int, optimizer: str) -> TrainConfig:
    return TrainConfig(
        data=TextConfig(length=S),
        model=MODEL,
        head=RowsConfig(dtype="float64", rule="striped"),  # type: ignore[arg-type]  # not for users: as exact as it gets
        optimizer=OptimizerConfig(name=optimizer, clip=0.5),  # type: ignore[arg-type]
        run=RunConfig(out=Path("unused")),
        mode=mode,  # type: ignore[arg-type]
        batch=B,
        accumulate=accumulate,
    )


def _sequences(step: int) -> tuple[Tensor, Tensor]:
    """Ids and labels [B, S] of a step; -100 where nothing is asked, in numbers that differ from row to row."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(5, V, (B, S), generator=draw)
    asked = torch.rand(B, S, generator=draw) < torch.linspace(0.05, 0.6, B)[:, None]
    return ids, torch.where(asked, torch.randint(0, V, (B, S), generator=draw), -100)


def _new_encoder() -> tuple[MaskedEncoder, Tensor, Tensor]:
    torch.manual_seed(0)
    encoder = MaskedEncoder(new_config(MODEL, vocab_size=V, pad_token_id=0)).double()
    return encoder, torch.randn(V, D, dtype=torch.float64) * 0.1, torch.randn(V, dtype=torch.float64) * 0.1


_START = _new_encoder()  # once: ranks that are threads share the random generator


def _encoder() -> tuple[MaskedEncoder, Tensor, Tensor]:
    """Encoder, weight and bias that training starts from."""
    return copy.deepcopy(_START)


def _dense(optimizer: str) -> tuple[list[float], list[float], BertForMaskedLM]:
    """Losses, gradient norms and the model after all steps: transformers and torch alone, the whole batch at once."""
    encoder, weight, bias = _encoder()
    model = BertForMaskedLM(encoder.config).double()
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in encoder.named_parameters():
            theirs[name.replace("transform.", "cls.predictions.transform.", 1)].copy_(value)
        model.cls.predictions.decoder.weight.copy_(weight)
        model.cls.predictions.decoder.bias.copy_(bias)
    parameters = [p for p in model.parameters() if p is not model.cls.predictions.bias]
    kind = hp.Lamb if optimizer == "lamb" else torch.optim.AdamW
    steps = kind([
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ], lr=0.01)  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        ids, labels = _sequences(step)
        steps.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
        steps.step()
        losses.append(loss.item())
    return losses, norms, model


def _batches(group: hp.Group, step: int, accumulate: int) -> list[Batch]:
    ids, labels = _sequences(step)
    batches = []
    for part in range(accumulate):
        size = B // accumulate
        first, last = (part * size + size * rank // group.size for rank in (group.rank, group.rank + 1))
        mine, asked = ids[first:last], labels[first:last].flatten()
        positions = torch.nonzero(asked >= 0)[:, 0]
        batches.append(Batch(asked[positions], (mine, None, positions)))
    return batches


def _train(group: hp.Group, config: TrainConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    encoder, weight, bias = _encoder()
    learner = Learner(config, encoder, V, (weight, bias), group, hp.NoTimeline())
    results = [learner.step(_batches(group, step, config.accumulate), 0.01) for step in range(STEPS)]
    head = learner.head
    weights = dict(encoder.named_parameters())
    rows = head.class_centers(torch.arange(V))
    return [r.loss for r in results], [r.gradient_norm for r in results], {**weights, "rows": rows}


@pytest.mark.parametrize(
    ("ranks", "mode", "accumulate", "optimizer"),
    [
        (1, "hybrid", 1, "adamw"),
        (2, "hybrid", 1, "adamw"),
        (3, "hybrid", 2, "adamw"),
        (2, "hybrid", 2, "lamb"),
        (2, "data", 2, "adamw"),
    ],
)
def test_steps_are_those_of_transformers_in_one_process(ranks: int, mode: str, accumulate: int, optimizer: str) -> None:
    losses, norms, model = _dense(optimizer)
    theirs = dict(model.named_parameters())
    for found_losses, found_norms, weights in run_threads(ranks, _train, _config(mode, accumulate, optimizer)):
        assert found_losses == pytest.approx(losses, rel=1e-10)
        assert found_norms == pytest.approx(norms, rel=1e-9)
        assert max(norms) > 0.5, "clipping must have something to do"
        for name, value in weights.items():
            expected = (
                model.cls.predictions.decoder.weight
                if name == "rows"
                else theirs[name.replace("transform.", "cls.predictions.transform.", 1)]
            )
            torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10, msg=name)


def _judge(group: hp.Group, config: TrainConfig) -> tuple[float, Tensor]:
    encoder, weight, bias = _encoder()
    learner = Learner(config, encoder, V, (weight, bias), group, hp.NoTimeline())
    loss, best = learner.judge(_batches(group, 0, 1)[0])
    everyone = group.all_gather_json(best.tolist())
    return loss, torch.tensor([value for theirs in everyone for value in theirs])


@pytest.mark.parametrize(("ranks", "mode"), [(1, "hybrid"), (3, "hybrid"), (2, "data"), (9, "hybrid")])
def test_judging_gives_the_loss_and_the_best_tokens_of_transformers(ranks: int, mode: str) -> None:
    encoder, weight, bias = _encoder()
    model = encoder.eval().to_transformers((weight, bias)).double()
    ids, labels = _sequences(0)
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    for loss, best in run_threads(ranks, _judge, _config(mode, 1, "adamw")):
        assert loss == pytest.approx(float(output.loss), rel=1e-6)  # transformers' model was in float32 for a while
        assert best.tolist() == output.logits.argmax(-1)[labels >= 0].tolist()


def _train_with_nan(group: hp.Group, config: TrainConfig) -> Any:
    encoder, weight, bias = _encoder()
    learner = Learner(config, encoder, V, (weight, bias), group, hp.NoTimeline())
    before = {name: value.detach().clone() for name, value in encoder.named_parameters()}
    if group.rank == group.size - 1:
        handle = encoder.transform.register_forward_hook(lambda *call: call[2] * math.nan)
    with pytest.raises(hp.NonFiniteError, match=f"rank {group.size - 1}"):
        learner.step(_batches(group, 0, 1), 0.01)
    if group.rank == group.size - 1:
        handle.remove()
    for name, value in encoder.named_parameters():
        assert torch.equal(value, before[name])
    return learner.step(_batches(group, 0, 1), 0.01).loss


def test_a_step_with_nan_on_one_rank_is_refused_on_all_and_the_next_one_counts() -> None:
    losses, _, _ = _dense("adamw")
    for loss in run_threads(2, _train_with_nan, _config("hybrid", 1, "adamw")):
        assert loss == pytest.approx(losses[0], rel=1e-10)


def test_fewer_classes_than_ranks_are_refused_with_the_way_out() -> None:
    def build(group: hp.Group) -> None:
        encoder = _encoder()[0]
        Learner(_config("hybrid", 1, "adamw"), encoder, 2, None, group, hp.NoTimeline())

    with pytest.raises(ValueError, match="at least one class for each of 3 ranks, got 2; give --mode data"):
        run_threads(3, build)


def test_rows_that_step_by_themselves_go_with_neither_clipping_nor_data_mode() -> None:
    config = _config("data", 1, "adamw")
    with pytest.raises(ValueError, match=r"expected --mode hybrid, --optimizer\.clip 0 with it"):
        dataclasses.replace(config, head=RowsConfig(optimizer="adamw"))
