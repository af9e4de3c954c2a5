"""Tables are read as written, encoded as transformers encodes them, and refused with file and line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.bert.data.classification import EncodedTable, Table, open_table, split_table
from tests.recipes.bert.data.texts import TOPICS, small_tokenizer

ROWS = [
    ("A plain text.", "good"),
    ('With "quotes", commas', "bad"),
    ("two\nlines", "good"),
    ("Größe 中文", " good "),
    ("", "bad"),
]


def write_csv(path: Path, rows: list[tuple[str, ...]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def write_json(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_csv_and_json_lines_hold_the_same_table(tmp_path: Path) -> None:
    tables = [
        open_table(write_csv(tmp_path / "a.csv", [("sentence", "number", "label"), *((t, "7", v) for t, v in ROWS)])),
        open_table(write_json(tmp_path / "a.jsonl", [{"label": v, "text": t} for t, v in ROWS])),
    ]
    for table in tables:
        assert table.texts == tuple(text for text, _ in ROWS) and table.pairs is None
        assert table.names == ("bad", "good") and table.labels.tolist() == [1, 0, 1, 1, 0]
        assert len(table) == 5


def test_quotes_in_tsv_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.TSV"
    path.write_text('text\tlabel\r\n"quoted\t0\r\n\r\nplain\t1\r\n')
    table = open_table(path)
    assert table.texts == ('"quoted', "plain") and table.names == ("0", "1")


def test_columns_may_be_named_and_a_second_text_is_found(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "y", "text": "t", "text_pair": "p", "label": 1, "c": True}]
    path = write_json(tmp_path / "a.jsonl", [*rows, rows[0] | {"label": 2, "c": False}])
    assert (open_table(path).texts, open_table(path).pairs) == (("t", "t"), ("p", "p"))
    table = open_table(path, text="a", text_pair="b", label="c")
    assert (table.texts, table.pairs, table.names) == (("x", "x"), ("y", "y"), ("false", "true"))


def test_classes_of_the_training_table_are_kept(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [("text", "label"), ("one", "c"), ("two", "b")])
    assert open_table(path, names=("a", "b", "c")).labels.tolist() == [2, 1]
    with pytest.raises(ValueError, match=r'a.csv, line 2: expected a label of the training table \(a, b\), got "c"'):
        open_table(path, names=("a", "b"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv: expected rows, got an empty table"),
        ("a.csv", b"text,label\n", "a.csv: expected rows, got an empty table"),
        ("a.jsonl", b"\n\n", "a.jsonl: expected rows, got an empty table"),
        (
            "a.csv",
            b"body,label\nx,1\n",
            "a.csv, line 2: expected a column 'text' or 'sentence' for the text, got 'body'",
        ),
        ("a.csv", b"text,class\nx,1\n", "line 2: expected a column 'label' for the label, got 'text', 'class'"),
        ("a.csv", b"text,text\nx,1\n", "a.csv, line 1: expected different columns, got text twice"),
        (
            "a.csv",
            b'text,label\n"two\nlines",1\na,b,c\n',
            "a.csv, line 4: expected 2 cells as in the header, got 3; quote",
        ),
        ("a.tsv", b"text\tlabel\n\nx\n", "a.tsv, line 3: expected 2 cells as in the header, got 1"),
        ("a.csv", b'text,label\nx,1\n"open,2\n', "a.csv, line 3: expected a row of cells: unexpected end of data"),
        ("a.csv", b"text,label\nx,1\ny, \n", 'a.csv, line 3: expected a label in column "label", got an empty one'),
        ("a.csv", b"text,label\nx,1\ny,1\n", 'expected labels of at least two classes, got "1" in all 2 rows'),
        ("a.csv", b"text,label\nx,1\n\xe9,2\n", "a.csv: expected UTF-8, got byte 0xe9 at offset 15, line 3"),
        ("a.jsonl", b'{"text": "x", "label": 1}\nno\n', "a.jsonl, line 2: expected a JSON object: "),
        ("a.jsonl", b'\n["x", 1]\n', "a.jsonl, line 2: expected a JSON object, got list"),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": null, "label": 1}\n', 'column "text", got null'),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "y"}\n', 'line 2: .* column "label", got no such field'),
        ("a.txt", b"text", "a.txt: expected a table that ends in .csv, .tsv, .jsonl, got .txt"),
    ],
)
def test_bad_tables_are_refused_with_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_table(tmp_path / name)


def test_a_named_column_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [("text", "label"), ("one", "c")])
    for options in ({"text": "body"}, {"text_pair": "body"}, {"label": "body"}):
        with pytest.raises(
            ValueError, match=r"expected a column 'body' for the .*, got 'text', 'label'; name the column"
        ):
            open_table(path, **options)
    with pytest.raises(ValueError, match=r"none.csv: expected a readable file"):
        open_table(tmp_path / "none.csv")


def made_table(texts: list[str], pairs: list[str] | None = None) -> Table:
    labels = np.arange(len(texts)) % 3
    return Table(Path("a.csv"), tuple(texts), None if pairs is None else tuple(pairs), labels, ("x", "y", "z"))


@pytest.mark.parametrize("paired", [False, True])
def test_batches_are_those_of_transformers(tmp_path: Path, paired: bool) -> None:
    from transformers import AutoTokenizer

    small_tokenizer().save(tmp_path)
    their = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["short", "", *[topic[:n] for topic, n in zip(TOPICS[:12], range(5, 150, 12), strict=False)]]
    pairs = [f"pair {text[:30]}" for text in reversed(texts)] if paired else None
    encoded = EncodedTable(made_table(texts, pairs), small_tokenizer(), max_length=200)
    assert encoded.truncated == 0 and len(encoded) == len(texts)
    for rows in (np.arange(len(texts)), np.array([3]), np.array([5, 2, 2, 7])):
        batch = encoded.batch(rows)
        chosen = [texts[row] for row in rows]
        seconds = None if pairs is None else [pairs[row] for row in rows]
        expected = their(chosen, seconds, padding=True, pad_to_multiple_of=8, return_tensors="pt")
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            assert torch.equal(getattr(batch, name), expected[name])
        assert batch.labels.tolist() == [row % 3 for row in rows]


@given(first=st.integers(0, 30), second=st.integers(0, 30), limit=st.integers(8, 40))
def test_of_a_pair_that_is_too_long_the_longer_text_loses_tokens(first: int, second: int, limit: int) -> None:
    table = made_table([" ".join(["the"] * first)], [" ".join(["is"] * second)])
    encoded = EncodedTable(table, small_tokenizer(), max_length=limit)
    batch = encoded.batch(np.array([0]))
    kept_first, kept_second = first, second
    while kept_first + kept_second > limit - 3:  # as BERT's _truncate_seq_pair does
        if kept_first > kept_second:
            kept_first -= 1
        else:
            kept_second -= 1
    length = kept_first + kept_second + 3
    the, is_ = (ids[0] for ids in small_tokenizer().encode_batch(["the", "is"]))
    assert batch.input_ids[0, :length].tolist() == [2, *[the] * kept_first, 3, *[is_] * kept_second, 3]
    assert batch.attention_mask.sum() == length == encoded.lengths[0]
    assert batch.token_type_ids[0, :length].tolist() == [0] * (kept_first + 2) + [1] * (kept_second + 1)
    assert batch.input_ids.shape[1] <= max(limit, 8)
    assert encoded.truncated == (first + second > limit - 3)


def test_long_texts_are_cut_at_the_end(tmp_path: Path) -> None:
    encoded = EncodedTable(made_table([TOPICS[0], "short"]), small_tokenizer(), max_length=20)
    batch = encoded.batch(np.array([0, 1]))
    assert batch.input_ids.shape == (2, 20) and encoded.truncated == 1
    assert batch.input_ids[0].tolist() == [2, *small_tokenizer().encode_batch([TOPICS[0]])[0][:18], 3]
    with pytest.raises(ValueError, match="max_length: expected at least 8, got 7"):
        EncodedTable(made_table(["a"]), small_tokenizer(), max_length=7)


def test_rows_are_split_by_their_text() -> None:
    table = made_table([f"text {n % 500}" for n in range(1000)])
    train, held_out = split_table(table, held_out=0.2, seed=3)
    assert len(train) + len(held_out) == 1000 and 120 < len(held_out) < 280
    assert not set(train.texts) & set(held_out.texts)
    assert train.names == held_out.names == table.names
    rows = {
        (text, int(label)) for part in (train, held_out) for text, label in zip(part.texts, part.labels, strict=True)
    }
    assert rows == set(zip(table.texts, table.labels.tolist(), strict=True))
    again = split_table(table, held_out=0.2, seed=3)
    assert again[1].texts == held_out.texts and split_table(table, held_out=0.2, seed=4)[1].texts != held_out.texts
    with pytest.raises(
        ValueError, match=r"a.csv: expected a share that leaves rows on both sides, got 0.01, by which 0 of 2"
    ):
        split_table(made_table(["a", "b"]), held_out=0.01, seed=0)
