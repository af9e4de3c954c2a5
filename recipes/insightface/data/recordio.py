"""MXNet's RecordIO container and the image header inside a record, without mxnet. docs/data.md shows the bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LARGEST_PART = (1 << 29) - 1

_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_PART_HEADER = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")


class RecordFile:
    """Random access to the records of a file.

    Reads are positional (`pread`), so threads and forked processes may share one object; a pickled object opens the
    file anew where it is unpickled.

    Args:
        path: the `.rec` file. Raises ValueError when it is not a readable file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor = -1
        self._open()

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{self.path}: expected a readable record file: {error.strerror}") from error
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file; the object cannot be read from any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._open()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Every (offset, payload) from the start of the file."""
        offset = 0
        while offset < self.size:
            payload, end = self.read_with_end(offset)
            yield offset, payload
            offset = end

    def read(self, offset: int) -> bytes:
        """The payload of the record that starts at a byte offset. Raises ValueError for a corrupt or cut one."""
        return self.read_with_end(offset)[0]

    def read_with_end(self, offset: int) -> tuple[bytes, int]:
        """The payload of the record at an offset, and the offset after it. Raises ValueError like `read`."""
        flag, length, end = self._part(offset, first=True)
        payload = self._bytes(offset + _PART_HEADER.size, length)
        if flag == _WHOLE:
            return payload, end
        pieces = [payload]
        while flag != _LAST:
            start = end
            flag, length, end = self._part(start, first=False)
            pieces.append(self._bytes(start + _PART_HEADER.size, length))
        # The writer cuts a payload at every aligned magic in it and leaves these four bytes out.
        return MAGIC_BYTES.join(pieces), end

    def read_start(self, offset: int, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a record's payload (fewer when it is shorter), and the payload's whole length."""
        flag, length, _ = self._part(offset, first=True)
        if flag != _WHOLE:
            payload = self.read(offset)
            return payload[:count], len(payload)
        return self._bytes(offset + _PART_HEADER.size, min(count, length)), length

    def _part(self, offset: int, *, first: bool) -> tuple[int, int, int]:
        """Check the part header at an offset: (flag, length, end of the padded part)."""
        if not 0 <= offset < self.size:
            raise ValueError(
                f"{self.path}: expected a record at byte {offset}, but the file has {self.size} bytes; it is truncated "
                f"or its .idx belongs to another file"
            )
        if offset + _PART_HEADER.size > self.size:
            raise self._truncated(offset, offset + _PART_HEADER.size)
        magic, word = _PART_HEADER.unpack(self._bytes(offset, _PART_HEADER.size))
        if magic != MAGIC:
            raise ValueError(
                f"{self.path}: byte {offset}: expected the record magic {MAGIC:#010x}, got {magic:#010x}; the file is "
                f"corrupt or its .idx belongs to another file"
            )
        flag, length = word >> 29, word & LARGEST_PART
        if flag not in ((_WHOLE, _FIRST) if first else (_MIDDLE, _LAST)):
            wanted = "a whole record or a first part (0, 1)" if first else "a middle or last part (2, 3)"
            raise ValueError(
                f"{self.path}: byte {offset}: expected {wanted}, got part flag {flag}; the file is corrupt"
            )
        end = offset + _PART_HEADER.size + (length + 3) // 4 * 4
        if end > self.size:
            raise self._truncated(offset, end)
        return flag, length, end

    def _truncated(self, offset: int, end: int) -> ValueError:
        return ValueError(
            f"{self.path}: byte {offset}: expected a record part up to byte {end}, but the file has {self.size} bytes; "
            f"it is truncated or corrupt"
        )

    def _bytes(self, offset: int, count: int) -> bytes:
        if self._descriptor < 0:
            raise ValueError(f"{self.path}: the record file is closed")
        data = os.pread(self._descriptor, count, offset)
        while len(data) < count:
            # One call gives at most 2 GiB and may give less; nothing at all means that the file shrank under us.
            more = os.pread(self._descriptor, count - len(data), offset + len(data))
            if not more:
                raise ValueError(f"{self.path}: byte {offset + len(data)}: the file ended while it was being read")
            data += more
        return data


def write_record(file: BinaryIO, payload: bytes) -> int:
    """Append one record, cut at every magic at a multiple of 4 in the payload. Returns the bytes written.

    Raises:
        ValueError: a part of 2**29 bytes or more.
    """
    cuts = []
    position = payload.find(MAGIC_BYTES)
    while position >= 0:
        aligned = position % 4 == 0
        if aligned:
            cuts.append(position)
        position = payload.find(MAGIC_BYTES, position + (4 if aligned else 1))
    starts = [0] + [cut + 4 for cut in cuts]
    ends = [*cuts, len(payload)]
    written = 0
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end - start > LARGEST_PART:
            raise ValueError(f"expected a record part of at most {LARGEST_PART} bytes, got {end - start}")
        last = number == len(cuts)
        flag = _WHOLE if not cuts else _FIRST if number == 0 else _LAST if last else _MIDDLE
        part = _PART_HEADER.pack(MAGIC, flag << 29 | (end - start)) + payload[start:end]
        written += file.write(part + bytes(-len(part) % 4))
    return written


@dataclass(frozen=True)
class ImageRecord:
    """A decoded payload.

    Attributes:
        flag: number of labels stored after the header; 0 when the header's own label is the only one.
        labels: the labels as stored, in float32; at least one.
        id: the record's key.
        content: the compressed image; empty in identity range records.
    """

    flag: int
    labels: tuple[float, ...]
    id: int
    content: bytes


def unpack_image_record(payload: bytes, *, origin: str) -> ImageRecord:
    """Split a payload into header, labels and image bytes. Raises ValueError naming `origin` when it is too short."""
    if len(payload) < _IMAGE_HEADER.size:
        raise ValueError(f"{origin}: expected an image header of {_IMAGE_HEADER.size} bytes, got {len(payload)}")
    flag, label, record_id, _ = _IMAGE_HEADER.unpack_from(payload)
    end = _IMAGE_HEADER.size + 4 * flag
    if len(payload) < end:
        raise ValueError(f"{origin}: expected {flag} labels after the image header, got {len(payload)} bytes in all")
    labels = (label,) if flag == 0 else tuple(np.frombuffer(payload, "<f4", flag, _IMAGE_HEADER.size).tolist())
    return ImageRecord(flag, labels, record_id, payload[end:])


def pack_image_record(labels: Sequence[float], record_id: int, content: bytes) -> bytes:
    """The payload of an image with one label (stored in the header) or of a record with several (stored after it)."""
    if len(labels) == 1:
        return _IMAGE_HEADER.pack(0, labels[0], record_id, 0) + content
    return _IMAGE_HEADER.pack(len(labels), 0.0, record_id, 0) + np.asarray(labels, "<f4").tobytes() + content
