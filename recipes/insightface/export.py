"""Export a checkpoint for use elsewhere: the backbone as ONNX, the class centers as safetensors.

python -m recipes.insightface.export RUN_OR_CHECKPOINT --out DIRECTORY
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
import tyro
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from recipes.common.checkpoints import find_checkpoint
from recipes.insightface.trained import load_backbone
from recipes.insightface.verification import evaluating

Centers = np.memmap[tuple[int, int], np.dtype[np.float32]]

ONNX_FILE = "backbone.onnx"
CENTERS_FILE = "class_centers.safetensors"

TOLERANCE = 1e-4
"""Largest difference between the embeddings of torch and of onnxruntime that an export may have."""

_CHECKED_BATCHES = (1, 5)
_CHUNK_ROWS = 65_536


@dataclass(frozen=True)
class Options:
    """Export a trained backbone and its class centers."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint directory, or a run directory (its newest complete checkpoint is taken)."""
    out: Path
    """Folder to write backbone.onnx and class_centers.safetensors into; made if it does not exist."""


def export_onnx(model: nn.Module, path: Path | str, *, image_shape: Sequence[int]) -> float:
    """Write the model as ONNX, input "images" float32 [batch, C, H, W], output "embeddings" float32 [batch, D].

    The batch size is free. The embeddings are what the model gives: not of unit length, and of one image without its
    mirror image. The file is run in onnxruntime with 1 and 5 images and compared with torch.

    Returns the largest difference (see :func:`onnx_difference`), which is at most :data:`TOLERANCE`; otherwise the file
    is removed and ``ValueError`` raised.
    """
    path = Path(path)
    example = torch.zeros(2, *image_shape, device=_device_of(model))
    with evaluating(model):
        with _quiet_exporter():
            torch.onnx.export(
                model,
                (example,),
                path,
                dynamo=True,
                input_names=["images"],
                output_names=["embeddings"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                external_data=False,
                verbose=False,
            )
        difference = onnx_difference(model, path, image_shape=image_shape)
    if not difference <= TOLERANCE:
        path.unlink()
        raise ValueError(
            f"the exported model differs from torch by {difference:.3g}, more than {TOLERANCE:g}; it was removed. "
            "Embeddings that are not finite or very large are the usual reason: evaluate the checkpoint first"
        )
    return difference


def onnx_difference(model: nn.Module, path: Path | str, *, image_shape: Sequence[int]) -> float:
    """Largest difference of an embedding's elements between the model (in eval mode) and the ONNX file; NaN if any is.

    Both see the same random images in [-1, 1], in batches of 1 and of 5. Where the largest element of a batch is above
    1, differences are relative to it, for rounding grows with the numbers.
    """
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch in _CHECKED_BATCHES:
        images = torch.rand(batch, *image_shape, generator=generator) * 2 - 1
        with torch.no_grad():
            expected = model(images.to(_device_of(model))).float().cpu().numpy()
        (actual,) = session.run(["embeddings"], {"images": images.numpy()})
        # np.maximum, unlike max(), keeps a NaN.
        worst = float(np.maximum(worst, np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())))
    return worst


def export_class_centers(checkpoint: Path | str, path: Path | str) -> tuple[int, int]:
    """Write the head's rows as ``class_ids`` int64 [K], ascending, and ``centers`` float32 [K, D] of unit length.

    Rows go from the head's shard files to the new file in chunks, so that a head larger than memory passes. A bias is
    left out: centers are directions.

    Args:
        checkpoint: a checkpoint directory, or a run directory (its newest complete checkpoint is taken).
        path: of the safetensors file to write.

    Returns (K, D). Raises ``ValueError`` where shards are missing, disagree, or hold a class twice.
    """
    directory = find_checkpoint(Path(checkpoint))
    shards = _shard_files(directory)
    ids = [_read_ids(shard) for shard in shards]
    class_ids = np.concatenate(ids)
    order = np.argsort(class_ids, kind="stable")
    class_ids = class_ids[order]
    repeated = np.flatnonzero(class_ids[1:] == class_ids[:-1])
    if len(repeated):
        raise ValueError(f"class {class_ids[repeated[0]]} is in more than one row of the head in {directory}")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    sizes = {_embedding_size(shard) for shard in shards}
    if len(sizes) != 1:
        raise ValueError(f"expected one embedding size in the head shards of {directory}, got {sorted(sizes)}")
    (size,) = sizes
    temporary = Path(f"{path}.tmp")
    centers = _create_centers_file(temporary, class_ids, size)
    start = 0
    for shard, shard_ids in zip(shards, ids, strict=True):
        _copy_rows(shard, centers, place[start : start + len(shard_ids)])
        start += len(shard_ids)
    centers.flush()
    del centers
    temporary.replace(path)
    return len(class_ids), size


