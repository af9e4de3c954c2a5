"""Verification pairs from files: InsightFace's `.bin` and text lists of pairs."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.insightface.data.decode import check_image_shape, decode_image
from recipes.insightface.data.pairs import VerificationPairs
from recipes.insightface.data.restricted_pickle import PlainArray, load_plain
from recipes.insightface.data.sources import open_source


def load_bin(path: str | Path, *, image_shape: tuple[int, int, int] = (3, 112, 112)) -> VerificationPairs:
    """Read a `.bin` file: a pickle of (list of 2P compressed images, list of P same / different).

    Images 2i and 2i + 1 are pair i. The pickle is read by `load_plain`, so a hostile file runs nothing.

    Args:
        path: written by Python 2 or 3.
        image_shape: (1 or 3, height, width); images of another size are resized.

    Raises:
        ValueError: unreadable or hostile file, another structure, or a corrupt image (named by its number).
    """
    path = Path(path)
    shape = check_image_shape(image_shape)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable .bin file: {error.strerror}") from error
    content = load_plain(data, origin=str(path))
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise ValueError(f"{path}: expected (images, same or not), got {type(content).__name__}")
    encoded = [_image_bytes(item, f"{path}: image {number}") for number, item in enumerate(_items(content[0], path))]
    same = [_truth(item, f"{path}: pair {number}") for number, item in enumerate(_items(content[1], path))]
    if not same or len(encoded) != 2 * len(same):
        raise ValueError(f"{path}: expected two images per pair, got {len(encoded)} images and {len(same)} pairs")
    images = np.empty((len(encoded), *shape), dtype=np.uint8)
    for number, item in enumerate(encoded):
        images[number] = decode_image(item, shape, origin=f"{path}: image {number}")
    return VerificationPairs(
        images=torch.from_numpy(images),
        first=torch.arange(0, len(encoded), 2),
        second=torch.arange(1, len(encoded), 2),
        same=torch.tensor(same, dtype=torch.bool),
        name=path.stem,
    )


def write_bin(path: str | Path, images: Sequence[bytes], same: Sequence[bool]) -> None:
    """Write a `.bin` file from compressed images (2 per pair, in order). Raises ValueError when the counts differ."""
    if not same or len(images) != 2 * len(same):
        raise ValueError(f"expected two images per pair, got {len(images)} images and {len(same)} pairs")
    content = ([bytes(image) for image in images], [bool(value) for value in same])
    Path(path).write_bytes(pickle.dumps(content, protocol=3))


def load_pair_list(
    path: str | Path, root: str | Path, *, image_shape: tuple[int, int, int] = (3, 112, 112)
) -> VerificationPairs:
    """Read a text file of pairs: a line is `first second same`, with same 1 or 0.

    Fields are separated by tabs, or by spaces where a line has no tab (names must then hold none). Empty lines and
    lines that start with `#` are passed over.

    Args:
        path: the list, UTF-8.
        root: folder or .zip file that the image names are relative to.
        image_shape: (1 or 3, height, width); images of another size are resized.

    Raises:
        ValueError: a bad line (named by its number), no pairs, or a missing or corrupt image.
    """
    path = Path(path)
    shape = check_image_shape(image_shape)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a readable UTF-8 list of pairs: {error}") from error
    rows: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    same: list[bool] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in (line.split("\t") if "\t" in line else line.split())]
        if len(fields) != 3 or fields[2] not in ("0", "1"):
            raise ValueError(f"{path}: line {number}: expected 'first second 0|1', got {line[:120]!r}")
        pairs.append((rows.setdefault(fields[0], len(rows)), rows.setdefault(fields[1], len(rows))))
        same.append(fields[2] == "1")
    if not pairs:
        raise ValueError(f"{path}: expected at least one pair, got none")
    source = open_source(root)
    images = np.empty((len(rows), *shape), dtype=np.uint8)
    for name, row in rows.items():
        images[row] = decode_image(source.read(name), shape, origin=source.describe(name))
    table = torch.tensor(pairs, dtype=torch.int64)
    return VerificationPairs(
        images=torch.from_numpy(images),
        first=table[:, 0].contiguous(),
        second=table[:, 1].contiguous(),
        same=torch.tensor(same, dtype=torch.bool),
        name=path.stem,
    )


def _items(value: Any, path: Path) -> list[Any]:
    """A list, tuple or array as a list."""
    if isinstance(value, PlainArray):
        return list(value.values.tolist())
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path}: expected a list of images and a list of same or not, got {type(value).__name__}")
    return list(value)


def _image_bytes(value: Any, origin: str) -> bytes:
    if isinstance(value, PlainArray) and value.values.dtype == np.uint8:
        return value.values.tobytes()
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"{origin}: expected the bytes of a JPEG or PNG, got {type(value).__name__}")
    return bytes(value)


def _truth(value: Any, origin: str) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{origin}: expected same or not as a boolean, 0 or 1, got another {type(value).__name__}")
    return bool(value)
