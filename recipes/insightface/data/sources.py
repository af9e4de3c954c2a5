"""Files by name from a folder or from a .zip file."""

from __future__ import annotations

import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class FileSource(ABC):
    """A tree of files; names are relative, with forward slashes."""

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Every file and, with a slash at the end, every folder, sorted; hidden ones left out."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's bytes. Raises ValueError naming the file when it cannot be read."""

    def describe(self, name: str) -> str:
        """The whole path of a file, for messages."""
        return f"{self.path}/{name}"


def open_source(path: str | Path) -> FileSource:
    """A folder or a .zip file as a source. Raises ValueError when it is neither."""
    path = Path(path)
    if path.is_dir():
        return _Folder(path)
    if path.is_file() and path.suffix.lower() == ".zip":
        return _Zip(path)
    raise ValueError(f"{path}: expected a folder or a .zip file, got {'another file' if path.exists() else 'nothing'}")


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return name.lower().endswith(IMAGE_SUFFIXES)


class _Folder(FileSource):
    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.path, followlinks=True, onerror=_raise):
            folders[:] = [name for name in folders if not _hidden(name)]
            here = PurePosixPath(Path(folder).relative_to(self.path).as_posix())
            found += [f"{here / name}/" for name in folders]
            found += [str(here / name) for name in files if not _hidden(name)]
        return sorted(found)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.describe(name)}: expected a readable file: {error.strerror}") from error


class _Zip(FileSource):
    def __init__(self, path: Path) -> None:
        self._reset(path)
        self._archive()

    def names(self) -> list[str]:
        found = set()
        for name in self._archive().namelist():
            path = PurePosixPath(name)
            if any(_hidden(part) for part in path.parts):
                continue
            found.add(name)
            found.update(f"{parent}/" for parent in path.parents if str(parent) != ".")
        return sorted(found)

    def read(self, name: str) -> bytes:
        try:
            return self._archive().read(name)
        except (KeyError, OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{self.describe(name)}: expected a readable file: {error}") from error

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self._reset(path)

    def _reset(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def _archive(self) -> zipfile.ZipFile:
        """The open archive; forked processes would share one file position, so each opens its own."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            try:
                opened = (os.getpid(), zipfile.ZipFile(self.path))
            except (OSError, zipfile.BadZipFile) as error:
                raise ValueError(f"{self.path}: expected a readable .zip file: {error}") from error
            self._opened = opened
        return opened[1]


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _raise(error: OSError) -> None:
    raise ValueError(f"{error.filename}: expected a readable folder: {error.strerror}") from error
