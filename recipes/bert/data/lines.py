"""Lines of a UTF-8 text file, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

LONGEST = 1 << 16
"""Bytes; longer lines come in pieces, so that a file without line ends needs no more memory than any other."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path, *, longest: int | None = LONGEST) -> Iterator[str]:
    """The lines of a file with their line ends; a byte order mark is left out.

    Args:
        path: a regular file; read through gzip where its name ends in .gz.
        longest: lines above this many bytes are cut, at a space where there is one, else between two characters;
            None: never.

    Raises:
        ValueError: no such file, no regular file, not readable, not UTF-8 (with line and byte offset), broken gzip.
    """
    check_regular(path)
    offset, number, kept = 0, 1, b""
    try:
        with _open(path) as file:
            if file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK:
                offset = len(_BYTE_ORDER_MARK)
            else:
                file.seek(0)
            while line := kept + file.readline(-1 if longest is None else max(longest - len(kept), 1)):
                whole = line.endswith(b"\n") or longest is None or len(line) < longest
                cut = len(line) if whole else _last_border(line)
                line, kept = line[:cut], line[cut:]
                yield _decode(line, path, offset, number)
                offset += len(line)
                number += line.endswith(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(f"{path}: expected a readable file: {reason}") from error


def check_regular(path: Path) -> None:
    """Raises ValueError unless the path is a regular file: reading from others (pipes, devices) may never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected a regular file, got {_kind(mode)}")


def _kind(mode: int) -> str:
    kinds = (("a folder", stat.S_ISDIR), ("a pipe", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK))
    return next((name for name, is_kind in kinds if is_kind(mode)), "a device")


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def _last_border(line: bytes) -> int:
    """Where to cut a line that goes on: behind the last space, else before a character that may be incomplete."""
    if (space := line.rfind(b" ")) >= 0:
        return space + 1
    for back in range(1, min(4, len(line) - 1) + 1):
        if line[-back] & 0xC0 != 0x80:  # the first byte of a character
            return len(line) - back
    return len(line)  # no UTF-8; decoding says so


def _decode(line: bytes, path: Path, offset: int, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, got byte 0x{line[error.start]:02x} at offset {offset + error.start}, line "
            f"{number} ({error.reason}); convert the file, for example with `iconv -f ENCODING -t UTF-8 FILE`"
        ) from error
