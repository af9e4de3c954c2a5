"""Predict the label of a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score

import hybridpar as hp
from recipes.bert.config import TrainConfig
from recipes.bert.data.classification import ClassificationBatch, EncodedTable, Table
from recipes.bert.data.tokenizer import WordPiece
from recipes.bert.learner import Batch
from recipes.bert.model import TextEncoder, expect_room, load_pretrained, new_config, read_config
from recipes.bert.task import Int64Array, Judge, Start, Task, shares, spread

log = logging.getLogger("recipes")


class ClassifyTask(Task):
    """Rows of a table; classes are their labels.

    Args:
        config: of the run.
        train: rows to train on.
        held_out: rows to evaluate on.
        tokenizer: of the encoder.
    """

    def __init__(self, config: TrainConfig, train: Table, held_out: Table, tokenizer: WordPiece) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._table, self._train = train, EncodedTable(train, tokenizer, max_length=config.data.length)
        self._held_out = Judged(held_out, tokenizer, config.data.length, config.data.held_out_samples)
        self.num_samples, self.num_classes = len(train), len(train.names)
        self.labels = dict(enumerate(train.names))
        self.baselines = self._held_out.baselines(most_frequent(train))
        cut = self._train.truncated / len(train)
        self.summary = (
            f"{train.path}: {len(train):,} rows to train on, "
            f"{len(self._held_out):,} of {len(held_out):,} to evaluate on, "
            f"{self.num_classes:,} classes" + (f"; {cut:.1%} of the rows are cut to --data.length" if cut else "")
        )

    def start(self) -> Start:
        model = self._config.model
        if model.pretrained is None:
            config = new_config(model, vocab_size=self._tokenizer.vocab_size, pad_token_id=self._tokenizer.pad_id)
            return Start(TextEncoder(config), None)
        config = read_config(model.pretrained)
        expect_room(config, model.pretrained, length=self._config.data.length, pairs=self._table.pairs is not None)
        encoder, rows = load_pretrained(model.pretrained, config, TextEncoder)
        if rows is not None and config.id2label != self.labels:
            log.info("%s: its output layer is for other labels, a new one starts", model.pretrained)
            rows = None
        return Start(encoder, rows)

    def batch(self, samples: Int64Array, epochs: Int64Array) -> Batch:
        return text_batch(self._train.batch(samples))

    def evaluate(self, judge: Judge, group: hp.Group, micro_batch: int) -> dict[str, float]:
        return self._held_out.evaluate(judge, group, micro_batch)

    def describe(self) -> dict[str, Any]:
        return {
            "rows": self._table.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "length": self._config.data.length,
        }


class Judged:
    """Rows of a table with known labels.

    Args:
        table: the rows.
        tokenizer: of the encoder.
        length: tokens of a row at most.
        most: rows are judged, spread over the table.
    """

    def __init__(self, table: Table, tokenizer: WordPiece, length: int, most: int) -> None:
        chosen = table.select(spread(len(table), most))
        self._labels, self._encoded = chosen.labels, EncodedTable(chosen, tokenizer, max_length=length)

    def __len__(self) -> int:
        return len(self._labels)

    def baselines(self, always: int) -> Mapping[str, Mapping[str, float]]:
        """What needs no model: the same class ``always``."""
        return {"most frequent": scores(self._labels, np.full(len(self), always))}

    def evaluate(self, judge: Judge, group: hp.Group, micro_batch: int) -> dict[str, float]:
        """Mean loss, accuracy and F1. Collective."""
        count = len(self)
        losses: list[float] = []
        sizes: list[int] = []
        found = []
        for samples in shares(count, micro_batch, group):
            loss, best = judge(text_batch(self._encoded.batch(samples)))
            losses.append(loss)
            sizes.append(min(micro_batch, count - len(sizes) * micro_batch))
            found.append((samples.tolist(), best.tolist()))
        predicted = np.empty(count, dtype=np.int64)
        for theirs in group.all_gather_json(found):
            for samples, best in theirs:
                predicted[samples] = best
        return {"loss": float(np.average(losses, weights=sizes)), **scores(self._labels, predicted)}


def most_frequent(table: Table) -> int:
    """The class of most rows."""
    return int(np.bincount(table.labels).argmax())


def scores(labels: Int64Array, predicted: Int64Array) -> dict[str, float]:
    """Accuracy, and F1 as the mean over the classes that occur."""
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "f1": float(f1_score(labels, predicted, average="macro", zero_division=0.0)),
    }


def text_batch(made: ClassificationBatch) -> Batch:
    """One feature a row."""
    attention = None if bool(made.attention_mask.all()) else made.attention_mask
    return Batch(made.labels, (made.input_ids, attention, made.token_type_ids))
