"""Documents of text, in a fixed order: of the user's files, or of what ships inside Python and installed packages."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from recipes.bert.data.embedded import EXTRACTION, TextSource, find_sources, read_prose
from recipes.bert.data.lines import check_regular, read_lines

SUFFIXES = (".txt", ".md", ".rst", ".txt.gz")
"""Files that are read from folders; a file that is named itself may end in anything."""

LONGEST_DOCUMENT = 1 << 16
"""Characters; longer documents are cut at the end of a line, so that no file has to fit in memory."""

# Of cutting files into documents; caches of an older way are made anew.
_FORMAT = 1


class Corpus(ABC):
    """Documents of text, in a fixed order: iterating yields them, none of them blank.

    Attributes:
        fingerprint: sha256 of what the text depends on.
        sources: names of what the text comes from, for reports.
    """

    fingerprint: str
    sources: tuple[str, ...]

    @abstractmethod
    def __iter__(self) -> Iterator[str]:
        """The documents, in order, read anew by each iteration."""


class FileCorpus(Corpus):
    """The documents of text files, in the order given. See `open_corpus`.

    Attributes:
        paths: the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.sources = tuple(str(path) for path in self.paths)
        stats = [(os.fspath(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths]
        self.fingerprint = _sha256("files", _FORMAT, LONGEST_DOCUMENT, stats)

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from _documents_of(path)


class EmbeddedCorpus(Corpus):
    """Text inside Python and the installed packages. See `embedded_corpus`.

    Attributes:
        text_sources: the folders that are read, with names and versions.
    """

    def __init__(self, text_sources: tuple[TextSource, ...]) -> None:
        self.text_sources = text_sources
        self.sources = tuple(f"{source.name} {source.version}" for source in text_sources)
        self.fingerprint = _sha256("embedded", EXTRACTION, self.sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self._documents)

    @cached_property
    def _documents(self) -> list[str]:
        return read_prose(self.text_sources)


def open_corpus(paths: Sequence[Path]) -> Corpus:
    """The documents of text files and of all text files in folders, read as a stream.

    Folders are searched with all folders in them, in the order of the names, for .txt, .md, .rst and .txt.gz files;
    hidden ones are passed over. A .md or .rst file is one document. In all others a blank line ends a document, as in
    BERT's own pre-training data. Documents above `LONGEST_DOCUMENT` characters are cut into several.

    Args:
        paths: files and folders, at least one.

    Raises:
        ValueError: no such path, a folder without text files, a path that is neither file nor folder, a file named
            twice, no text in any of them. A file that is not UTF-8 is reported, with line and offset, when it is read.
    """
    if not paths:
        raise ValueError("expected at least one text file or folder, got none")
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _text_files(path)
        else:
            check_regular(path)
            files.append(path)
    seen: set[tuple[int, int]] = set()
    for path in files:
        status = path.stat()
        if (status.st_dev, status.st_ino) in seen:
            raise ValueError(
                f"{path}: named twice, perhaps by a link; name each file once, by itself or by a folder that holds it"
            )
        seen.add((status.st_dev, status.st_ino))
    corpus = FileCorpus(files)
    if next(iter(corpus), None) is None:
        named = ", ".join(map(str, paths))
        raise ValueError(
            f"{named}: expected text, got {len(files)} files that are empty or hold nothing but white space"
        )
    return corpus


def embedded_corpus() -> Corpus:
    """English text that is there without a download: the prose in the docstrings of the Python distribution, numpy,
    torch and the packages around them, as far as they are installed.

    `Corpus.sources` says which, `Corpus.size` how much. The source files are read, not imported. Each one that says
    anything is a document; code, tables, and paragraphs that came before are left out. The text is kept in memory once
    it has been read.
    """
    return EmbeddedCorpus(find_sources())


def is_held_out(document: str, *, share: float, seed: int) -> bool:
    """Whether a document belongs to the held-out ones: a pure function of its text, so that equal documents are
    never on both sides.

    Args:
        document: the text.
        share: of all documents, in [0, 1), that are held out.
        seed: of the choice.
    """
    key = (seed & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def _text_files(folder: Path) -> list[Path]:
    found = []
    visited: set[tuple[int, int]] = set()  # links may lead in circles
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(here).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders[:] = []
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in files if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
    if not found:
        raise ValueError(f"{folder}: expected a folder with text files ({', '.join(SUFFIXES)}), got none in it")
    for path in found:
        check_regular(path)
    return sorted(found)


def _raise(error: OSError) -> None:
    raise ValueError(f"{error.filename}: expected a readable folder: {error.strerror}") from error


def _documents_of(path: Path) -> Iterator[str]:
    blank_line_ends = path.suffix.lower() not in (".md", ".rst")
    lines: list[str] = []
    length = 0
    for line in read_lines(path):
        blank = not line.strip()
        if lines and (length + len(line) > LONGEST_DOCUMENT or (blank and blank_line_ends)):
            yield "".join(lines).strip()
            lines, length = [], 0
        if not blank or lines:
            lines.append(line)
            length += len(line)
    if lines:
        yield "".join(lines).strip()


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
