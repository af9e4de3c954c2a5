"""The cache holds the tokens of the text, is made anew when anything else is asked for, and damage is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipes.bert.data.cache import HEADER, Stream, TokenCache, build_cache, open_cache
from recipes.bert.data.corpus import Corpus, is_held_out, open_corpus
from recipes.bert.data.tokenizer import SPECIAL_TOKENS, WordPiece, load_tokenizer, train_tokenizer
from tests.recipes.bert.data.texts import TOPICS, small_tokenizer

SETTINGS = {"held_out": 0.3, "seed": 5}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text").mkdir()
    for number, topic in enumerate(TOPICS[:8]):
        (tmp_path / "text" / f"{number}.txt").write_text(topic)
    return open_corpus([tmp_path / "text"])


@pytest.fixture
def cache(tmp_path: Path, corpus: Corpus) -> TokenCache:
    return build_cache(tmp_path / "cache", corpus, small_tokenizer(), **SETTINGS)


def expected_stream(corpus: Corpus, tokenizer: WordPiece, *, held_out: bool) -> list[int]:
    tokens: list[int] = []
    for document in corpus:
        if is_held_out(document, share=0.3, seed=5) == held_out:
            tokens += [tokenizer.sep_id] * bool(tokens) + tokenizer.encode_batch([document])[0]
    return tokens


def test_streams_are_the_documents_joined_by_separators(corpus: Corpus, cache: TokenCache) -> None:
    tokenizer = small_tokenizer()
    streams: tuple[Stream, ...] = ("train", "held_out")
    for name, held_out in zip(streams, (False, True), strict=True):
        tokens = cache.stream(name)
        assert tokens.dtype == np.uint16 and not tokens.flags.writeable
        assert tokens.tolist() == expected_stream(corpus, tokenizer, held_out=held_out)
    assert (cache.train_tokens, cache.held_out_tokens) == (len(cache.stream("train")), len(cache.stream("held_out")))
    assert sum(cache.documents.values()) == len(list(corpus))
    assert cache.text_bytes == sum(len(text.encode()) for text in corpus)
    assert cache.vocab_size == 600 and cache.sources == corpus.sources
    assert cache.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    counts = np.bincount(cache.stream("train"), minlength=600)
    counts[:5] = 0
    assert np.array_equal(cache.counts(), counts)


def test_large_vocabularies_take_four_bytes(tmp_path: Path, corpus: Corpus) -> None:
    tokens = [*SPECIAL_TOKENS, *(f"filler{n}" for n in range(70_000)), *(w for w in ("the", "of", "a", "##s"))]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    cache = build_cache(tmp_path / "cache", corpus, tokenizer, **SETTINGS)
    assert cache.stream("train").dtype == np.uint32
    assert cache.stream("train").tolist() == expected_stream(corpus, tokenizer, held_out=False)
    assert int(cache.stream("train").max()) > 70_000


def test_the_fingerprint_follows_the_tokens_and_not_where_the_text_lay(
    tmp_path: Path, corpus: Corpus, cache: TokenCache
) -> None:
    (tmp_path / "text").rename(tmp_path / "moved")
    moved = open_corpus([tmp_path / "moved"])
    again = build_cache(tmp_path / "again", moved, small_tokenizer(), **SETTINGS)
    assert again.fingerprint == cache.fingerprint and moved.fingerprint != corpus.fingerprint
    other = build_cache(tmp_path / "other", moved, small_tokenizer(), held_out=0.3, seed=6)
    assert other.fingerprint != cache.fingerprint


def test_nothing_held_out_is_an_empty_stream(tmp_path: Path, corpus: Corpus) -> None:
    cache = build_cache(tmp_path / "cache", corpus, small_tokenizer(), held_out=0.0, seed=5)
    assert len(cache.stream("held_out")) == cache.held_out_tokens == 0
    assert cache.documents == {"train": len(list(corpus)), "held_out": 0}


def test_progress_tells_how_many_documents_are_done(tmp_path: Path, corpus: Corpus) -> None:
    seen: list[int] = []
    build_cache(tmp_path / "cache", corpus, small_tokenizer(), **SETTINGS, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == len(list(corpus))


def test_a_cache_of_the_same_settings_is_opened_and_of_others_is_not(
    tmp_path: Path, corpus: Corpus, cache: TokenCache, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, folder = small_tokenizer(), cache.folder
    opened = open_cache(folder, corpus, tokenizer, **SETTINGS)
    assert opened is not None and np.array_equal(opened.stream("train"), cache.stream("train"))
    assert open_cache(tmp_path / "nowhere", corpus, tokenizer, **SETTINGS) is None
    caplog.set_level(logging.INFO, "hybridpar")
    other = train_tokenizer(TOPICS[:5], vocab_size=600)
    assert open_cache(folder, corpus, other, **SETTINGS) is None
    assert open_cache(folder, corpus, tokenizer, held_out=0.2, seed=5) is None
    assert open_cache(folder, corpus, tokenizer, held_out=0.3, seed=6) is None
    (tmp_path / "text" / "0.txt").write_text("changed")
    assert open_cache(folder, open_corpus([tmp_path / "text"]), tokenizer, **SETTINGS) is None
    reasons = [record.getMessage().rpartition(" another ")[2] for record in caplog.records]
    assert reasons == ["tokenizer", "share held out", "seed", "text"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("train.tokens", cut, r"train.tokens: .* corrupt \(expected \d+ bytes, got \d+\)"),
    ("held_out.tokens", flip, r"held_out.tokens: .* corrupt \(expected checksum"),
    ("train.tokens", flip, r"train.tokens: .* corrupt \(expected checksum"),
    ("counts.int64", flip, r"counts.int64: .* corrupt \(expected checksum"),
    ("counts.int64", Path.unlink, r"counts.int64: .* corrupt \(expected 4800 bytes, got no file\)"),
    (HEADER, cut, r"header.json: .* corrupt \(expected JSON"),
    (HEADER, lambda path: path.write_bytes(b"\xff\xfe"), r"header.json: .* corrupt \(expected JSON"),
    (HEADER, lambda path: path.write_text("[]"), r"header.json: .* corrupt \(expected a JSON object, got list"),
    (HEADER, lambda path: path.write_text("{}"), r"header.json: .* corrupt \(it does not say what it was made from"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damage_is_refused_with_the_file_and_the_way_out(
    corpus: Corpus, cache: TokenCache, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(cache.folder / name)
    with pytest.raises(ValueError, match=message) as caught:
        open_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS)
    assert f"delete {cache.folder}," in str(caught.value)
    rebuilt = build_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS)
    assert open_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS) is not None
    assert rebuilt.stream("train").tolist() == expected_stream(corpus, small_tokenizer(), held_out=False)


@pytest.mark.parametrize("key", ["dtype", "vocab_size", "special_ids", "documents", "files"])
def test_a_header_that_lacks_something_is_refused(corpus: Corpus, cache: TokenCache, key: str) -> None:
    header = json.loads((cache.folder / HEADER).read_text())
    for damaged in ({k: v for k, v in header.items() if k != key}, header | {key: ["bad"]}):
        (cache.folder / HEADER).write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"header.json: the token cache is corrupt \(it lacks or garbles"):
            open_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS)


class CrashError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("renamed", range(4))
def test_a_crash_while_files_are_renamed_leaves_no_cache(
    corpus: Corpus, cache: TokenCache, renamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, count = Path.replace, 0

    def crash_after_some(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > renamed:
            raise CrashError
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", crash_after_some)
    other = train_tokenizer(TOPICS[:5], vocab_size=600)
    with pytest.raises(CrashError):
        build_cache(cache.folder, corpus, other, **SETTINGS)
    monkeypatch.undo()
    assert open_cache(cache.folder, corpus, other, **SETTINGS) is None
    assert open_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS) is None
    assert not list(cache.folder.glob("*.tmp"))


def test_a_crash_while_tokens_are_written_leaves_the_old_cache(corpus: Corpus, cache: TokenCache) -> None:
    def crash(documents: int) -> None:
        raise CrashError

    with pytest.raises(CrashError):
        build_cache(cache.folder, corpus, train_tokenizer(TOPICS[:5], vocab_size=600), **SETTINGS, progress=crash)
    assert open_cache(cache.folder, corpus, small_tokenizer(), **SETTINGS) is not None
    assert not list(cache.folder.glob("*.tmp"))


def total(cache: TokenCache) -> int:
    return int(cache.stream("train").astype(np.int64).sum())


def test_other_processes_read_the_same_tokens_by_the_path(tmp_path: Path, cache: TokenCache) -> None:
    expected = total(cache)
    content = pickle.dumps(cache)
    assert len(content) < 1000
    (tmp_path / "cache.pickle").write_bytes(content)
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).stream('train').astype('int64').sum())"
    fresh = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "cache.pickle")], capture_output=True, text=True, check=True
    )
    assert int(fresh.stdout) == expected
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(total, (cache,)) == expected


def test_text_that_leaves_a_stream_empty_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    one = open_corpus([tmp_path / "one.txt"])
    with pytest.raises(ValueError, match=r"leaves documents on both sides, got 0.01, by which 0 of 1 documents"):
        build_cache(tmp_path / "cache", one, small_tokenizer(), held_out=0.01, seed=0)
    (tmp_path / "control.txt").write_text("\x00\x01")
    with pytest.raises(ValueError, match="expected text, got no token from it"):
        build_cache(
            tmp_path / "cache", open_corpus([tmp_path / "control.txt"]), small_tokenizer(), held_out=0.1, seed=0
        )
    with pytest.raises(ValueError, match=r"expected a share of the documents in \[0, 1\), got 1"):
        build_cache(tmp_path / "cache", corpus, small_tokenizer(), held_out=1, seed=0)
    assert not list((tmp_path / "cache").iterdir())


def test_text_that_is_not_utf8_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"good text\n\nbad \xe9 text")
    with pytest.raises(ValueError, match=r"latin.txt: expected UTF-8, got byte 0xe9 at offset 15, line 3"):
        build_cache(tmp_path / "cache", open_corpus([tmp_path / "latin.txt"]), small_tokenizer(), held_out=0.1, seed=0)
    assert not list((tmp_path / "cache").iterdir())
