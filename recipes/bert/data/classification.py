"""Tables of texts with labels: CSV, TSV and JSON lines, split and encoded for a classifier."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.bert.data.corpus import is_held_out
from recipes.bert.data.lines import read_lines
from recipes.bert.data.tokenizer import WordPiece

TEXT_COLUMNS, PAIR_COLUMN, LABEL_COLUMN = ("text", "sentence"), "text_pair", "label"
"""Names of columns that are taken where none is named."""

_SUFFIXES = (".csv", ".tsv", ".jsonl")
_MULTIPLE = 8  # widths of batches; matrix units like them

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """R texts, or pairs of texts, with a class each.

    Attributes:
        path: the file they come from.
        texts: the (first) text of each row.
        pairs: the second ones; None where rows have one text.
        labels: int64 [R], positions in `names`.
        names: of the classes.
    """

    path: Path
    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: Int64Array
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def fingerprint(self) -> str:
        """sha256 of all rows."""
        rows = [self.texts, self.pairs, self.labels.tolist(), self.names]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def select(self, rows: Int64Array) -> Table:
        """Some of the rows, with the same classes."""
        texts = tuple(self.texts[row] for row in rows)
        pairs = None if self.pairs is None else tuple(self.pairs[row] for row in rows)
        return Table(self.path, texts, pairs, self.labels[rows], self.names)


class ClassificationBatch(NamedTuple):
    """B rows, padded to the longest of them, in multiples of 8 tokens.

    Attributes:
        input_ids: int64 [B, T].
        attention_mask: int64 [B, T], 0 at padding and 1 elsewhere.
        token_type_ids: int64 [B, T], 1 in the second text and 0 elsewhere.
        labels: int64 [B].
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor


