"""From the configuration to a task: text, tokenizer and token cache, made by rank 0 where they are missing."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import hybridpar as hp
from recipes.bert.classify_task import ClassifyTask
from recipes.bert.config import TextConfig, TrainConfig
from recipes.bert.data.cache import TokenCache, build_cache, open_cache
from recipes.bert.data.classification import Table, open_table, split_table
from recipes.bert.data.corpus import Corpus, embedded_corpus, open_corpus
from recipes.bert.data.tokenizer import WordPiece, load_tokenizer, train_tokenizer
from recipes.bert.mask_task import MaskTask
from recipes.bert.model import read_config
from recipes.bert.task import Task
from recipes.bert.trained import TOKENIZER
from recipes.common.waiting import first_rank_prepares

log = logging.getLogger("recipes")

CACHE = "cache"
"""Folder of the token cache in the folder of a run, where no other is given."""


def open_task(config: TrainConfig, group: hp.Group) -> Task:
    """What a run learns. Collective: rank 0 trains a tokenizer and writes tokens while the others wait.

    Raises:
        ValueError: text, table, tokenizer or cache cannot be used (on every rank).
    """
    folder = config.run.out / TOKENIZER
    if config.task == "classify":
        train, held_out = hp.together(group, lambda: open_tables(config))
        first_rank_prepares(group, lambda: prepare_tokenizer(config, train.texts).save(folder))
        return hp.together(group, lambda: ClassifyTask(config, train, held_out, load_tokenizer(folder)))
    cache = config.data.cache or config.run.out / CACHE
    first_rank_prepares(group, lambda: prepare_cache(config, folder, cache))
    return hp.together(group, lambda: MaskTask(config, TokenCache(cache, verify=False), load_tokenizer(folder)))


def open_tables(config: TrainConfig) -> tuple[Table, Table]:
    """Rows to train on, and rows to evaluate on."""
    data = config.data
    columns = {"text": data.text or None, "text_pair": data.text_pair or None, "label": data.label or None}
    table = open_table(data.path[0], **columns)
    if data.evaluate is None:
        return split_table(table, held_out=data.held_out, seed=config.seed)
    return table, open_table(data.evaluate, **columns, names=table.names)


def find_corpus(data: TextConfig) -> Corpus:
    """The user's text, or that found among the installed packages."""
    return open_corpus(data.path) if data.path else embedded_corpus()


def prepare_cache(config: TrainConfig, tokenizer_folder: Path, cache_folder: Path) -> None:
    """See that tokenizer and tokens are there; what was made before is used again."""
    data = config.data
    corpus = find_corpus(data)
    tokenizer = prepare_tokenizer(config, corpus)
    tokenizer.save(tokenizer_folder)
    if open_cache(cache_folder, corpus, tokenizer, held_out=data.held_out, seed=config.seed) is None:
        log.info("text to tokens in %s ...", cache_folder)
        build_cache(cache_folder, corpus, tokenizer, held_out=data.held_out, seed=config.seed, progress=_Lines())


def prepare_tokenizer(config: TrainConfig, texts: Corpus | tuple[str, ...]) -> WordPiece:
    """The one that was given, that of the pretrained model, that of the run so far, or one trained on the text."""
    data, pretrained, own = config.data, config.model.pretrained, config.run.out / TOKENIZER
    if pretrained is not None:
        tokenizer = load_tokenizer(data.tokenizer or pretrained)
        tokenizer.expect_vocab_size(read_config(pretrained).vocab_size, origin=str(pretrained))
        return tokenizer
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    if own.is_dir():
        tokenizer = load_tokenizer(own)
        log.info("going on with the tokenizer of the run, %s tokens", f"{tokenizer.vocab_size:,}")
        return tokenizer
    log.info("training a tokenizer of %s tokens ...", f"{data.vocab_size:,}")
    return train_tokenizer(texts, vocab_size=data.vocab_size, lowercase=data.lowercase)


class _Lines:
    """Says now and then how many documents have become tokens."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds, self._said = seconds, time.monotonic()

    def __call__(self, documents: int) -> None:
        now = time.monotonic()
        if now - self._said >= self._seconds:
            self._said = now
            log.info("%s documents are tokens", f"{documents:,}")
