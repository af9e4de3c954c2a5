"""Judge a trained backbone on pairs of images, beside the raw pixels on the same pairs.

    python -m recipes.insightface.evaluate RUN_OR_CHECKPOINT --bin lfw.bin cfp_fp.bin
    python -m recipes.insightface.evaluate RUN_OR_CHECKPOINT --pairs pairs.txt --root images/
    python -m recipes.insightface.evaluate RUN_OR_CHECKPOINT --glyphs

Prints a table and writes evaluation.json and one roc-NAME.png per set of pairs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn

from recipes.common.checkpoints import run_of
from recipes.insightface.data.bin_pairs import load_bin, load_pair_list
from recipes.insightface.data.glyphs import glyph_datasets
from recipes.insightface.data.pairs import VerificationPairs
from recipes.insightface.plots import plot_roc
from recipes.insightface.trained import TrainedBackbone, load_backbone
from recipes.insightface.verification import FALSE_ACCEPT_RATES, VerificationResult, embed, raw_pixel_result, verify

REPORT_FILE = "evaluation.json"


@dataclass(frozen=True)
class Options:
    """Judge a trained backbone on pairs of images, beside the raw pixels on the same pairs."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint directory, or a run directory (its newest complete checkpoint is taken)."""
    bin: tuple[Path, ...] = ()
    """InsightFace .bin files, each a set of pairs."""
    pairs: Path | None = None
    """A text list of pairs: two image names and 1 (same identity) or 0 on each line."""
    root: Path | None = None
    """The folder or .zip file that the names in --pairs are relative to."""
    glyphs: bool = False
    """The characters that training on glyphs keeps apart for verification."""
    out: Path | None = None
    """Folder for the report and the plots; by default "evaluation" in the run."""
    flip: bool | None = None
    """Average every image with its mirror image; by default as in training (faces yes, characters no)."""
    folds: int = 10
    """Folds of the accuracy."""
    batch_size: int = 256
    """Images per forward pass."""
    device: str = "cpu"
    """Where to compute the embeddings: cpu, cuda, cuda:1."""


@dataclass(frozen=True)
class Evaluation:
    """One set of pairs, judged with the model's embeddings and with the pixels themselves."""

    model: VerificationResult
    raw_pixels: VerificationResult


def evaluate(
    model: nn.Module,
    pairs: VerificationPairs,
    *,
    flip: bool,
    folds: int = 10,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Judge a model, which is on ``device`` already, and raw pixels on the same pairs."""
    embeddings = embed(model, pairs.images, batch_size=batch_size, flip=flip, device=device)
    return Evaluation(verify(embeddings, pairs, folds=folds), raw_pixel_result(pairs, folds=folds))


def format_table(evaluations: Sequence[Evaluation]) -> str:
    """A text table with two rows per set of pairs; "-" where there are too few pairs to resolve a false accept rate."""
    rates = [f"TAR@FAR {rate:g}" for rate in FALSE_ACCEPT_RATES]
    rows = [["pairs", "count", "embedding", "accuracy", "AUC", *rates]]
    for evaluation in evaluations:
        for label, result in (("model", evaluation.model), ("raw pixels", evaluation.raw_pixels)):
            shares = ["-" if share is None else f"{share:.4f}" for share in result.tar_at_far.values()]
            accuracy = f"{result.accuracy:.4f} +- {result.accuracy_std:.4f}"
            rows.append([result.name, f"{result.pairs:,}", label, accuracy, f"{result.auc:.4f}", *shares])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def write_report(evaluations: Sequence[Evaluation], folder: Path | str, *, step: int) -> list[Path]:
    """Write evaluation.json and a ROC plot per set of pairs into ``folder`` (made if missing); return the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / REPORT_FILE
    results = [{"model": each.model.to_json(), "raw_pixels": each.raw_pixels.to_json()} for each in evaluations]
    report.write_text(json.dumps({"step": step, "results": results}, indent=2) + "\n", encoding="utf-8")
    written = [report]
    for each in evaluations:
        name = each.model.name
        path = folder / f"roc-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.png"
        curves = [("trained model", each.model), ("raw pixels", each.raw_pixels)]
        plot_roc(curves, path, title=f"{name}, {each.model.pairs:,} pairs")
        written.append(path)
    return written


def read_pairs(options: Options, trained: TrainedBackbone) -> list[VerificationPairs]:
    """Every set of pairs that the options name, in the image shape of the model.

    Raises ``ValueError`` where they name none, or a list without its root, and what the readers raise.
    """
    if (options.pairs is None) != (options.root is None):
        raise ValueError("--pairs and --root belong together: the list, and the folder its names are relative to")
    shape = trained.image_shape
    sets = [load_bin(path, image_shape=shape) for path in options.bin]
    if options.pairs is not None and options.root is not None:
        sets.append(load_pair_list(options.pairs, options.root, image_shape=shape))
    if options.glyphs:
        # The split of identities is a function of these options: with others, trained characters would be judged.
        sets.append(glyph_datasets(image_shape=shape, **trained.glyphs)[1])
    if not sets:
        raise ValueError("nothing to evaluate: give --bin FILE..., --pairs LIST --root DIR, or --glyphs")
    return sets


def main(options: Options) -> None:
    """Evaluate, print the table, write the report."""
    trained = load_backbone(options.checkpoint)
    flip = trained.flip if options.flip is None else options.flip
    model = trained.model.to(options.device)
    evaluations = [
        evaluate(model, pairs, flip=flip, folds=options.folds, batch_size=options.batch_size, device=options.device)
        for pairs in read_pairs(options, trained)
    ]
    print(f"{trained.directory}: step {trained.step}, mirror images {'averaged in' if flip else 'not used'}")
    print(format_table(evaluations))
    folder = options.out or run_of(trained.directory) / "evaluation"
    for path in write_report(evaluations, folder, step=trained.step):
        print(path)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        main(tyro.cli(Options, description=__doc__))
    except ValueError as error:
        sys.exit(f"error: {error}")
