"""Checkpoint directories: written whole or not at all.

A checkpoint is the directory ``step-00000123`` with a ``manifest.json`` that lists every other file with its size and
sha256. It is written under a hidden name, file by file and the manifest last, each forced to disk, and then renamed:
so a directory with its final name is complete, and a crash at any instant leaves the previous one as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
_KEYS = frozenset({"step", "topology", "model", "head", "optimizers", "extra", "files"})
_NAME = re.compile(r"step-(\d{8,})$")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced$")


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return directory / f"step-{step:08d}"


def steps_present(directory: Path) -> list[int]:
    """Steps whose directories lie in ``directory``, ascending, complete or not."""
    if not directory.is_dir():
        return []
    return sorted(int(match.group(1)) for path in directory.iterdir() if (match := _NAME.match(path.name)))


def is_step_path(path: Path) -> bool:
    """Whether a path is named as a checkpoint's directory is."""
    return _NAME.match(path.name) is not None


def candidates(directory: Path) -> dict[int, Path]:
    """Steps and the directories that may hold their checkpoints, the newest step first.

    Where a writer died between moving the old checkpoint of its step away and moving the new one in, the old one is
    found under the name to which it was moved.
    """
    if not directory.is_dir():
        return {}
    moved = {int(match.group(1)): path for path in directory.iterdir() if (match := _REPLACED.match(path.name))}
    found = moved | {step: step_path(directory, step) for step in steps_present(directory)}
    return {step: found[step] for step in sorted(found, reverse=True)}


def start(directory: Path, step: int) -> Path:
    """An empty hidden directory to write into. Leftovers of writers that died are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    _restore_replaced(directory)
    for leftover in directory.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    partial = _partial_path(directory, step)
    partial.mkdir()
    return partial


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file, force it to disk, and return its manifest entry. Raises OSError."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    _sync(path)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def finish(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the directory its final name."""
    path = partial / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    _sync(path)
    _sync(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def retain(directory: Path, keep: int, step: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``step``.

    Later steps are left alone. They are there where a run went on from an earlier checkpoint, because they could not
    be used, and must not crowd out what is written now.
    """
    for old in [present for present in steps_present(directory) if present <= step][:-keep]:
        # Under its final name it would have to be complete at every instant.
        condemned = _partial_path(directory, old)
        step_path(directory, old).rename(condemned)
        shutil.rmtree(condemned)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory, after checking that all files are there in their full size.

    Raises:
        ValueError: says what is missing or wrong.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path}: expected {MANIFEST}, got none: the checkpoint was not finished")
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST}: expected JSON, got {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(f"{path}: expected checkpoint format {FORMAT}, got {found!r}")
    if missing := _KEYS - manifest.keys():
        raise ValueError(f"{path / MANIFEST}: expected the keys {sorted(_KEYS)}, got none of {sorted(missing)}")
    for entry in manifest["files"]:
        file = path / entry["name"]
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            raise ValueError(f"{file}: expected {entry['bytes']} bytes, got {'no file' if size is None else size}")
    return manifest


def check_hash(path: Path, entry: dict[str, Any]) -> None:
    """Raises ValueError unless the file holds what was written."""
    found = sha256(path / entry["name"])
    if found != entry["sha256"]:
        raise ValueError(f"{path / entry['name']}: expected sha256 {entry['sha256']}, got {found}: the file is corrupt")


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _partial_path(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.partial"


def _restore_replaced(directory: Path) -> None:
    """A writer died between moving the old checkpoint of its step away and moving the new one in."""
    for replaced in directory.glob(".step-*.replaced"):
        final = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
