"""The tokens of a corpus on disk, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from recipes.bert.data.corpus import Corpus, is_held_out
from recipes.bert.data.tokenizer import WordPiece

Stream = Literal["train", "held_out"]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

HEADER = "header.json"

_FORMAT = 1
_FILES = {"train": "train.tokens", "held_out": "held_out.tokens", "counts": "counts.int64"}
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1024, 1 << 21
_CHUNK = 1 << 22


class TokenCache:
    """The token ids of a corpus: one stream to train on and one held out, documents joined by [SEP].

    Pickled as its path, so it costs nothing to hand to another process; safe to use after a fork.

    Args:
        folder: as `build_cache` wrote it.
        verify: whether all bytes are read once and compared with their checksums. Sizes are always compared.

    Attributes:
        folder: the same.
        vocab_size: V of the tokenizer.
        special_ids: ids of pad, unk, cls, sep and mask, by these names.
        documents: number of documents of each stream, by its name.
        text_bytes: of the whole corpus.
        sources: names of what the text came from.
        train_tokens, held_out_tokens: lengths of the streams, separators included.
        fingerprint: sha256 of sizes and checksums of all tokens, wherever the text lay.

    Raises:
        FileNotFoundError: there is no cache.
        ValueError: a file is missing, truncated, changed or no JSON.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        header = _read_header(folder)
        try:
            self._dtype = np.dtype(str(header["dtype"])).newbyteorder("<")
            self.vocab_size = int(header["vocab_size"])
            self.special_ids = {name: int(number) for name, number in header["special_ids"].items()}
            self.documents = {name: int(count) for name, count in header["documents"].items()}
            self.text_bytes = int(header["text_bytes"])
            self.sources = tuple(str(source) for source in header["sources"])
            sizes = {part: int(header["files"][part]["bytes"]) for part in _FILES}
            sums = {part: int(header["files"][part]["crc32"]) for part in _FILES}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(folder / HEADER, f"it lacks or garbles {error}") from error
        for part, name in _FILES.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size != sizes[part]:
                raise _corrupt(path, f"expected {sizes[part]} bytes, got {'no file' if size < 0 else size}")
            if verify and (found := _crc32(path)) != sums[part]:
                raise _corrupt(path, f"expected checksum {sums[part]:08x}, got {found:08x}")
        self.fingerprint = hashlib.sha256(json.dumps([self.vocab_size, sizes, sums]).encode()).hexdigest()
        self.train_tokens = sizes["train"] // self._dtype.itemsize
        self.held_out_tokens = sizes["held_out"] // self._dtype.itemsize
        self._maps: dict[Stream, Tokens] = {}

    def __reduce__(self) -> tuple[Callable[[Path], TokenCache], tuple[Path]]:
        return _reopen, (self.folder,)

    def stream(self, name: Stream) -> Tokens:
        """All tokens of a stream: uint16 or uint32 [tokens], read-only, mapped into memory."""
        if name not in self._maps:
            path = self.folder / _FILES[name]
            empty = path.stat().st_size == 0  # nothing cannot be mapped
            self._maps[name] = np.zeros(0, dtype=self._dtype) if empty else np.memmap(path, dtype=self._dtype, mode="r")
        return self._maps[name]

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each id occurs in the stream to train on: int64 [V]; special tokens are counted as zero."""
        return np.fromfile(self.folder / _FILES["counts"], dtype="<i8").astype(np.int64)


def open_cache(
    folder: Path, corpus: Corpus, tokenizer: WordPiece, *, held_out: float, seed: int, verify: bool = True
) -> TokenCache | None:
    """The cache in a folder, or None where there is none that was made like this. A log line says what differs.

    Args:
        folder: of the cache.
        corpus, tokenizer, held_out, seed: as given to `build_cache`.
        verify: see `TokenCache`.

    Raises:
        ValueError: the cache is corrupt.
    """
    if not (folder / HEADER).exists():
        return None
    header = _read_header(folder)
    wanted = _made_from(corpus, tokenizer, held_out=held_out, seed=seed)
    made_from = header.get("made_from")
    if not isinstance(made_from, dict):
        raise _corrupt(folder / HEADER, "it does not say what it was made from")
    if differing := [name for name, value in wanted.items() if made_from.get(name) != value]:
        logging.getLogger("hybridpar").info(
            "%s: the tokens there are made anew, for they were made with another %s", folder, ", ".join(differing)
        )
        return None
    return TokenCache(folder, verify=verify)


def cache_name(corpus: Corpus, tokenizer: WordPiece, *, held_out: float, seed: int) -> str:
    """A name for the folder of a cache, which no cache that is made from something else has."""
    made_from = _made_from(corpus, tokenizer, held_out=held_out, seed=seed)
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def build_cache(
    folder: Path,
    corpus: Corpus,
    tokenizer: WordPiece,
    *,
    held_out: float,
    seed: int,
    progress: Callable[[int], None] = lambda documents: None,
) -> TokenCache:
    """Write the tokens of a corpus, read as a stream, and open them. One process may do this at a time.

    Files are written under temporary names and renamed, the header last: a crash leaves no cache, or the old one.

    Args:
        folder: made if need be; a cache in it is replaced.
        corpus: the text.
        tokenizer: its ids are stored as uint16 where all fit, else as uint32.
        held_out: share of the documents, in [0, 1), for the held-out stream (`is_held_out`).
        seed: of that choice.
        progress: called with the number of documents that are done.

    Raises:
        ValueError: no text, nothing held out though some should be, nothing left to train on, or an unreadable text.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out: expected a share of the documents in [0, 1), got {held_out}")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.tmp"):
        left.unlink()  # of a process that was killed
    temporaries = {part: folder / f"{name}.{os.getpid()}.tmp" for part, name in _FILES.items()}
    temporary_header = folder / f"{HEADER}.{os.getpid()}.tmp"
    try:
        header = _write_tokens(temporaries, corpus, tokenizer, held_out=held_out, seed=seed, progress=progress)
        header["made_from"] = _made_from(corpus, tokenizer, held_out=held_out, seed=seed)
        with temporary_header.open("wb") as file:
            file.write(json.dumps(header, indent=1).encode())
            _flush(file)
        # Without its header an old cache is none, so that none consists of old and new files.
        (folder / HEADER).unlink(missing_ok=True)
        _flush_folder(folder)
        for part, name in _FILES.items():
            temporaries[part].replace(folder / name)
        _flush_folder(folder)
        temporary_header.replace(folder / HEADER)
        _flush_folder(folder)
    finally:
        for path in (*temporaries.values(), temporary_header):
            path.unlink(missing_ok=True)
    return TokenCache(folder, verify=False)


