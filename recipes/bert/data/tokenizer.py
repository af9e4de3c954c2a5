"""WordPiece tokenizers: trained on text, or read from files; saved as `transformers` loads them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In the order of their ids in trained tokenizers: 0 to 4."""

CONTINUES = "##"
"""What tokens begin with that go on with a word."""

_LONGEST_WORD = 100  # characters; longer words are [UNK], as in BERT's own tokenizer
_LARGEST_ALPHABET = 1000
_FEWEST = 2  # times that a pair has to occur to be merged
_FILE, _VOCABULARY, _CONFIG = "tokenizer.json", "vocab.txt", "tokenizer_config.json"

Int64Array = npt.NDArray[np.int64]


class WordPiece:
    """Text to token ids. May be pickled, and used after a fork.

    Args:
        inner: the tokenizer of the library `tokenizers`; from now on it belongs to this object.
        origin: names it in messages.

    Attributes:
        vocab_size: V; ids are in [0, V).
        pad_id, unk_id, cls_id, sep_id, mask_id: of the special tokens.
        special_ids: the five, ascending.
        ordinary_ids: int64, ascending: all other ids that have a token.
        continues: bool [V], True for tokens that go on with the word of the token before (they begin with ##).
        whole_words: whether `continues` is known. Where the model is no WordPiece, or has no prefix, it is False
            everywhere, so every token counts as a word, and a warning says so.
        lowercase: whether text is made lower case.
        fingerprint: sha256 of everything that decides about the ids.

    Raises:
        ValueError: special tokens are missing.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, origin: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self._origin = inner, origin
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
            raise ValueError(
                f"{origin}: expected a tokenizer with the special tokens {', '.join(SPECIAL_TOKENS)}, "
                f"got one without {', '.join(missing)}; add them to its vocabulary, or train one on your text"
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (vocabulary[t] for t in SPECIAL_TOKENS)
        self.special_ids = tuple(sorted(vocabulary[token] for token in SPECIAL_TOKENS))
        used = np.fromiter(vocabulary.values(), dtype=np.int64, count=len(vocabulary))
        self.ordinary_ids: Int64Array = np.setdiff1d(used, self.special_ids)
        prefix = inner.model.continuing_subword_prefix if isinstance(inner.model, models.WordPiece) else ""
        self.whole_words = prefix != ""
        self.continues: npt.NDArray[np.bool_] = np.zeros(self.vocab_size, dtype=np.bool_)
        if self.whole_words:
            self.continues[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = True
        else:
            logging.getLogger("hybridpar").warning(
                "%s: this %s tokenizer does not mark which tokens go on with a word, as ## does: single tokens are "
                "masked instead of whole words",
                origin,
                type(inner.model).__name__,
            )
        content = json.loads(inner.to_str())
        self.lowercase = _lowercases(content["normalizer"])
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around them and whole."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | Int64Array) -> str:
        """The text of some ids, special tokens left out."""
        return str(self._inner.decode([int(number) for number in ids]))

    def tokens(self, ids: Sequence[int] | Int64Array) -> list[str]:
        """The token of each id, as it is in the vocabulary."""
        return [self._inner.id_to_token(int(number)) or "" for number in ids]

    def expect_vocab_size(self, size: int, *, origin: str) -> None:
        """Raises ValueError unless the vocabulary has the size that ``origin``, a model, was made for."""
        if self.vocab_size != size:
            raise ValueError(
                f"{self._origin}: expected a tokenizer with {size} tokens, for which {origin} was made, got "
                f"{self.vocab_size}; use the tokenizer that was saved with it, or begin with a new model"
            )

    def save(self, folder: Path, *, longest: int | None = None) -> None:
        """Write what `transformers.AutoTokenizer` loads: tokenizer.json, its settings and, for WordPiece, vocab.txt.

        Args:
            folder: made if missing.
            longest: tokens that the model takes, to which `transformers` truncates where it is asked to; None: any.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._inner.save(str(folder / _FILE))
        names = dict(
            zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
        )
        settings: dict[str, object] = {"tokenizer_class": self._kind(), "do_lower_case": self.lowercase} | names
        if longest is not None:
            settings["model_max_length"] = longest
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        if self.whole_words:
            tokens = [self._inner.id_to_token(number) or "" for number in range(self.vocab_size)]
            (folder / _VOCABULARY).write_text("".join(f"{token}\n" for token in tokens), "utf-8")

    def _kind(self) -> str:
        """Which class of `transformers` does the same: one of them puts BERT's own rules in the place of others."""
        content = json.loads(self._inner.to_str())
        parts = [(content[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer")]
        berts = self.whole_words and parts == ["BertNormalizer", "BertPreTokenizer"]
        return "BertTokenizer" if berts else "PreTrainedTokenizerFast"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, lowercase: bool = True) -> WordPiece:
    """Train WordPiece as BERT uses it. Equal text gives equal ids, in every process.

    Args:
        texts: to learn from; read twice, as a stream: a corpus or a list, not an iterator.
        vocab_size: V, at least 64. Fewer tokens come out where the text has no more pairs to merge.
        lowercase: whether text is made lower case, and accents are removed with it, as in "uncased" models.

    Raises:
        TypeError: an iterator, which cannot be read twice.
        ValueError: a vocabulary too small, or no text.
    """
    if isinstance(texts, Iterator):
        raise TypeError(f"texts: expected something to read twice, as a corpus or a list, got {type(texts).__name__}")
    if vocab_size < 64:
        raise ValueError(f"vocab_size: expected at least 64, got {vocab_size}")
    inner = _untrained(models.WordPiece(unk_token="[UNK]"), lowercase=lowercase)
    alphabet = _alphabet(texts, inner.normalizer, largest=min(_LARGEST_ALPHABET, vocab_size // 4))
    # Note [equal ids in every process]
    # The trainer counts words in a hash table with a random order, numbers the pieces "##x" as it comes across them,
    # and decides between pairs that are equally frequent by these numbers: tokens differ from run to run. Pieces that
    # are given as special tokens have their numbers before. A second tokenizer, with the vocabulary alone, is what is
    # kept, for special tokens are also cut out of text before it is split into words.
    pieces = [*SPECIAL_TOKENS, *alphabet, *(CONTINUES + character for character in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_FEWEST,
        show_progress=False,
        special_tokens=pieces,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    inner.train_from_iterator(iter(texts), trainer)
    return _from_vocabulary(inner.get_vocab(), lowercase=lowercase, origin="trained tokenizer")


def load_tokenizer(path: Path) -> WordPiece:
    """Read a tokenizer.json, a vocab.txt with one token a line, or a folder that holds either.

    A vocab.txt does not say whether text is made lower case: the tokenizer_config.json beside it does; without one it
    is unless some token has an upper-case letter.

    Raises:
        ValueError: no such file, not a tokenizer, or one without BERT's special tokens.
    """
    if path.is_dir():
        candidates = [path / _FILE, path / _VOCABULARY]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise ValueError(f"{path}: expected a folder with {_FILE} or {_VOCABULARY}, got neither")
        path = found
    if not path.is_file():
        raise ValueError(f"{path}: expected a {_FILE}, a {_VOCABULARY} or a folder with either, got nothing there")
    return _load_vocabulary(path) if path.suffix == ".txt" else _load_json(path)


def _load_json(path: Path) -> WordPiece:
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: expected a tokenizer as `tokenizers` saves it, got: {error}") from error
    return WordPiece(inner, origin=str(path))


def _load_vocabulary(path: Path) -> WordPiece:
    try:
        tokens = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected one token a line in UTF-8, got {error}") from error
    tokens = [token.rstrip("\r") for token in tokens]
    if tokens[-1] == "":
        tokens.pop()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        repeated, count = Counter(tokens).most_common(1)[0]
        raise ValueError(f'{path}: expected every token once, got "{repeated}" {count} times')
    lowercase = not any(token != token.lower() for token in tokens if not _is_bracketed(token))
    config = path.with_name(_CONFIG)
    if config.is_file():
        try:
            lowercase = bool(json.loads(config.read_text("utf-8")).get("do_lower_case", lowercase))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{config}: expected a JSON object, got: {error}") from error
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        raise ValueError(
            f"{path}: expected a BERT vocabulary, one token a line, got {len(tokens)} lines without "
            f"{', '.join(missing)}"
        )
    return _from_vocabulary(vocabulary, lowercase=lowercase, origin=str(path))


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _from_vocabulary(vocabulary: dict[str, int], *, lowercase: bool, origin: str) -> WordPiece:
    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    inner = _untrained(model, lowercase=lowercase)
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    inner.decoder = decoders.WordPiece(prefix=CONTINUES)
    return WordPiece(inner, origin=origin)


def _untrained(model: models.WordPiece, *, lowercase: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return inner


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer, *, largest: int) -> list[str]:
    """The most frequent characters of the text, by code point; of equally frequent ones those with the lower."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    ordered = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    if not ordered:
        raise ValueError("expected text to train a tokenizer on, got none")
    return sorted(character for _, character in ordered[:largest])


def _lowercases(normalizer: object) -> bool:
    """Whether a normalizer, as it is in tokenizer.json, or a part of it makes lower case."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(part) for part in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or normalizer.get("lowercase") is True