def main(options: Options) -> None:
    """Export both, and print where they are."""
    trained = load_backbone(options.checkpoint)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the output folder {options.out}: {error}; choose another --out") from error
    onnx_path, centers_path = options.out / ONNX_FILE, options.out / CENTERS_FILE
    difference = export_onnx(trained.model, onnx_path, image_shape=trained.image_shape)
    print(f"{onnx_path}: step {trained.step}, differs from torch by {difference:.2g} in onnxruntime")
    classes, size = export_class_centers(trained.directory, centers_path)
    print(f"{centers_path}: {classes:,} class centers of {size} elements")


def _shard_files(directory: Path) -> list[Path]:
    """The head's files in rank order; all of them, or an error."""
    shards = sorted(directory.glob("head-*-of-*.safetensors"))
    if not shards:
        raise ValueError(f"expected head-RRRRR-of-NNNNN.safetensors in {directory}, found none")
    count = int(shards[0].stem.rpartition("-of-")[2])
    expected = [f"head-{rank:05d}-of-{count:05d}.safetensors" for rank in range(count)]
    found = [shard.name for shard in shards]
    if found != expected:
        odd = sorted(set(expected) ^ set(found))
        raise ValueError(f"expected {count} head shards in {directory}, got {len(found)}; missing or odd: {odd}")
    return shards


def _read_ids(shard: Path) -> npt.NDArray[np.int64]:
    with safe_open(shard, framework="pt") as file:
        ids: npt.NDArray[np.int64] = file.get_tensor("class_ids").numpy()
        rows = file.get_slice("weight").get_shape()[0]
    if len(ids) != rows:
        raise ValueError(f"{shard} has {len(ids)} class_ids for {rows} rows of weight")
    return ids


def _embedding_size(shard: Path) -> int:
    with safe_open(shard, framework="pt") as file:
        return int(file.get_slice("weight").get_shape()[1])


def _create_centers_file(path: Path, class_ids: npt.NDArray[np.int64], size: int) -> Centers:
    """A safetensors file with the ids in place and the centers mapped for writing.

    The library's own writer wants every tensor in memory. The format is a little-endian uint64 with the length of a
    JSON header, the header (name, dtype, shape, offsets), and the bytes.
    """
    count = len(class_ids)
    header = json.dumps(
        {
            "class_ids": {"dtype": "I64", "shape": [count], "data_offsets": [0, 8 * count]},
            "centers": {
                "dtype": "F32",
                "shape": [count, size],
                "data_offsets": [8 * count, 8 * count + 4 * count * size],
            },
        }
    ).encode()
    # Padded with spaces, as the library does, so that the numbers start at a multiple of 8 bytes.
    header = header.ljust(math.ceil(len(header) / 8) * 8)
    start = 8 + len(header) + 8 * count
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(class_ids.astype("<i8").tobytes())
        file.truncate(start + 4 * count * size)
    return np.memmap(path, dtype="<f4", mode="r+", offset=start, shape=(count, size))


def _copy_rows(shard: Path, centers: Centers, places: npt.NDArray[np.int64]) -> None:
    """Normalise the rows of a shard and put row i at ``places[i]``."""
    with safe_open(shard, framework="pt") as file:
        weight = file.get_slice("weight")
        for start in range(0, len(places), _CHUNK_ROWS):
            rows = weight[start : start + _CHUNK_ROWS].float()
            centers[places[start : start + _CHUNK_ROWS]] = functional.normalize(rows, dim=1).numpy()


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep back what the exporter says about itself (optional packages, its own deprecations); errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=DeprecationWarning)
            warnings.simplefilter("ignore", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        main(tyro.cli(Options, description=__doc__))
    except ValueError as error:
        sys.exit(f"error: {error}")