def _write_tokens(
    paths: dict[str, Path],
    corpus: Corpus,
    tokenizer: WordPiece,
    *,
    held_out: float,
    seed: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Write the files and return the header, which does not yet say what they were made from."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    documents = {"train": 0, "held_out": 0}
    text_bytes = 0
    with paths["train"].open("wb") as train, paths["held_out"].open("wb") as kept:
        for batch in _batches(corpus):
            streams = ["held_out" if is_held_out(text, share=held_out, seed=seed) else "train" for text in batch]
            for text, ids, stream in zip(batch, tokenizer.encode_batch(batch), streams, strict=True):
                text_bytes += len(text.encode())
                if not ids:
                    continue  # nothing but characters that the tokenizer drops
                tokens = np.array([tokenizer.sep_id, *ids] if documents[stream] else ids, dtype=dtype)
                (train if stream == "train" else kept).write(tokens.tobytes())
                documents[stream] += 1
                if stream == "train":
                    counts += np.bincount(tokens, minlength=len(counts))
            progress(sum(documents.values()))
        for file in (train, kept):
            _flush(file)
    _check_split(documents, corpus, held_out=held_out)
    counts[list(tokenizer.special_ids)] = 0
    with paths["counts"].open("wb") as file:
        file.write(counts.astype("<i8").tobytes())
        _flush(file)
    names = ("pad", "unk", "cls", "sep", "mask")
    return {
        "format": _FORMAT,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": {name: getattr(tokenizer, f"{name}_id") for name in names},
        "documents": documents,
        "text_bytes": text_bytes,
        "sources": list(corpus.sources),
        "files": {part: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for part, path in paths.items()},
    }


def _batches(corpus: Corpus) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in corpus:
        batch.append(text)
        characters += len(text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_split(documents: dict[str, int], corpus: Corpus, *, held_out: float) -> None:
    total = sum(documents.values())
    if total == 0:
        raise ValueError(f"{', '.join(corpus.sources[:3])}: expected text, got no token from it")
    if documents["train"] == 0 or (held_out > 0 and documents["held_out"] == 0):
        raise ValueError(
            f"held_out: expected a share that leaves documents on both sides, got {held_out}, by which "
            f"{documents['held_out']} of {total} documents are held out; give more documents (a blank line ends one in "
            f".txt files), another share or another seed"
        )


def _made_from(corpus: Corpus, tokenizer: WordPiece, *, held_out: float, seed: int) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "text": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "share held out": held_out,
        "seed": seed,
    }


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    try:
        header = json.loads(path.read_bytes())
    except ValueError as error:
        raise _corrupt(path, f"expected JSON: {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(path, f"expected a JSON object, got {type(header).__name__}")
    return header


def _corrupt(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: the token cache is corrupt ({what}); delete {path.parent}, it will be made anew")


def _reopen(folder: Path) -> TokenCache:
    return TokenCache(folder, verify=False)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
