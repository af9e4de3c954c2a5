"""Small runs of the recipe: text, a model to start from, and ranks that are threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hybridpar as hp
from recipes.bert.config import ModelConfig, OptimizerConfig, TextConfig, TrainConfig
from recipes.bert.data.tokenizer import train_tokenizer
from recipes.bert.model import MaskedEncoder, new_config
from recipes.bert.tasks import open_task
from recipes.bert.trainer import Trainer
from recipes.common.config import RunConfig
from recipes.common.metrics import read_metrics
from recipes.common.start import run_to_the_end
from tests.ranks import run_threads

NOUNS = ("gradient", "rank", "bucket", "lane", "row", "head", "shard", "margin")
VERBS = ("crosses", "leaves", "joins", "follows", "meets")
PLACES = ("on the host", "in memory", "at the end of a step", "between two ranks")


def write_text(path: Path, *, documents: int = 60) -> Path:
    """Sentences that follow a pattern, in documents that a blank line ends."""
    draw = np.random.default_rng(0)

    def sentence() -> str:
        first, second = draw.choice(NOUNS, 2, replace=False)
        return f"Every {first} {draw.choice(VERBS)} the {second} {draw.choice(PLACES)}."

    text = "\n\n".join("\n".join(sentence() for _ in range(12)) for _ in range(documents))
    path.write_text(text, encoding="utf-8")
    return path


def save_model(folder: Path, text: Path) -> Path:
    """An untrained model and a tokenizer, as transformers saves them: equal runs have to start from equal weights, and
    ranks that are threads share one random generator."""
    tokenizer = train_tokenizer([text.read_text(encoding="utf-8")], vocab_size=96)
    torch.manual_seed(0)
    sizes = ModelConfig(layers=1, hidden=16, heads=2, intermediate=32, positions=32, dropout=0.0)
    config = new_config(sizes, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    rows = 0.02 * torch.randn(tokenizer.vocab_size, 16), torch.zeros(tokenizer.vocab_size)
    MaskedEncoder(config).to_transformers(rows).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def small_config(out: Path, text: Path, pretrained: Path | None, **changes: Any) -> TrainConfig:
    """A run of seconds at a constant learning rate, so that its length does not change its steps."""
    config = TrainConfig(
        data=TextConfig(path=(text,), length=16, held_out=0.2, vocab_size=96),
        model=ModelConfig(
            pretrained=pretrained, layers=1, hidden=16, heads=2, intermediate=32, positions=32, dropout=0.0
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, schedule="constant", warmup=0.0, clip=1.0),
        run=RunConfig(out=out, tensorboard=False, export=False, quiet=True, log_every=1, evaluate_every=1000),
        batch=24,
        steps=30,
        threads=1,
    )
    return dataclasses.replace(config, **changes)


def train_threads(ranks: int, config: TrainConfig) -> list[Mapping[str, float]]:
    """A run to its end on ranks that are threads; what each of them found on what is held out."""

    def work(group: hp.Group) -> Mapping[str, float]:
        if group.rank == 0:
            config.run.out.mkdir(parents=True, exist_ok=True)
        group.barrier()
        trainer = Trainer(config, open_task(config, group), group)
        trainer.resume()
        assert run_to_the_end(trainer)
        return trainer.results

    return run_threads(ranks, work)


def losses(out: Path) -> dict[int, float]:
    """Loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(out) if "loss" in record}
