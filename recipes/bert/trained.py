"""A trained encoder and its head read back from a checkpoint: one process, no optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, PreTrainedModel

import hybridpar as hp
from recipes.bert.data.tokenizer import WordPiece, load_tokenizer
from recipes.bert.learner import Batch
from recipes.bert.model import Encoder, MaskedEncoder, TextEncoder
from recipes.common.checkpoints import MANIFEST, find_checkpoint, read_manifest, run_of

TOKENIZER = "tokenizer"
"""Folder of the tokenizer in the folder of a run."""

ENCODERS: Mapping[str, type[Encoder]] = {"mask": MaskedEncoder, "classify": TextEncoder}
"""By task."""


@dataclass(frozen=True)
class TrainedBert:
    """What a checkpoint holds.

    Attributes:
        task: "mask" or "classify".
        encoder: in evaluation mode.
        head: all classes, in this process.
        tokenizer: that of the run.
        labels: names of the classes; None for tokens.
        step: of the checkpoint.
        directory: of the checkpoint.
        config: the whole configuration of the training run, as it was stored.
        tokens: fingerprint of the tokens that the run was trained with; None where it had no cache.
    """

    task: str
    encoder: Encoder
    head: hp.ShardedClassifier
    tokenizer: WordPiece
    labels: Mapping[int, str] | None
    step: int
    directory: Path
    config: Mapping[str, Any]
    tokens: str | None

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[float, Tensor]:
        """Mean loss of a batch, and the best class [m] of each feature; see ``task.Judge``."""
        batch = batch.to(self.head.weight.device)
        features = self.encoder(*batch.inputs)
        return float(self.head(features, batch.labels)), self.head.predict(features)[1][:, 0]

    def to_transformers(self) -> PreTrainedModel:
        """The model as ``transformers`` knows it, in float32 and evaluation mode."""
        assert self.head.bias is not None
        # One rank, even rule: row i is class i.
        return self.encoder.to_transformers((self.head.weight.detach(), self.head.bias.detach()), self.labels)


def load_trained(path: Path | str, device: torch.device | str = "cpu") -> TrainedBert:
    """Build what a checkpoint (or the newest one of a run) describes and load its weights.

    Raises:
        ValueError: there is no complete checkpoint, it was not written by this recipe, or its tokenizer is missing.
    """
    directory = find_checkpoint(Path(path))
    manifest = read_manifest(directory)
    extra = manifest.get("extra") or {}
    recipe = extra.get("recipe")
    if not isinstance(recipe, dict) or not {"task", "bert", "num_classes", "labels"} <= set(recipe):
        raise ValueError(f"{directory / MANIFEST} describes no BERT: it was not written by recipes.bert")
    tokenizer = load_tokenizer(run_of(directory) / TOKENIZER)
    if tokenizer.fingerprint != extra["data"]["tokenizer"]:
        raise ValueError(
            f"{run_of(directory) / TOKENIZER}: expected the tokenizer that the run was trained with, got another"
        )
    encoder = ENCODERS[recipe["task"]](BertConfig(**recipe["bert"])).to(device)
    group = hp.Group.alone()
    head = hp.ShardedClassifier(
        recipe["bert"]["hidden_size"], recipe["num_classes"], margin=hp.Softmax(), group=group, device=device
    )
    try:
        hp.checkpoint.load(directory, model=encoder, head=head, random_generators=False, group=group)
    except FileNotFoundError as error:
        raise ValueError(f"{error}; take another checkpoint of the run") from error
    labels = None if recipe["labels"] is None else dict(enumerate(recipe["labels"]))
    return TrainedBert(
        task=recipe["task"],
        encoder=encoder.eval(),
        head=head.eval(),
        tokenizer=tokenizer,
        labels=labels,
        step=int(manifest["step"]),
        directory=directory,
        config=extra.get("config") or {},
        tokens=extra["data"].get("tokens"),
    )
