"""From the configuration to a task: text, tokenizer and token cache, made by rank 0 where they are missing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hybridpar as hp
from recipes.bert.classify_task import ClassifyTask
from recipes.bert.config import TextConfig, TrainConfig
from recipes.bert.data.cache import TokenCache, build_cache, cache_name, open_cache
from recipes.bert.data.classification import Table, open_table, split_table
from recipes.bert.data.corpus import Corpus, embedded_corpus, open_corpus
from recipes.bert.data.tokenizer import WordPiece, load_tokenizer, train_tokenizer
from recipes.bert.mask_task import MaskTask
from recipes.bert.model import read_config
from recipes.bert.task import Task
from recipes.bert.trained import TOKENIZER
from recipes.common.checkpoints import CHECKPOINTS
from recipes.common.waiting import first_rank_prepares

log = logging.getLogger("recipes")

CACHE = "cache"
"""Folder of the token cache in the folder of a run, where no other is given."""

MADE_FROM = "made_from.json"
"""In the folder of a tokenizer that was trained here."""


def open_task(config: TrainConfig, group: hp.Group) -> Task:
    """What a run learns. Collective: rank 0 trains a tokenizer and writes tokens while the others wait.

    Raises:
        ValueError: text, table, tokenizer or cache cannot be used (on every rank).
    """
    if config.task == "classify":
        train, held_out = hp.together(group, lambda: open_tables(config))
        first_rank_prepares(group, lambda: prepare_tokenizer(config, train.texts, train.fingerprint))
        return hp.together(group, lambda: ClassifyTask(config, train, held_out, run_tokenizer(config)))
    first_rank_prepares(group, lambda: prepare_cache(config))
    return hp.together(group, lambda: MaskTask(config, *open_prepared(config)))


def cache_folder(config: TrainConfig) -> Path:
    """Of the tokens of all runs that share one."""
    return config.data.cache or config.run.out / CACHE


def open_tables(config: TrainConfig) -> tuple[Table, Table]:
    """Rows to train on, and rows to evaluate on."""
    data = config.data
    columns = {"text": data.text or None, "text_pair": data.text_pair or None, "label": data.label or None}
    table = open_table(data.path[0], **columns)
    if data.evaluate is None:
        return split_table(table, held_out=data.held_out, seed=config.seed)
    other = open_table(data.evaluate, **columns, names=table.names)
    if (table.pairs is None) != (other.pairs is None):
        kinds = {True: "single texts", False: "pairs"}
        raise ValueError(
            f"{other.path}: expected {kinds[table.pairs is None]} as in {table.path}, got {kinds[other.pairs is None]}"
        )
    return table, other


def find_corpus(data: TextConfig) -> Corpus:
    """The user's text, or that found among the installed packages."""
    return open_corpus(data.path) if data.path else embedded_corpus()


def open_prepared(config: TrainConfig) -> tuple[TokenCache, WordPiece]:
    """Tokens and tokenizer, which rank 0 has prepared."""
    corpus, tokenizer = find_corpus(config.data), run_tokenizer(config)
    name = cache_name(corpus, tokenizer, held_out=config.data.held_out, seed=config.seed)
    return TokenCache(cache_folder(config) / name, verify=False), tokenizer


def prepare_cache(config: TrainConfig) -> None:
    """See that tokenizer and tokens are there; what was made before is used again."""
    data = config.data
    corpus = find_corpus(data)
    tokenizer = prepare_tokenizer(config, corpus, corpus.fingerprint)
    # What was made from something else stays where it is: another run may go on from it.
    folder = cache_folder(config) / cache_name(corpus, tokenizer, held_out=data.held_out, seed=config.seed)
    if open_cache(folder, corpus, tokenizer, held_out=data.held_out, seed=config.seed) is None:
        log.info("text to tokens in %s ...", folder)
        build_cache(folder, corpus, tokenizer, held_out=data.held_out, seed=config.seed, progress=_Lines())


def run_tokenizer(config: TrainConfig) -> WordPiece:
    """That of the run."""
    return load_tokenizer(config.run.out / TOKENIZER)


def prepare_tokenizer(config: TrainConfig, texts: Iterable[str], text_fingerprint: str) -> WordPiece:
    """The one that was given, that of the pretrained model, that of the run so far, or one trained on the text.

    It is kept in the folder of the run.

    Raises:
        ValueError: the run has checkpoints that were trained with another one.
    """
    data, pretrained, own = config.data, config.model.pretrained, config.run.out / TOKENIZER
    goes_on = any((config.run.out / CHECKPOINTS).glob("step-*")) and own.is_dir()
    given = data.tokenizer or pretrained
    made_from = {"vocab_size": data.vocab_size, "lowercase": data.lowercase, "text": text_fingerprint}
    if given is not None:
        tokenizer, made_from = load_tokenizer(given), {}
        if pretrained is not None:
            tokenizer.expect_vocab_size(read_config(pretrained).vocab_size, origin=str(pretrained))
        if goes_on and load_tokenizer(own).fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"{config.run.out}: was trained with another tokenizer than {given}; give the same, or choose another "
                "--run.out"
            )
    else:
        before = _read_made_from(own)
        # Text of a run that goes on is compared as tokens: files may have been moved.
        if before == made_from or (goes_on and before | {"text": text_fingerprint} == made_from):
            return load_tokenizer(own)
        if goes_on:
            raise ValueError(
                f"{config.run.out}: its tokenizer was given, or trained with another --data.vocab-size or "
                "--data.lowercase; give the same, or choose another --run.out"
            )
        log.info("training a tokenizer of %s tokens ...", f"{data.vocab_size:,}")
        tokenizer = train_tokenizer(texts, vocab_size=data.vocab_size, lowercase=data.lowercase)
    if not (goes_on and given is not None):
        _keep(tokenizer, own, made_from)
    return tokenizer


def _keep(tokenizer: WordPiece, folder: Path, made_from: dict[str, Any]) -> None:
    """Write it whole, or leave what was there."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    tokenizer.save(temporary)
    (temporary / MADE_FROM).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
    if folder.is_dir():
        shutil.rmtree(folder)
    temporary.replace(folder)


def _read_made_from(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Lines:
    """Says now and then how many documents have become tokens."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds, self._said = seconds, time.monotonic()

    def __call__(self, documents: int) -> None:
        now = time.monotonic()
        if now - self._said >= self._seconds:
            self._said = now
            log.info("%s documents are tokens", f"{documents:,}")
