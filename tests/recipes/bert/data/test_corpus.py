"""Documents are those of the files, in a fixed order, split the same way everywhere; bad input is refused."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.bert.data.corpus import LONGEST_DOCUMENT, embedded_corpus, is_held_out, open_corpus


def test_blank_lines_end_documents_except_in_markup(tmp_path: Path) -> None:
    text = "\n\nfirst line\nsecond line\n \t\n\nnext document \n"
    for name in ("a.txt", "b.md", "c.rst", "d.log"):
        (tmp_path / name).write_text(text)
    two = ["first line\nsecond line", "next document"]
    one = [text.strip()]
    assert list(open_corpus([tmp_path / "a.txt"])) == list(open_corpus([tmp_path / "d.log"])) == two
    assert list(open_corpus([tmp_path / "b.md"])) == list(open_corpus([tmp_path / "c.rst"])) == one


def test_folders_are_read_by_name_with_what_lies_in_them(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.rst", ".hidden/x.txt", ".secret.txt", "code.py", "UPPER.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text of c.txt.gz"))
    corpus = open_corpus([tmp_path])
    assert list(corpus) == [f"text of {name}" for name in ("UPPER.TXT", "a/b/c.rst", "a/z.md", "b.txt", "c.txt.gz")]
    assert list(corpus) == list(corpus)
    assert corpus.sources == tuple(
        str(tmp_path / name) for name in ("UPPER.TXT", "a/b/c.rst", "a/z.md", "b.txt", "c.txt.gz")
    )
    assert next(iter(open_corpus([tmp_path / "b.txt", tmp_path / "a"]))) == "text of b.txt"


def test_long_documents_are_cut_and_no_word_is_lost_in_bounded_memory(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(180_000)]
    (tmp_path / "one_line.txt").write_text(" ".join(words))
    (tmp_path / "lines.md").write_text("\n".join(words))
    for name in ("one_line.txt", "lines.md"):
        corpus = open_corpus([tmp_path / name])
        tracemalloc.start()
        longest = max(len(document) for document in corpus)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert longest <= LONGEST_DOCUMENT
        assert peak < 20 * LONGEST_DOCUMENT < (tmp_path / name).stat().st_size
        assert " ".join(corpus).split() == words


def test_the_fingerprint_follows_what_the_files_are(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    before = open_corpus([path]).fingerprint
    assert open_corpus([path]).fingerprint == before
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    touched = open_corpus([path]).fingerprint
    (tmp_path / "b.txt").write_text("some text")
    both = [path, tmp_path / "b.txt"]
    different = {before, touched, open_corpus(both).fingerprint, open_corpus(both[::-1]).fingerprint}
    assert len(different) == 4


def test_input_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one text file or folder"):
        open_corpus([])
    with pytest.raises(ValueError, match=r"nowhere: expected a readable file: No such file"):
        open_corpus([tmp_path / "nowhere"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "code.py").write_text("pass")
    with pytest.raises(ValueError, match=r"folder: expected a folder with text files \(.txt, .md"):
        open_corpus([tmp_path / "folder"])
    (tmp_path / "blank.txt").write_text(" \n\n\t\n")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"blank.txt, .*empty.txt: expected text, got 2 files that are empty"):
        open_corpus([tmp_path / "blank.txt", tmp_path / "empty.txt"])
    (tmp_path / "good.txt").write_text("text")
    with pytest.raises(ValueError, match=r"good.txt: named twice"):
        open_corpus([tmp_path / "good.txt", tmp_path / "folder" / ".." / "good.txt"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="expected a regular file, got a pipe"):
        open_corpus([tmp_path / "pipe"])


@given(document=st.text(), share=st.floats(0, 0.99), seed=st.integers(-(2**70), 2**70))
def test_held_out_documents_stay_held_out_when_the_share_grows(document: str, share: float, seed: int) -> None:
    chosen = is_held_out(document, share=share, seed=seed)
    assert chosen == is_held_out(document, share=share, seed=seed)
    assert not chosen or is_held_out(document, share=(1 + share) / 2, seed=seed)
    assert not is_held_out(document, share=0.0, seed=seed)


def test_the_share_of_held_out_documents_is_the_one_asked_for_and_depends_on_the_seed() -> None:
    count = 20_000
    sides = [[is_held_out(f"document {n}", share=0.05, seed=seed) for n in range(count)] for seed in (0, 1)]
    deviation = (count * 0.05 * 0.95) ** 0.5
    assert all(abs(sum(side) - 0.05 * count) < 5 * deviation for side in sides)
    both = sum(a and b for a, b in zip(*sides, strict=True))
    assert abs(both - 0.0025 * count) < 5 * (0.0025 * count) ** 0.5


_LOOK = """
import hashlib, sys
from recipes.bert.data.corpus import embedded_corpus
corpus = embedded_corpus()
imported = {"numpy", "torch", "sklearn", "transformers", "matplotlib", "sympy"} & set(sys.modules)
print(corpus.fingerprint, hashlib.sha256(repr(list(corpus)).encode()).hexdigest(), *imported)
"""


def test_embedded_text_is_english_that_repeats_nothing_and_is_the_same_in_every_process() -> None:
    other = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True).stdout.split()
    corpus = embedded_corpus()
    names = [source.rsplit(" ", 1)[0] for source in corpus.sources]
    assert {"Python", "numpy", "torch", "transformers"} <= set(names)
    documents = list(corpus)
    paragraphs = [paragraph for document in documents for paragraph in document.split("\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert 4e6 < sum(len(document.encode()) for document in documents) < 30e6
    words = "\n".join(paragraphs).lower().split()
    # Zipf's first words: in English prose "the" is about one word in 17, "of" one in 30; code and tables have few.
    assert 0.04 < words.count("the") / len(words) < 0.1
    assert 0.015 < words.count("of") / len(words) < 0.05
    assert not any(paragraph.startswith((">>>", "def ", "|")) for paragraph in paragraphs)
    # The last value would be the first of the packages that are read, had they been imported.
    digest = hashlib.sha256(repr(documents).encode()).hexdigest()
    assert other == [corpus.fingerprint, digest]


def test_links_do_not_lead_in_circles_and_no_file_is_read_twice(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("text of a")
    (folder / "again").symlink_to(folder)
    assert list(open_corpus([folder])) == ["text of a"]
    (folder / "b.txt").symlink_to(folder / "a.txt")
    with pytest.raises(ValueError, match=r"b\.txt: named twice, perhaps by a link"):
        open_corpus([folder])
