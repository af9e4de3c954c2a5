"""InsightFace record sets: `train.rec`, `train.idx` and `property` in one folder. docs/data.md shows the layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.insightface.data.dataset import Batch, IdentityDataset, Indices, checked_indices
from recipes.insightface.data.decode import check_image_shape, decode_image
from recipes.insightface.data.recordio import (
    ImageRecord,
    RecordFile,
    pack_image_record,
    unpack_image_record,
    write_record,
)

# float32 tells integers apart only below this; 2**24 itself is also what 2**24 + 1 is rounded to.
EXACT_LIMIT = 1 << 24
LABEL_FILE = "train.lab.npy"

_HEADER_BYTES = 24


class RecordSetDataset(IdentityDataset):
    """The images of an InsightFace record set.

    The labels are read with the images; nothing but the index is held in memory. Images are numbered by their key:
    image i is the i-th smallest image key (key i + 1 in a set with identity range records).

    Args:
        folder: holds `train.rec`, `train.idx`, `property` and, when there are more than 2**24 identities,
            `train.lab.npy` (int64, one label per image in the order of the keys). float32 labels cannot hold those.
        image_shape: (1 or 3, height, width); images of another size are resized.

    Raises:
        ValueError: a missing, corrupt or truncated file, files that do not belong together, or float32 labels that
            cannot be exact. Damage inside a record is reported when that record is read.
    """

    def __init__(self, folder: str | Path, *, image_shape: tuple[int, int, int] = (3, 112, 112)) -> None:
        self.folder = Path(folder)
        self.image_shape = check_image_shape(image_shape)
        self.num_classes, self.stored_size = _read_property(self.folder / "property")
        self._file = RecordFile(self.folder / "train.rec")
        keys, offsets = _read_index(self.folder / "train.idx")
        self._offsets, self._range_offsets = self._split_index(keys, offsets)
        self._exact = self._read_label_file()
        if self._exact is None and self.num_classes > EXACT_LIMIT:
            raise ValueError(
                f"{self._file.path}: expected at most {EXACT_LIMIT} identities, for float32 labels are inexact above, "
                f"got {self.num_classes}; add {LABEL_FILE} with one int64 label per image"
            )

    def __getstate__(self) -> dict[str, object]:
        # A memory-mapped array would be pickled with all its content.
        return self.__dict__ | {"_exact": None, "_has_label_file": self._exact is not None}

    def __setstate__(self, state: dict[str, object]) -> None:
        has_label_file = state.pop("_has_label_file")
        self.__dict__.update(state)
        self._exact = self._read_label_file() if has_label_file else None

    def __len__(self) -> int:
        return len(self._offsets)

    def labels(self, indices: Indices) -> Tensor:
        rows = checked_indices(indices, len(self))
        values = [self._label(row, self._header(int(self._offsets[row]))) for row in rows.tolist()]
        return torch.tensor(values, dtype=torch.int64)

    def __getitems__(self, indices: Indices) -> Batch:
        rows = checked_indices(indices, len(self))
        images = np.empty((len(rows), *self.image_shape), dtype=np.uint8)
        labels = np.empty(len(rows), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            offset = int(self._offsets[row])
            origin = self._origin(offset)
            record = unpack_image_record(self._file.read(offset), origin=origin)
            labels[place] = self._label(row, record)
            images[place] = decode_image(record.content, self.image_shape, origin=origin)
        return torch.from_numpy(images), torch.from_numpy(labels)

    def identity_ranges(self) -> npt.NDArray[np.int64]:
        """The ranges that the set's identity records hold: int64 [identities, 2], first image and the one after the
        last, as image numbers of this data set. Empty for a set without such records.

        Raises:
            ValueError: the ranges do not cover the images one after the other, or end above 2**24 (inexact float32).
        """
        if len(self._range_offsets) and len(self) + 1 > EXACT_LIMIT:
            raise ValueError(f"{self._file.path}: the identity ranges of {len(self)} images are inexact in float32")
        records = [self._header(int(offset)) for offset in self._range_offsets]
        ranges = np.array([record.labels[:2] for record in records], dtype=np.float64).reshape(-1, 2)
        edges = np.concatenate([[1.0], ranges[:, 1]])
        if len(ranges) and not (np.array_equal(ranges[:, 0], edges[:-1]) and edges[-1] == len(self) + 1):
            raise ValueError(f"{self._file.path}: expected identity ranges that cover images 1 .. {len(self)} in order")
        return ranges.astype(np.int64) - 1

    def _split_index(
        self, keys: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets of the images and of the identity range records, in the order of the keys."""
        if keys[0] != 0 or not self._is_range(int(offsets[0])):
            return offsets, offsets[:0]
        if keys[-1] != len(keys) - 1:
            missing = int(np.flatnonzero(keys != np.arange(len(keys)))[0])
            raise ValueError(
                f"{self.folder / 'train.idx'}: expected every key up to {keys[-1]}, key {missing} is missing"
            )
        # Record 0 gives the border in float32, exact only below 2**24; the records themselves show it exactly.
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._is_range(int(offsets[middle])):
                high = middle
            else:
                low = middle + 1
        stated = self._header(int(offsets[0])).labels[0]
        if float(np.float32(low)) != stated:
            raise ValueError(
                f"{self._file.path}: record 0 says that images end before key {stated:.0f}, but in train.idx they end "
                f"before key {low}; train.idx is truncated or belongs to another file"
            )
        return offsets[1:low], offsets[low:]

    def _is_range(self, offset: int) -> bool:
        """Whether a record holds labels alone and no image."""
        start, length = self._file.read_start(offset, 4)
        return length == _HEADER_BYTES + 4 * int.from_bytes(start, "little") > _HEADER_BYTES

    def _read_label_file(self) -> npt.NDArray[np.int64] | None:
        """The optional exact labels, memory-mapped."""
        path = self.folder / LABEL_FILE
        if not path.exists():
            return None
        try:
            labels: npt.NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path}: expected an .npy file of int64 labels: {error}") from error
        if labels.dtype != np.int64 or labels.shape != (len(self),):
            raise ValueError(f"{path}: expected int64 [{len(self)}], got {labels.dtype} {list(labels.shape)}")
        return labels

    def _header(self, offset: int) -> ImageRecord:
        """A record's labels, without its image."""
        origin = self._origin(offset)
        start, _ = self._file.read_start(offset, 4)
        flag = int.from_bytes(start, "little")
        return unpack_image_record(self._file.read_start(offset, _HEADER_BYTES + 4 * flag)[0], origin=origin)

    def _label(self, row: int, record: ImageRecord) -> int:
        """The exact label of image `row`."""
        stored = record.labels[0]
        origin = self._origin(int(self._offsets[row]))
        if self._exact is None:
            if not (stored >= 0 and stored == int(stored)):
                raise ValueError(f"{origin}: expected a whole number as label, got {stored}")
            label = int(stored)
        else:
            label = int(self._exact[row])
            if float(np.float32(label)) != stored:
                raise ValueError(f"{origin}: label {stored:.0f} disagrees with {label} in {LABEL_FILE} at {row}")
        if not 0 <= label < self.num_classes:
            raise ValueError(f"{origin}: expected a label in [0, {self.num_classes}) as in property, got {label}")
        return label

    def _origin(self, offset: int) -> str:
        return f"{self._file.path}: record at byte {offset}"


