"""Tokens are those of transformers' BERT tokenizer and of WordPiece by its definition, the same in every process."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from recipes.bert.data.tokenizer import SPECIAL_TOKENS, WordPiece, load_tokenizer, train_tokenizer
from tests.recipes.bert.data.texts import TOPICS, small_tokenizer

_TRAIN = """
import sys
from tests.recipes.bert.data.texts import TOPICS
from recipes.bert.data.tokenizer import train_tokenizer
print(train_tokenizer(TOPICS, vocab_size=3000).fingerprint)
"""


def vocabulary(tokenizer: WordPiece) -> list[str]:
    return tokenizer.tokens(range(tokenizer.vocab_size))


def longest_matches(word: str, known: set[str]) -> list[str]:
    """WordPiece by its definition: the longest token that the rest of the word begins with, again and again."""
    pieces = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in known), None)
        if end is None:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces


def test_trained_tokens_are_the_same_in_every_process() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", _TRAIN], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert len(set(runs)) == 1 and len(runs[0].strip()) == 64


def test_special_tokens_come_first_and_the_vocabulary_has_the_size_asked_for() -> None:
    tokenizer = small_tokenizer()
    tokens = vocabulary(tokenizer)
    assert len(tokens) == len(set(tokens)) == tokenizer.vocab_size == 600
    assert tuple(tokens[:5]) == SPECIAL_TOKENS
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert np.array_equal(tokenizer.ordinary_ids, np.arange(5, 600))
    assert np.array_equal(tokenizer.continues, [token.startswith("##") for token in tokens])
    assert tokenizer.whole_words and tokenizer.lowercase
    assert len(train_tokenizer(["a b c"], vocab_size=64).tokens(range(64))) == 64


def test_frequent_words_become_tokens() -> None:
    tokens = set(vocabulary(small_tokenizer()))
    assert {"the", "of", "is", "object", "python"} <= tokens


@given(words=st.lists(st.text(st.sampled_from("abcdefgthe xyz"), min_size=1, max_size=12), max_size=20))
@example(words=["a" * 101, "b"])
def test_encoding_is_the_longest_match(words: list[str]) -> None:
    tokenizer = small_tokenizer()
    known = set(vocabulary(tokenizer)) - set(SPECIAL_TOKENS)
    expected = [
        piece
        for word in " ".join(words).split()
        for piece in (longest_matches(word, known) if len(word) <= 100 else ["[UNK]"])
    ]
    assert tokenizer.tokens(tokenizer.encode_batch([" ".join(words)])[0]) == expected


def test_characters_outside_the_text_are_unknown() -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.tokens(tokenizer.encode_batch(["the 中 is"])[0]) == ["the", "[UNK]", "is"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_transformers_loads_what_is_saved_and_encodes_the_same(tmp_path: Path, lowercase: bool) -> None:
    from transformers import AutoTokenizer, BertTokenizerFast

    tokenizer = train_tokenizer([*TOPICS[:20], "Élan Größe"], vocab_size=800, lowercase=lowercase)
    tokenizer.save(tmp_path)
    texts = ["The Quick, brown Élan's don't [MASK]!", "Größe 中文 a##b\tc", "", *TOPICS[25:30]]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.txt").write_bytes((tmp_path / "vocab.txt").read_bytes())
    theirs = [
        AutoTokenizer.from_pretrained(tmp_path),
        BertTokenizerFast.from_pretrained(tmp_path),
        BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase),
    ]
    for their in theirs:
        assert [their(text, add_special_tokens=False)["input_ids"] for text in texts] == tokenizer.encode_batch(texts)
        special = (their.pad_token_id, their.unk_token_id, their.cls_token_id, their.sep_token_id, their.mask_token_id)
        assert special == tokenizer.special_ids and len(their) == tokenizer.vocab_size
    pair = theirs[0]("one two", "three")
    ours = tokenizer.encode_batch(["one two", "three"])
    assert pair["input_ids"] == [2, *ours[0], 3, *ours[1], 3]
    theirs[0].save_pretrained(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "theirs").encode_batch(texts) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("lowercase", [True, False])
def test_saved_tokenizers_are_the_same_when_read_again(tmp_path: Path, lowercase: bool) -> None:
    tokenizer = train_tokenizer(TOPICS[:10], vocab_size=500, lowercase=lowercase)
    tokenizer.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved/tokenizer.json", tmp_path / "saved/vocab.txt"):
        read = load_tokenizer(path)
        assert read.fingerprint == tokenizer.fingerprint and read.lowercase == lowercase
    (tmp_path / "vocab.txt").write_bytes((tmp_path / "saved/vocab.txt").read_bytes())
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    copy = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301
    assert copy.encode_batch(TOPICS[:3]) == tokenizer.encode_batch(TOPICS[:3])


def test_the_fingerprint_tells_tokenizers_apart() -> None:
    trained = [
        train_tokenizer(TOPICS[:5], vocab_size=size, lowercase=lowercase).fingerprint
        for size in (400, 401)
        for lowercase in (True, False)
    ]
    assert len(set(trained)) == 4


def test_settings_for_truncation_and_padding_are_taken_off(tmp_path: Path) -> None:
    small_tokenizer().save(tmp_path)
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    inner.save(str(tmp_path / "cut.json"))
    assert load_tokenizer(tmp_path / "cut.json").encode_batch(TOPICS[:2]) == small_tokenizer().encode_batch(TOPICS[:2])


def test_decoding_gives_words_back() -> None:
    tokenizer = small_tokenizer()
    ids = [tokenizer.cls_id, *tokenizer.encode_batch(["The statement is executed"])[0], tokenizer.sep_id]
    assert tokenizer.decode(ids) == "the statement is executed"


def test_a_tokenizer_that_does_not_mark_pieces_masks_single_tokens_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbered = {token: number for number, token in enumerate([*SPECIAL_TOKENS, "##a", "b"])}
    unmarked = models.WordPiece(numbered, unk_token="[UNK]", continuing_subword_prefix="")
    for model in (models.WordLevel(numbered, "[UNK]"), unmarked):
        inner = Tokenizer(model)
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.save(str(tmp_path / "tokenizer.json"))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hybridpar"):
            tokenizer = load_tokenizer(tmp_path)
        assert type(model).__name__ in caplog.text and "single tokens" in caplog.text
        assert not tokenizer.whole_words and not tokenizer.continues.any()


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder with tokenizer.json or vocab.txt, got neither"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="got nothing there"):
        load_tokenizer(tmp_path / "none.json")
    for content in ("no JSON", "{}", json.dumps({"model": {"type": "WordPiece"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer.json: expected a tokenizer"):
            load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n[SEP]\n")
    with pytest.raises(ValueError, match=r"got 4 lines without \[CLS\], \[MASK\]"):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "b", "a"]))
    with pytest.raises(ValueError, match='expected every token once, got "a" 2 times'):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff")
    with pytest.raises(ValueError, match="one token a line in UTF-8"):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: expected a JSON object"):
        load_tokenizer(tmp_path / "vocab.txt")


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    Tokenizer(models.WordPiece({"[UNK]": 0, "[PAD]": 1, "[SEP]": 2, "a": 3}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ValueError, match=r"got one without \[CLS\], \[MASK\]; add them"):
        load_tokenizer(tmp_path)


def test_a_model_of_another_vocabulary_size_is_refused(tmp_path: Path) -> None:
    small_tokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.expect_vocab_size(600, origin="some model")
    with pytest.raises(
        ValueError, match=r"tokenizer.json: expected a tokenizer with 30522 tokens, for which some model"
    ):
        tokenizer.expect_vocab_size(30522, origin="some model")


def test_training_refuses_what_it_cannot_learn_from() -> None:
    with pytest.raises(TypeError, match="expected something to read twice"):
        train_tokenizer(iter(TOPICS), vocab_size=600)
    with pytest.raises(ValueError, match="expected at least 64, got 63"):
        train_tokenizer(TOPICS, vocab_size=63)
    with pytest.raises(ValueError, match="expected text to train a tokenizer on, got none"):
        train_tokenizer([" ", ""], vocab_size=600)


def test_rules_that_are_not_berts_go_to_transformers_as_they_are(tmp_path: Path) -> None:
    words = ["the", "cat", "café", "##s", "Cat", "cats,"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *words])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    ours.save(tmp_path / "saved")
    from transformers import AutoTokenizer  # takes seconds

    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("the Cat", "cats, café", "CAFÉ the cats"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode_batch([text])[0], text
