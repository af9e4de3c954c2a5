"""The presets of the recipe: named sets of defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.bert.config import ADAMW, ModelConfig, TextConfig, TrainConfig
from recipes.common.config import RunConfig

# Minutes on two CPU cores. Nothing is seen often enough to be learnt by heart, so that there is no dropout; more is
# masked than usual, because a small model learns more from each sequence that way.
_EMBEDDED = TrainConfig(
    data=TextConfig(vocab_size=4096, length=64, mask_share=0.2, held_out_samples=1024),
    model=ModelConfig(layers=2, hidden=128, heads=4, intermediate=512, positions=128, dropout=0.0),
    optimizer=replace(ADAMW, learning_rate=1.5e-3, warmup=0.05),
    run=RunConfig(out=Path("runs/bert-embedded"), checkpoint_every=1000, evaluate_every=500),
    batch=32,
    steps=4000,
)

_BASE = TrainConfig(
    data=TextConfig(vocab_size=30522, length=512),
    run=RunConfig(out=Path("runs/bert-base")),
    batch=256,
    precision="bfloat16",
)

_CLASSIFY = TrainConfig(
    task="classify",
    data=TextConfig(path=(Path("texts.csv"),), held_out=0.1),
    optimizer=replace(ADAMW, learning_rate=3e-5),
    run=RunConfig(out=Path("runs/bert-classify"), checkpoint_every=500, evaluate_every=500),
    mode="data",
    batch=32,
    epochs=3,
)

PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "embedded": (
        "English text found among the installed packages: nothing to download, minutes on two CPU cores.",
        _EMBEDDED,
    ),
    "base": ("BERT-base on text files or folders (--data.path).", _BASE),
    "classify": ("A table of texts and labels (--data.path), starting from --model.pretrained.", _CLASSIFY),
}
