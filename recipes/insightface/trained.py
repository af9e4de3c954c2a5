"""A trained backbone read back from a checkpoint: no ranks, no head, no optimizer needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from recipes.common.checkpoints import MANIFEST, find_checkpoint, read_manifest
from recipes.insightface.models import build_model


@dataclass(frozen=True)
class TrainedBackbone:
    """A backbone in eval mode and what is needed to use it.

    Attributes:
        model: maps normalised images [B, C, H, W] to embeddings [B, D].
        image_shape: (C, H, W).
        embedding_size: D.
        flip: whether mirror images are averaged in when embedding (faces yes, characters no).
        step: of the checkpoint.
        directory: of the checkpoint.
        glyphs: the options of ``glyph_datasets`` (but the image shape) that training used, which fix the characters
            kept apart; empty for a model trained on something else.
        config: the whole configuration of the training run, as it was stored; empty if it was not.
    """

    model: nn.Module
    image_shape: tuple[int, int, int]
    embedding_size: int
    flip: bool
    step: int
    directory: Path
    glyphs: Mapping[str, Any]
    config: Mapping[str, Any]


def load_backbone(path: Path | str) -> TrainedBackbone:
    """Build the model that a checkpoint (or the newest one of a run) describes and load its weights, on the CPU.

    Raises ``ValueError`` where there is no complete checkpoint, where it was not written by this recipe, or where
    its weights do not fit the model that it describes.
    """
    directory = find_checkpoint(Path(path))
    manifest = read_manifest(directory)
    extra = manifest.get("extra") or {}
    recipe = extra.get("recipe")
    if not isinstance(recipe, dict):
        raise ValueError(f'{directory / MANIFEST} has no extra["recipe"]: it was not written by recipes.insightface')
    missing = sorted({"model", "model_options", "embedding_size", "image_shape", "flip"} - set(recipe))
    if missing:
        raise ValueError(f'extra["recipe"] of {directory / MANIFEST} lacks {", ".join(missing)}')
    channels, height, width = recipe["image_shape"]
    model = build_model(
        recipe["model"],
        image_shape=(channels, height, width),
        embedding_size=recipe["embedding_size"],
        **recipe["model_options"],
    )
    try:
        weights = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{directory / 'model.safetensors'} cannot be read ({error}); take another checkpoint of the run"
        ) from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{directory / 'model.safetensors'} does not hold the weights of {recipe['model']} with "
            f"embedding_size={recipe['embedding_size']}, options {recipe['model_options']}: {error}"
        ) from error
    return TrainedBackbone(
        model=model.eval(),
        image_shape=(channels, height, width),
        embedding_size=int(recipe["embedding_size"]),
        flip=bool(recipe["flip"]),
        step=int(manifest["step"]),
        directory=directory,
        glyphs=recipe.get("glyphs") or {},
        config=extra.get("config") or {},
    )
