"""Judge a trained BERT on text never trained on, beside what needs no model.

    python -m recipes.bert.evaluate RUN_OR_CHECKPOINT                       # on what the run held out
    python -m recipes.bert.evaluate RUN_OR_CHECKPOINT --path other.txt      # task mask: text files or folders
    python -m recipes.bert.evaluate RUN_OR_CHECKPOINT --path test.csv       # task classify: a table

Prints a table and writes evaluation.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

import hybridpar as hp
from recipes.bert.classify_task import Judged, most_frequent
from recipes.bert.data.cache import HEADER, TokenCache, build_cache
from recipes.bert.data.classification import Table, open_table, split_table
from recipes.bert.data.corpus import open_corpus
from recipes.bert.data.pretraining import Sequences, unigram_baseline
from recipes.bert.mask_task import HeldOut
from recipes.bert.report import REPORT_FILE, format_table
from recipes.bert.tasks import CACHE
from recipes.bert.trained import TrainedBert, load_trained
from recipes.common.checkpoints import run_of
from recipes.common.start import one_line_errors


@dataclass(frozen=True)
class Options:
    """Judge a trained BERT on text never trained on, beside what needs no model."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint directory, or a run directory (its newest complete checkpoint is taken)."""
    path: tuple[Path, ...] = ()
    """Task mask: text files, or folders of them; task classify: one table. By default what the run held out."""
    samples: int = 0
    """Judge on no more sequences than this, spread over all; 0: all."""
    out: Path | None = None
    """Folder for the report; by default "evaluation" in the run."""
    batch: int = 64
    """Sequences of one forward pass."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""

    def __post_init__(self) -> None:
        if self.samples < 0 or self.batch < 1:
            raise ValueError(
                f"expected samples of at least 0 and a batch of at least 1, got {self.samples} and {self.batch}"
            )
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"device: expected one that is there, such as cpu, got {self.device!r}: {error}"
            ) from error


Results = Mapping[str, Mapping[str, float]]


def judge_masked(trained: TrainedBert, options: Options) -> Results:
    """Loss, perplexity and share of right tokens, beside unigram and uniform guesses.

    Raises:
        ValueError: the text cannot be used, or the run's own tokens are gone.
    """
    data = trained.config["data"]
    cache = find_tokens(trained)
    probabilities = unigram_baseline(cache)
    with contextlib.ExitStack() as stack:
        sequences = Sequences(cache, "held_out", length=data["length"])
        if options.path:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            other = build_cache(folder, open_corpus(options.path), trained.tokenizer, held_out=0.0, seed=0)
            sequences = Sequences(other, "train", length=data["length"])
        held_out = HeldOut(sequences, trained.tokenizer, data["mask_share"], options.samples or len(sequences))
        model = held_out.evaluate(trained.judge, hp.Group.alone(), options.batch)
        return {"model": model, **held_out.baselines(probabilities)}


def find_tokens(trained: TrainedBert) -> TokenCache:
    """Those that the run was trained with.

    Raises:
        ValueError: they are not where it left them.
    """
    data = trained.config["data"]
    folder = Path(data["cache"]) if data["cache"] else run_of(trained.directory) / CACHE
    for header in sorted(folder.glob(f"*/{HEADER}")):
        cache = TokenCache(header.parent, verify=False)
        if cache.fingerprint == trained.tokens:
            return TokenCache(header.parent)
    raise ValueError(
        f"expected the tokens of the run in {folder}, got none, or those of other text; start the command of the run "
        "again, and it makes them anew"
    )


def judge_texts(trained: TrainedBert, options: Options) -> Results:
    """Loss, accuracy and F1, beside the most frequent class.

    Raises:
        ValueError: a table cannot be used.
    """
    assert trained.labels is not None
    config = trained.config
    data, names = config["data"], list(trained.labels.values())

    def read(path: str | Path) -> Table:
        columns = (data[name] or None for name in ("text", "text_pair", "label"))
        text, text_pair, label = columns
        return open_table(Path(path), text=text, text_pair=text_pair, label=label, names=names)

    if len(options.path) > 1:
        raise ValueError(f"--path: expected one table, got {len(options.path)}")
    train = read(data["path"][0])
    if data["evaluate"] is None:
        train, held_out = split_table(train, held_out=data["held_out"], seed=config["seed"])
    else:
        held_out = read(data["evaluate"])
    table = read(options.path[0]) if options.path else held_out
    if (train.pairs is None) != (table.pairs is None):
        raise ValueError(f"{table.path}: expected single texts or pairs as in {train.path}, got the other")
    judged = Judged(table, trained.tokenizer, data["length"], options.samples or len(table))
    model = judged.evaluate(trained.judge, hp.Group.alone(), options.batch)
    return {"model": model, **judged.baselines(most_frequent(train))}


def main(options: Options) -> None:
    """Evaluate, print the table, write the report."""
    trained = load_trained(options.checkpoint, options.device)
    results = judge_masked(trained, options) if trained.task == "mask" else judge_texts(trained, options)
    print(f"{trained.directory}: step {trained.step}\n{format_table(results)}")
    folder = options.out or run_of(trained.directory) / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / REPORT_FILE
    report.write_text(json.dumps({"step": trained.step, "results": results}, indent=2) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    with one_line_errors():
        main(tyro.cli(Options, description=__doc__))
