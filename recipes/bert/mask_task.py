"""Predict masked tokens, over a vocabulary that may be very large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import hybridpar as hp
from recipes.bert.config import TrainConfig
from recipes.bert.data import pretraining
from recipes.bert.data.cache import TokenCache
from recipes.bert.data.pretraining import HELD_OUT_SEED, Sequences, unigram_baseline
from recipes.bert.data.tokenizer import WordPiece
from recipes.bert.learner import Batch
from recipes.bert.model import MaskedEncoder, expect_room, load_pretrained, new_config, read_config
from recipes.bert.task import Int64Array, Judge, Start, Task, shares, spread


class MaskTask(Task):
    """Windows of a corpus with some of their words masked; classes are the tokens.

    Args:
        config: of the run.
        cache: the corpus as tokens.
        tokenizer: that made them.
    """

    labels = None

    def __init__(self, config: TrainConfig, cache: TokenCache, tokenizer: WordPiece) -> None:
        self._config, self._cache, self._tokenizer = config, cache, tokenizer
        self._train = Sequences(cache, "train", length=config.data.length)
        self._held_out = HeldOut(
            Sequences(cache, "held_out", length=config.data.length), tokenizer, config.data.mask_share,
            config.data.held_out_samples,
        )  # fmt: skip
        self.num_samples, self.num_classes = len(self._train), tokenizer.vocab_size
        self.baselines = self._held_out.baselines(unigram_baseline(cache))
        documents = sum(cache.documents.values())
        self.summary = (
            f"text of {', '.join(cache.sources[:12])}{', ...' if len(cache.sources) > 12 else ''}: "
            f"{cache.text_bytes / 1e6:,.1f} MB, {documents:,} documents, {cache.train_tokens:,} tokens to train on, "
            f"{cache.held_out_tokens:,} held out, {len(self._held_out):,} sequences of them to evaluate on"
        )

    def start(self) -> Start:
        model = self._config.model
        if model.pretrained is None:
            config = new_config(model, vocab_size=self.num_classes, pad_token_id=self._tokenizer.pad_id)
            return Start(MaskedEncoder(config), None)
        config = read_config(model.pretrained)
        expect_room(config, model.pretrained, length=self._config.data.length, pairs=False)
        return Start(*load_pretrained(model.pretrained, config, MaskedEncoder))

    def batch(self, samples: Int64Array, epochs: Int64Array) -> Batch:
        share = self._config.data.mask_share
        made = self._train.batch(samples, epochs, seed=self._config.seed, tokenizer=self._tokenizer, share=share)
        return masked_batch(made)

    def evaluate(self, judge: Judge, group: hp.Group, micro_batch: int) -> dict[str, float]:
        return self._held_out.evaluate(judge, group, micro_batch)

    def describe(self) -> dict[str, Any]:
        return {
            "tokens": self._cache.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "length": self._config.data.length,
        }


class HeldOut:
    """Windows of text that was not trained on, always with the same words masked.

    Args:
        sequences: the windows.
        tokenizer: that made their tokens.
        share: of the tokens that are to be predicted.
        most: windows are judged, spread over the text.
    """

    def __init__(self, sequences: Sequences, tokenizer: WordPiece, share: float, most: int) -> None:
        self._sequences, self._tokenizer, self._share = sequences, tokenizer, share
        self._places = spread(len(sequences), most)

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, numbers: Int64Array) -> pretraining.Batch:
        """Some of them, by number."""
        samples = self._places[numbers]
        return self._sequences.batch(
            samples, np.zeros_like(samples), seed=HELD_OUT_SEED, tokenizer=self._tokenizer, share=self._share
        )

    def baselines(
        self, probabilities: npt.NDArray[np.float64], at_once: int = 256
    ) -> Mapping[str, Mapping[str, float]]:
        """What needs no model: every token as likely as in other text, and all equally likely.

        Args:
            probabilities: of each token [V], whatever its context.
            at_once: windows that are masked at a time.

        Raises:
            ValueError: there is nothing to predict in any of them.
        """
        count = len(self)
        unigram = torch.from_numpy(probabilities)
        labels = torch.cat([
            masked_batch(self.batch(np.arange(first, min(first + at_once, count)))).labels
            for first in range(0, count, at_once)
        ])  # fmt: skip
        if len(labels) == 0:
            raise ValueError("held-out text: expected tokens that the tokenizer knows, got none; hold out more of it")
        size = len(unigram)
        return {
            "unigram": {
                "loss": (loss := float(-unigram[labels].log().mean())),
                "perplexity": math.exp(loss),
                "accuracy": float((labels == unigram.argmax()).double().mean()),
            },
            "uniform": {"loss": math.log(size), "perplexity": float(size), "accuracy": 1 / size},
        }

    def evaluate(self, judge: Judge, group: hp.Group, micro_batch: int) -> dict[str, float]:
        """Mean loss, perplexity and share of right tokens. Collective."""
        losses, found = [], []
        for samples in shares(len(self), micro_batch, group):
            batch = masked_batch(self.batch(samples))
            loss, best = judge(batch)
            losses.append(loss)
            found.append([len(best), int((best.cpu() == batch.labels).sum())])
        # [batches, 2]: how many tokens, and how many of them were right.
        totals = group.all_reduce(torch.tensor(found, dtype=torch.float64))
        tokens, right = totals.unbind(dim=1)
        mean = float(torch.tensor(losses, dtype=torch.float64) @ tokens / tokens.sum())
        return {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "accuracy": float(right.sum() / tokens.sum()),
        }


def masked_batch(made: pretraining.Batch) -> Batch:
    """The positions that are to be predicted, and what is there: no other label travels."""
    labels = made.labels.flatten()
    positions = torch.nonzero(labels >= 0)[:, 0]
    attention = None if bool(made.attention_mask.all()) else made.attention_mask
    return Batch(labels[positions], (made.input_ids, attention, positions))