def write_record_set(
    folder: str | Path,
    images: Iterable[tuple[bytes, int]],
    *,
    num_classes: int,
    image_size: tuple[int, int],
    label_file: bool = False,
) -> int:
    """Write a record set that this module and MXNet read.

    Args:
        folder: created if needed; must not hold a record set yet.
        images: (JPEG or PNG bytes, label), labels ascending.
        num_classes: identities; labels are below.
        image_size: (height, width), for `property`.
        label_file: also write int64 labels; they are written in any case above 2**24 identities.

    Returns:
        The number of images written.

    Raises:
        ValueError: labels that are out of order or range, no images, or an existing record set.
    """
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    present = [name for name in ("train.rec", "train.idx", "property", LABEL_FILE) if (out / name).exists()]
    if present:
        raise ValueError(f"{out}: expected a folder without a record set, found {', '.join(present)}")
    try:
        labels = _write_records(out, images, num_classes)
    except BaseException:
        # A half-written set must not be taken for a whole one.
        for name in ("train.rec", "train.idx"):
            (out / name).unlink(missing_ok=True)
        raise
    if label_file or num_classes > EXACT_LIMIT:
        np.save(out / LABEL_FILE, np.array(labels, dtype=np.int64))
    (out / "property").write_text(f"{num_classes},{image_size[0]},{image_size[1]}", encoding="ascii")
    return len(labels)


