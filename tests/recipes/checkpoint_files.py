"""Checkpoint directories in the documented layout, written with safetensors and json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.insightface.models import build_model


def write_checkpoint(
    run: Path,
    *,
    step: int = 1,
    model: str = "convnet",
    model_options: Mapping[str, Any] | None = None,
    image_shape: Sequence[int] = (1, 16, 16),
    embedding_size: int = 8,
    shards: Sequence[tuple[Tensor, Tensor]] = (),
    **recipe: Any,
) -> tuple[Path, nn.Module]:
    """Write run/checkpoints/step-... with a fresh model and head shards (class ids, weight); return path and model."""
    directory = run / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    options = dict(model_options or {"channels": [4, 8]})
    torch.manual_seed(step)
    module = build_model(model, image_shape=image_shape, embedding_size=embedding_size, **options)
    # Batch statistics that differ from a fresh model's, so that a reader that forgets buffers is found out.
    module.train()(torch.randn(8, *image_shape) + 0.5)
    module.eval()
    save_file(
        {name: value.contiguous() for name, value in module.state_dict().items()}, directory / "model.safetensors"
    )
    for rank, (class_ids, weight) in enumerate(shards):
        name = f"head-{rank:05d}-of-{len(shards):05d}.safetensors"
        save_file({"class_ids": class_ids, "weight": weight}, directory / name)
    described = {
        "model": model,
        "model_options": options,
        "embedding_size": embedding_size,
        "image_shape": list(image_shape),
        "num_classes": sum(len(class_ids) for class_ids, _ in shards),
        "flip": False,
        **recipe,
    }
    manifest = {"step": step, "extra": {"config": {"seed": 7}, "recipe": described}}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory, module
