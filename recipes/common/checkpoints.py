"""Finding and describing the checkpoints of a run, where nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hybridpar as hp

CHECKPOINTS = "checkpoints"
"""In the folder of a run."""

MANIFEST = "manifest.json"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint directory that ``path`` means: itself, or the newest complete one of the run that it holds.

    A run keeps its checkpoints in ``checkpoints/step-<number>``; one without a manifest was not finished and is
    passed over with a warning.

    Raises ``ValueError`` where there is no complete checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path
    found = hp.checkpoint.newest(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if found is not None:
        return found
    raise ValueError(
        f"expected a checkpoint directory (with {MANIFEST}) or a run directory with checkpoints/step-*, got {path}, "
        "which holds no complete checkpoint"
    )


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint directory, or the folder it lies in where it was moved out of a run."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == CHECKPOINTS else parent


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory; raises ``ValueError`` where it is not the JSON object it should be."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); take another checkpoint of the run") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(manifest).__name__}")
    return manifest