def _write_records(out: Path, images: Iterable[tuple[bytes, int]], num_classes: int) -> list[int]:
    """Write `train.rec` and `train.idx`; returns the labels."""
    labels: list[int] = []
    starts: list[int] = []
    with (out / "train.rec").open("wb") as records, (out / "train.idx").open("w", encoding="ascii") as index:
        index.write("0\t0\n")
        # Record 0 is filled in at the end; its length does not depend on its labels.
        offset = write_record(records, pack_image_record((0.0, 0.0), 0, b""))
        for content, label in images:
            if not (labels[-1] if labels else 0) <= label < num_classes:
                raise ValueError(f"expected ascending labels below {num_classes}, got {label} as image {len(labels)}")
            if not labels or label != labels[-1]:
                starts.append(len(labels) + 1)
            labels.append(label)
            index.write(f"{len(labels)}\t{offset}\n")
            offset += write_record(records, pack_image_record((float(label),), len(labels), content))
        if not labels:
            raise ValueError("expected at least one image, got none")
        key = len(labels) + 1
        for start, end in zip(starts, [*starts[1:], len(labels) + 1], strict=True):
            index.write(f"{key}\t{offset}\n")
            offset += write_record(records, pack_image_record((float(start), float(end)), key, b""))
            key += 1
        records.seek(0)
        write_record(records, pack_image_record((float(len(labels) + 1), float(key)), 0, b""))
    return labels


def _read_property(path: Path) -> tuple[int, tuple[int, int]]:
    """(number of identities, (height, width)) from the `property` file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a text file 'identities,height,width': {error}") from error
    fields = text.split(",")
    if len(fields) != 3 or not all(field.strip().isdigit() for field in fields) or int(fields[0]) < 1:
        raise ValueError(f"{path}: expected 'identities,height,width', got {text[:80]!r}")
    return int(fields[0]), (int(fields[1]), int(fields[2]))


def _read_index(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Keys, ascending, and their offsets."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable index file: {error.strerror}") from error
    lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    with warnings.catch_warnings():
        # numpy only warns where the text stops being numbers.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            numbers = np.fromstring(data.decode("latin-1"), dtype=np.int64, sep=" ")
        except (DeprecationWarning, ValueError):
            numbers = np.zeros(0, dtype=np.int64)
    if len(numbers) != 2 * lines or data.count(b"\t") != lines or lines == 0:
        raise ValueError(f"{path}: expected lines 'key<tab>offset', {_first_bad_line(data)}")
    keys, offsets = numbers[0::2], numbers[1::2]
    order = np.argsort(keys, kind="stable")
    keys, offsets = keys[order], offsets[order]
    if (keys[1:] == keys[:-1]).any():
        raise ValueError(f"{path}: key {keys[1:][keys[1:] == keys[:-1]][0]} is listed twice")
    return keys, offsets


def _first_bad_line(data: bytes) -> str:
    for number, line in enumerate(data.splitlines(), 1):
        if not re.fullmatch(rb"[0-9]+\t[0-9]+", line):
            return f"got {line[:80]!r} in line {number}"
    return "got an empty file"
