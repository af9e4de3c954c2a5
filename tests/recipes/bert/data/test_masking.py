"""Whole words are masked, as many as the share allows, with BERT's odds, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.bert.data.masking import mask_batch
from tests.recipes.bert.data.texts import TOPICS, small_tokenizer

Int64Array = npt.NDArray[np.int64]


def words_of(row: list[int]) -> list[list[int]]:
    """The places of each word, in plain Python."""
    tokenizer = small_tokenizer()
    words: list[list[int]] = []
    before_special = True
    for place, token in enumerate(row):
        special = token in tokenizer.special_ids
        if not special and tokenizer.continues[token] and not before_special:
            words[-1].append(place)
        elif not special:
            words.append([place])
        before_special = special
    return words


def text_windows(length: int) -> Int64Array:
    """Real text, cut anywhere, with [CLS], [SEP] and padding at the last one: int64 [B, length]."""
    ids = [token for text in TOPICS[:12] for token in [*small_tokenizer().encode_batch([text])[0], 3]]
    rows = [[2, *ids[i : i + length - 2], 3] for i in range(0, len(ids), length - 2)]
    return np.array([row + [0] * (length - len(row)) for row in rows], dtype=np.int64)


def mask(tokens: Int64Array, epoch: int = 0, seed: int = 0, share: float = 0.15) -> tuple[Int64Array, Int64Array]:
    samples = np.arange(len(tokens), dtype=np.int64)
    epochs = np.full_like(samples, epoch)
    return mask_batch(tokens, samples, epochs, seed=seed, tokenizer=small_tokenizer(), share=share)


def check_row(row: list[int], inputs: list[int], labels: list[int], share: float) -> None:
    """What has to hold for one sample, by the definition."""
    tokenizer = small_tokenizer()
    chosen = {place for place, label in enumerate(labels) if label != -1}
    assert all(label in (-1, token) for label, token in zip(labels, row, strict=True))
    assert all(inputs[place] == row[place] for place in range(len(row)) if place not in chosen)
    assert all(inputs[place] not in {0, 1, 2, 3} for place in chosen)
    words = words_of(row)
    real = sum(map(len, words))
    if real == 0:
        assert not chosen
        return
    budget = max(1, round(share * real))
    assert 1 <= len(chosen) <= budget
    whole = [word for word in words if chosen.issuperset(word)]
    if chosen == {place for word in whole for place in word}:
        left = budget - len(chosen)
        assert all(len(word) > left for word in words if word not in whole)  # nothing else would have fitted
    else:
        assert min(map(len, words)) > budget
        assert any(chosen == set(word[:budget]) for word in words)
    assert tokenizer.pad_id == 0


rows_of_tokens = st.lists(
    st.one_of(st.integers(0, 599), st.sampled_from(np.flatnonzero(small_tokenizer().continues).tolist())),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150)
@given(rows=st.lists(rows_of_tokens, min_size=1, max_size=5), share=st.floats(0.01, 1), epoch=st.integers(0, 3))
def test_samples_of_any_tokens_keep_the_rules(rows: list[list[int]], share: float, epoch: int) -> None:
    length = max(map(len, rows))
    tokens = np.array([row + [0] * (length - len(row)) for row in rows], dtype=np.int64)
    before = tokens.copy()
    inputs, labels = mask(tokens, epoch=epoch, share=share)
    assert np.array_equal(tokens, before) and inputs.dtype == labels.dtype == np.int64
    for row in range(len(rows)):
        check_row(tokens[row].tolist(), inputs[row].tolist(), labels[row].tolist(), share)


@pytest.mark.parametrize("length", [3, 16, 128])
def test_windows_of_text_keep_the_rules(length: int) -> None:
    tokens = text_windows(length)[:300]
    inputs, labels = mask(tokens)
    for row in range(len(tokens)):
        check_row(tokens[row].tolist(), inputs[row].tolist(), labels[row].tolist(), 0.15)


@settings(max_examples=40)
@given(order=st.permutations(range(12)), count=st.integers(1, 12), extra=st.integers(0, 30))
def test_masks_depend_on_the_sample_alone(order: list[int], count: int, extra: int) -> None:
    tokens = text_windows(64)[:12]
    inputs, labels = mask(tokens, epoch=3, seed=9)
    chosen = np.array(order[:count], dtype=np.int64)
    wider = np.pad(tokens[chosen], ((0, 0), (0, extra)))
    again = mask_batch(wider, chosen, np.full_like(chosen, 3), seed=9, tokenizer=small_tokenizer())
    assert np.array_equal(again[0][:, :64], inputs[chosen]) and np.array_equal(again[1][:, :64], labels[chosen])


def test_seeds_epochs_and_samples_mask_independently() -> None:
    row = text_windows(128)[3]
    real = np.isin(row, small_tokenizer().ordinary_ids)
    tokens = np.tile(row, (200, 1))
    masks = [mask(tokens, epoch=epoch, seed=seed)[1] != -1 for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    share = masks[0].mean(axis=1).sum() / real.sum() * 128 / 200
    for one in range(4):
        for other in range(one):
            both = (masks[one] & masks[other]).sum() / (200 * real.sum())
            assert abs(both - share**2) < 0.01
    neighbours = (masks[0][1:] & masks[0][:-1]).sum() / (199 * real.sum())
    assert abs(neighbours - share**2) < 0.01


def test_every_word_is_chosen_as_often_as_any_other_of_its_size() -> None:
    row = np.array([2, *range(100, 120), 3], dtype=np.int64)  # twenty words of one token
    tokenizer = small_tokenizer()
    row = np.where(tokenizer.continues[row], tokenizer.ordinary_ids[~tokenizer.continues[5:]][7], row)
    counts = (mask(np.tile(row, (20_000, 1)))[1] != -1).sum(axis=0)
    assert counts[0] == counts[-1] == 0
    expected = 20_000 * 3 / 20
    statistic = ((counts[1:-1] - expected) ** 2 / expected).sum() / (1 - 3 / 20)
    assert statistic < 50  # chi-squared with 19 degrees of freedom: above with probability 0.0001


def test_eight_in_ten_are_masked_one_is_kept_and_one_is_random() -> None:
    tokens = np.tile(text_windows(128)[:60], (20, 1))
    inputs, labels = mask(tokens)
    chosen = labels != -1
    count = chosen.sum()
    masked = (inputs == small_tokenizer().mask_id)[chosen].mean()
    kept = (inputs == tokens)[chosen].mean()
    deviation = (0.8 * 0.2 / count) ** 0.5
    assert count > 20_000
    assert abs(masked - 0.8) < 5 * deviation
    assert abs(kept - (0.1 + 0.1 / 595)) < 5 * deviation
    random = inputs[chosen & (inputs != small_tokenizer().mask_id) & (inputs != tokens)]
    counts = np.bincount(random, minlength=600)
    assert counts[:5].sum() == 0 and (counts[5:] > 0).mean() > 0.9
    expected = len(random) / 595
    statistic = ((counts[5:] - expected) ** 2 / expected).sum()
    assert abs(statistic - 594) < 5 * (2 * 594) ** 0.5


def test_the_fate_of_each_token_of_a_word_is_its_own() -> None:
    tokens = np.tile(text_windows(128)[:60], (10, 1))
    inputs, labels = mask(tokens)
    second = small_tokenizer().continues[tokens] & (labels != -1)
    second[:, 1:] &= labels[:, :-1] != -1
    rows, columns = np.nonzero(second)
    masked = inputs == small_tokenizer().mask_id
    both = (masked[rows, columns] & masked[rows, columns - 1]).mean()
    assert len(rows) > 2000 and abs(both - 0.64) < 5 * (0.64 * 0.36 / len(rows)) ** 0.5


def test_no_samples_give_no_samples() -> None:
    inputs, labels = mask(np.zeros((0, 16), dtype=np.int64))
    assert inputs.shape == labels.shape == (0, 16)


def test_shares_and_shapes_that_make_no_sense_are_refused() -> None:
    tokens = text_windows(16)[:2]
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"expected a part of the tokens in \(0, 1\]"):
            mask(tokens, share=share)
    with pytest.raises(ValueError, match=r"got \[2, 16\], \[3\] and \[2\]"):
        mask_batch(tokens, np.arange(3), np.arange(2), seed=0, tokenizer=small_tokenizer())
