"""Which tokens are masked, and by what: whole words, as a pure function of seed, epoch and sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recipes.bert.data.tokenizer import WordPiece
from recipes.common.hashing import hash_counters, uniform

IGNORED = -1
"""Label of tokens that are not to be predicted."""

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MASKED, _KEPT = 0.8, 0.1
# What the random numbers are for; each has its own.
_ORDER, _FATE, _REPLACEMENT = 1, 2, 3


def mask_batch(
    tokens: Int64Array,
    samples: Int64Array,
    epochs: Int64Array,
    *,
    seed: int,
    tokenizer: WordPiece,
    share: float = 0.15,
) -> tuple[Int64Array, Int64Array]:
    """Mask whole words as BERT does (Devlin et al., 2019, section 3.1; whole words as in Google's
    create_pretraining_data.py with --do_whole_word_mask).

    Words come in random order, and one is masked if it still fits into the budget of max(1, round(share * n)) tokens,
    n being the tokens of the sample that are not special. Where no word at all fits, the first so many tokens of one of
    them are. Each token of a masked word is replaced by [MASK] with probability 0.8, by a random token that is not
    special with probability 0.1, and stays as it is with probability 0.1. A token that begins with ## belongs to the
    word before it, unless that is outside the sample.

    The result for a sample depends on seed, epoch, sample number and its tokens alone, not on the rest of the batch.

    Args:
        tokens: int64 [B, T], with special tokens and padding.
        samples: int64 [B], the numbers of the samples.
        epochs: int64 [B].
        seed: of the run.
        tokenizer: that made the tokens.
        share: of the tokens to be predicted, in (0, 1].

    Returns:
        inputs: int64 [B, T].
        labels: int64 [B, T], the token where it is to be predicted, -1 elsewhere.

    Raises:
        ValueError: a share outside (0, 1], or shapes that do not fit.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share: expected a part of the tokens in (0, 1], got {share}")
    if tokens.ndim != 2 or samples.shape != tokens.shape[:1] or epochs.shape != tokens.shape[:1]:
        raise ValueError(
            f"expected tokens [B, T] with samples [B] and epochs [B], got {list(tokens.shape)}, {list(samples.shape)} "
            f"and {list(epochs.shape)}"
        )
    chosen = _choose(tokens, samples, epochs, seed, tokenizer, share)
    rows, columns = np.nonzero(chosen)
    originals = tokens[rows, columns]
    counters = (epochs[rows], samples[rows], columns.astype(np.int64))
    fate = uniform(seed, _FATE, *counters)
    drawn = hash_counters(seed, _REPLACEMENT, *counters) % np.uint64(len(tokenizer.ordinary_ids))
    replaced = np.where(
        fate < _MASKED,
        tokenizer.mask_id,
        np.where(fate < _MASKED + _KEPT, originals, tokenizer.ordinary_ids[drawn.astype(np.int64)]),
    )
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED)
    inputs[rows, columns] = replaced
    labels[rows, columns] = originals
    return inputs, labels


def _choose(
    tokens: Int64Array, samples: Int64Array, epochs: Int64Array, seed: int, tokenizer: WordPiece, share: float
) -> BoolArray:
    """The tokens to be predicted: bool [B, T]."""
    batch, length = tokens.shape
    real = ~_is_special(tokenizer)[tokens]
    begins = real & ~(tokenizer.continues[tokens] & _shifted(real))
    # Number of the word that a token belongs to, or the one before; -1 before the first.
    words = np.cumsum(begins, axis=1) - 1
    places = np.broadcast_to(np.arange(length), tokens.shape)
    most = int(words.max(initial=-1)) + 1
    if most == 0:
        return real
    # [B, most]: size of each word, and its place in the random order. Words that are not there have size 0.
    rows = np.broadcast_to(np.arange(batch)[:, None], tokens.shape)
    sizes = np.bincount((rows * most + words)[real], minlength=batch * most).reshape(batch, most)
    keys = hash_counters(seed, _ORDER, epochs[:, None], samples[:, None], np.arange(most)[None, :])
    order = np.argsort(np.where(sizes > 0, keys, np.uint64(0xFFFF_FFFF_FFFF_FFFF)), axis=1, kind="stable")
    counts = real.sum(axis=1)
    budgets = np.where(counts > 0, np.maximum(1, np.rint(share * counts).astype(np.int64)), 0)
    taken = _take_in_order(np.take_along_axis(sizes, order, axis=1), budgets)
    masked = np.zeros((batch, most), dtype=np.bool_)
    np.put_along_axis(masked, order, taken, axis=1)
    chosen: BoolArray = real & np.take_along_axis(masked, np.maximum(words, 0), axis=1)
    if (none := (counts > 0) & ~taken.any(axis=1)).any():
        starts = np.argmax(begins & (words == order[:, :1]), axis=1)[:, None]
        chosen |= none[:, None] & (places >= starts) & (places < starts + budgets[:, None])
    return chosen


def _take_in_order(sizes: Int64Array, budgets: Int64Array) -> BoolArray:
    """Which words [B, words] fit, one after the other, into what the ones before have left of the budgets [B]."""
    taken = np.zeros(sizes.shape, dtype=np.bool_)
    left = budgets.copy()
    for place in range(sizes.shape[1]):
        if not left.any():
            break
        size = sizes[:, place]
        taken[:, place] = fits = (size > 0) & (size <= left)
        left -= size * fits
    return taken


def _is_special(tokenizer: WordPiece) -> BoolArray:
    special = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    special[list(tokenizer.special_ids)] = True
    return special


def _shifted(values: BoolArray) -> BoolArray:
    """Each column holds the one before it."""
    before = np.zeros_like(values)
    before[:, 1:] = values[:, :-1]
    return before
