"""Lines are those of the file, whatever their length, and what is no text is refused with its place."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.bert.data.lines import read_lines


@given(text=st.text(st.sampled_from("ab \n\r\té中😀"), max_size=60))
def test_pieces_of_long_lines_are_the_whole_text_and_end_at_spaces(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    assert list(read_lines(path, longest=None)) == [part for part in text.replace("\n", "\n\0").split("\0") if part]
    pieces = list(read_lines(path, longest=8))
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= 8 for piece in pieces)
    for piece in pieces[:-1]:
        assert piece.endswith(("\n", " ")) or " " not in piece


def test_a_byte_order_mark_is_no_text_and_gzip_is_unpacked(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfone\ntwo"
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    assert list(read_lines(tmp_path / "a.txt")) == list(read_lines(tmp_path / "a.txt.gz")) == ["one\n", "two"]


@pytest.mark.parametrize("longest", [None, 8])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf8_is_refused_with_byte_offset_line_and_way_out(
    tmp_path: Path, longest: int | None, mark: bytes
) -> None:
    path = tmp_path / "latin.txt"
    content = mark + b"Zeile eins ist gut\nZeile zwei: " + "Größe".encode("latin-1") + b"\nmore"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"latin.txt: expected UTF-8") as caught:
        list(read_lines(path, longest=longest))
    assert f"got byte 0xf6 at offset {content.index(0xF6)}, line 2 " in str(caught.value)
    assert "iconv" in str(caught.value)


def test_a_character_that_the_end_of_the_file_cuts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes("中文".encode()[:-1])
    with pytest.raises(ValueError, match="got byte 0xe6 at offset 3, line 1"):
        list(read_lines(tmp_path / "cut.txt", longest=8))


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for name, kind in (("pipe.txt", "a pipe"), ("", "a folder")):
        with pytest.raises(ValueError, match=f"expected a regular file, got {kind}"):
            list(read_lines(tmp_path / name))
    with pytest.raises(ValueError, match=r"expected a regular file, got a device"):
        list(read_lines(Path("/dev/null")))
    with pytest.raises(ValueError, match=r"none.txt: expected a readable file: No such file"):
        list(read_lines(tmp_path / "none.txt"))


@pytest.mark.parametrize("damage", ["cut", "garbled", "no gzip"])
def test_broken_gzip_is_refused(tmp_path: Path, damage: str) -> None:
    content = bytearray(gzip.compress(os.urandom(5000).hex().encode()))
    if damage == "cut":
        content = content[:-20]
    elif damage == "garbled":
        content[2000:2010] = bytes(10)
    else:
        content = bytearray(b"plain text")
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.gz: expected (a readable file|UTF-8)"):
        list(read_lines(tmp_path / "a.gz"))
