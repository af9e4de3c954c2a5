"""Write a trained BERT as transformers saves its own: configuration, weights, tokenizer.

    python -m recipes.bert.export RUN_OR_CHECKPOINT --out export/

``AutoModelForMaskedLM.from_pretrained("export/")`` (or ``AutoModelForSequenceClassification``) and
``AutoTokenizer.from_pretrained("export/")`` load it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recipes.bert.model import without_bars
from recipes.bert.trained import load_trained
from recipes.common.start import one_line_errors


@dataclass(frozen=True)
class Options:
    """Write a trained BERT as transformers saves its own."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint directory, or a run directory (its newest complete checkpoint is taken)."""
    out: Path
    """Folder to write to; made if missing."""


def main(options: Options) -> None:
    """Export, and print where it is.

    Raises:
        ValueError: there is no complete checkpoint of this recipe, or the folder cannot be made.
    """
    trained = load_trained(options.checkpoint)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the output folder {options.out}: {error}; choose another --out") from error
    model = trained.to_transformers()
    with without_bars():
        model.save_pretrained(options.out)
    trained.tokenizer.save(options.out, longest=trained.encoder.config.max_position_embeddings)
    print(f"{options.out}: step {trained.step}, {type(model).__name__} of {trained.head.num_classes:,} classes")


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    with one_line_errors():
        main(tyro.cli(Options, description=__doc__))
