"""What can be set: frozen dataclasses, each field a command-line option."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.common.config import RowsConfig, ScheduleConfig, TrainingConfig


@dataclass(frozen=True)
class TextConfig:
    """Text, and how it becomes tokens."""

    path: tuple[Path, ...] = ()
    """Task mask: text files, or folders of them; none: English text found among the installed packages. Task classify:
    one .csv, .tsv or .jsonl file."""
    evaluate: Path | None = None
    """Task classify: a file to evaluate on; none: a part of --data.path is kept apart."""
    text: str = ""
    """Task classify: the column with the text; by default "text" or "sentence"."""
    text_pair: str = ""
    """Task classify: the column with a second text, where texts come in pairs."""
    label: str = ""
    """Task classify: the column with the label; by default "label"."""
    tokenizer: Path | None = None
    """A tokenizer.json, a vocab.txt, or a folder that holds one, as transformers saves them; none: that of
    --model.pretrained, or else one is trained on the text."""
    vocab_size: int = 8192
    """Tokens of a tokenizer that is trained here."""
    lowercase: bool = True
    """A tokenizer that is trained here makes all letters small and takes accents off."""
    length: int = 128
    """Tokens of a sequence, [CLS] and [SEP] among them."""
    mask_share: float = 0.15
    """Task mask: share of the tokens to be predicted; whole words at a time."""
    held_out: float = 0.05
    """Share of the documents (task classify: of the rows) that are kept apart for evaluation."""
    held_out_samples: int = 2048
    """Evaluate on no more held-out sequences than this, spread over all."""
    cache: Path | None = None
    """Task mask: folder for text as tokens, mapped into memory; by default "cache" in --run.out. Runs may share one: in
    it each text, tokenizer and split has a folder of its own."""

    def __post_init__(self) -> None:
        for name, low in (("vocab_size", 64), ("length", 4), ("held_out_samples", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"data.{name}: expected at least {low}, got {getattr(self, name)}")
        for name in ("mask_share", "held_out"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"data.{name}: expected a share in (0, 1), got {getattr(self, name)}")


@dataclass(frozen=True)
class ModelConfig:
    """The encoder: a BERT of transformers, whose defaults are those of BERT-base."""

    pretrained: Path | None = None
    """A folder that transformers saved: configuration, weights and tokenizer come from there, and nothing below
    counts."""
    layers: int = 12
    """Transformer layers."""
    hidden: int = 768
    """Width D."""
    heads: int = 12
    """Attention heads; they divide the width."""
    intermediate: int = 3072
    """Width of the feed-forward layers."""
    positions: int = 512
    """Longest sequence that the model can ever take."""
    dropout: float = 0.1
    """Of hidden states and attention."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"model.heads: expected a divisor of model.hidden {self.hidden}, got {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout: expected a share in [0, 1), got {self.dropout}")


@dataclass(frozen=True)
class OptimizerConfig(ScheduleConfig):
    """How weights move."""

    name: Literal["adamw", "lamb"] = "adamw"
    """adamw, or lamb for very large batches."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of the moments."""
    weight_decay: float = 0.01
    """Of all weights but biases and layer norms."""


ADAMW = OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup=0.1, clip=1.0)
"""As BERT was trained."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """Train a BERT whose vocabulary head is cut by token across ranks."""

    task: Literal["mask", "classify"] = "mask"
    """mask: predict masked tokens, over a vocabulary; classify: predict the label of a text."""
    data: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: ADAMW)
    head: RowsConfig = field(default_factory=lambda: RowsConfig(initial_std=0.02))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "classify" and len(self.data.path) != 1:
            raise ValueError(f"data.path: expected one table for task classify, got {len(self.data.path)} paths")
        if self.model.pretrained is None and self.data.length > self.model.positions:
            raise ValueError(
                f"data.length: expected at most model.positions {self.model.positions}, got {self.data.length}"
            )