class EncodedTable:
    """A table as tokens: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP], in at most ``max_length`` tokens.

    Too long texts are cut at their ends; of a pair, the text that is longer at that moment loses a token, as in BERT.

    Args:
        table: the rows.
        tokenizer: for the ids.
        max_length: tokens of a row at most, special ones included; at least 8.

    Attributes:
        labels: int64 [R].
        lengths: int64 [R], tokens of each row.
        truncated: how many rows were cut.
    """

    def __init__(self, table: Table, tokenizer: WordPiece, *, max_length: int) -> None:
        if max_length < _MULTIPLE:
            raise ValueError(f"max_length: expected at least {_MULTIPLE}, got {max_length}")
        self.labels = table.labels
        self._pad_id, self._limit = tokenizer.pad_id, max_length
        self.truncated = 0
        rows, firsts = [], []
        seconds = [None] * len(table) if table.pairs is None else tokenizer.encode_batch(table.pairs)
        for first, second in zip(tokenizer.encode_batch(table.texts), seconds, strict=True):
            room = max_length - (2 if second is None else 3)
            kept = _share_room(len(first), 0 if second is None else len(second), room)
            self.truncated += kept != (len(first), 0 if second is None else len(second))
            row = [tokenizer.cls_id, *first[: kept[0]], tokenizer.sep_id]
            firsts.append(len(row))
            rows.append(row if second is None else [*row, *second[: kept[1]], tokenizer.sep_id])
        self.lengths: Int64Array = np.array([len(row) for row in rows], dtype=np.int64)
        self._firsts: Int64Array = np.array(firsts, dtype=np.int64)
        self._starts: Int64Array = np.cumsum(self.lengths) - self.lengths
        self._tokens: Int64Array = np.array([token for row in rows for token in row], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Int64Array) -> ClassificationBatch:
        """Rows by number."""
        lengths = self.lengths[rows]
        longest = int(lengths.max(initial=1))
        width = min(-(-longest // _MULTIPLE) * _MULTIPLE, max(self._limit, longest))
        columns = np.arange(width)
        inside = columns < lengths[:, None]
        input_ids = np.full((len(rows), width), self._pad_id, dtype=np.int64)
        input_ids[inside] = self._tokens[(self._starts[rows][:, None] + columns)[inside]]
        second = inside & (columns >= self._firsts[rows][:, None])
        arrays = (input_ids, inside.astype(np.int64), second.astype(np.int64), self.labels[rows])
        return ClassificationBatch(*(torch.from_numpy(array) for array in arrays))


def open_table(
    path: Path,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    names: Sequence[str] | None = None,
) -> Table:
    """Read a table: .csv (quotes as in RFC 4180), .tsv (no quotes), each with a header row, or .jsonl (objects).

    The whole table is held in memory.

    Args:
        path: the file.
        text, text_pair, label: names of the columns; where not given, "text" or "sentence", "text_pair" where there is
            one, and "label".
        names: the classes, for a table to evaluate on; by default the different labels of this table, sorted.

    Raises:
        ValueError: with file and line: no such file, another suffix, not UTF-8, no rows, a missing column, rows of
            another width than the header, text that is no JSON object, an empty label, a label not in ``names``, or one
            class only.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"{path}: expected a table that ends in {', '.join(_SUFFIXES)}, got {path.suffix or 'no suffix'}"
        )
    rows = _json_rows(path) if path.suffix.lower() == ".jsonl" else _separated_rows(path)
    texts: list[str] = []
    pairs: list[str] = []
    labels: list[str] = []
    lines: list[int] = []
    columns: tuple[str, str | None, str] | None = None
    for line, row in rows:
        if columns is None:
            columns = _columns(path, line, row, text, text_pair, label)
        text_column, pair_column, label_column = columns
        texts.append(_cell(path, line, row, text_column))
        if pair_column is None and text_pair is None and PAIR_COLUMN in row:
            raise ValueError(f"{path}, line {line}: expected rows of one text as above, got a {PAIR_COLUMN}")
        if pair_column is not None:
            pairs.append(_cell(path, line, row, pair_column))
        labels.append(_cell(path, line, row, label_column).strip())
        lines.append(line)
        if not labels[-1]:
            raise ValueError(f'{path}, line {line}: expected a label in column "{label_column}", got an empty one')
    if columns is None:
        raise ValueError(f"{path}: expected rows, got an empty table")
    classes, ids = _numbered(path, lines, labels, names)
    return Table(
        path=path,
        texts=tuple(texts),
        pairs=None if columns[1] is None else tuple(pairs),
        labels=ids,
        names=classes,
    )


def _numbered(
    path: Path, lines: Sequence[int], labels: Sequence[str], names: Sequence[str] | None
) -> tuple[tuple[str, ...], Int64Array]:
    """The classes, and the number of each label among them."""
    classes = tuple(sorted(set(labels))) if names is None else tuple(names)
    if len(classes) < 2:
        raise ValueError(
            f'{path}: expected labels of at least two classes, got "{classes[0]}" in all {len(labels)} rows'
        )
    numbers = {name: number for number, name in enumerate(classes)}
    for line, name in zip(lines, labels, strict=True):
        if name not in numbers:
            shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            raise ValueError(f'{path}, line {line}: expected a label of the training table ({shown}), got "{name}"')
    return classes, np.array([numbers[name] for name in labels], dtype=np.int64)


def split_table(table: Table, *, held_out: float, seed: int) -> tuple[Table, Table]:
    """Rows to train on and rows held out; equal texts are on one side.

    Args:
        table: all rows.
        held_out: share of the rows, in (0, 1).
        seed: of the choice.

    Raises:
        ValueError: no row on one of the sides.
    """
    pairs = table.pairs or ("",) * len(table)
    kept = np.array(
        [
            is_held_out(f"{text}\n{pair}", share=held_out, seed=seed)
            for text, pair in zip(table.texts, pairs, strict=True)
        ]
    )
    if not kept.any() or kept.all():
        raise ValueError(
            f"{table.path}: expected a share that leaves rows on both sides, got {held_out}, by which "
            f"{int(kept.sum())} of {len(table)} rows are held out; give another share, or a file to evaluate on"
        )
    return table.select(np.flatnonzero(~kept)), table.select(np.flatnonzero(kept))


def _share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two texts keep when the longer one loses a token (the second, of equal ones) until both fit."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if shorter <= room // 2:
        return (shorter, room - shorter) if first <= second else (room - shorter, shorter)
    return room - room // 2, room // 2


def _separated_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    if path.suffix.lower() == ".tsv":
        reader = csv.reader(read_lines(path, longest=None), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(read_lines(path, longest=None), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if not cells:
                pass  # a blank line
            elif header is None:
                header = [name.strip() for name in cells]
                if repeated := sorted({name for name in header if header.count(name) > 1}):
                    raise ValueError(
                        f"{path}, line {line}: expected different columns, got {', '.join(repeated)} twice"
                    )
            elif len(cells) != len(header):
                hint = "; quote cells that hold commas" if path.suffix.lower() == ".csv" else ""
                raise ValueError(
                    f"{path}, line {line}: expected {len(header)} cells as in the header, got {len(cells)}{hint}"
                )
            else:
                yield line, dict(zip(header, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: expected a row of cells: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    for line, content in enumerate(read_lines(path, longest=None), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: expected a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {line}: expected a JSON object, got {type(row).__name__}")
        yield line, row


def _columns(
    path: Path, line: int, row: Mapping[str, object], text: str | None, text_pair: str | None, label: str | None
) -> tuple[str, str | None, str]:
    """The columns of text, pair (None: there is none) and label."""

    def present(named: str | None, usual: Sequence[str], option: str) -> str:
        candidates = (named,) if named is not None else usual
        for name in candidates:
            if name in row:
                return name
        raise ValueError(
            f"{path}, line {line}: expected a column {' or '.join(map(repr, candidates))} for the {option}, got "
            f"{', '.join(map(repr, row))}; name the column to take"
        )

    pair = PAIR_COLUMN if text_pair is None and PAIR_COLUMN in row else text_pair
    return (
        present(text, TEXT_COLUMNS, "text"),
        None if pair is None else present(pair, (), "second text"),
        present(label, (LABEL_COLUMN,), "label"),
    )


def _cell(path: Path, line: int, row: Mapping[str, object], column: str) -> str:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f'{path}, line {line}: expected text in column "{column}", got {error}') from error
        return value
    if isinstance(value, bool):
        return str(value).lower()  # as JSON writes it
    if isinstance(value, int | float):
        return str(value)
    got = json.dumps(value)[:40] if column in row else "no such field"
    raise ValueError(f'{path}, line {line}: expected a text or a number in column "{column}", got {got}')
