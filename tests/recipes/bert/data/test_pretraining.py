"""Samples are the windows of a stream, each token in one of them; masks repeat where they should."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpar.global_order import GlobalOrder
from recipes.bert.data.cache import TokenCache, build_cache
from recipes.bert.data.corpus import open_corpus
from recipes.bert.data.pretraining import Sequences, unigram_baseline
from tests.recipes.bert.data.texts import TOPICS, small_tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    folder = tmp_path_factory.mktemp("pretraining")
    for number, topic in enumerate(TOPICS[:12]):
        (folder / f"{number}.txt").write_text(topic)
    return build_cache(folder / "cache", open_corpus([folder]), small_tokenizer(), held_out=0.2, seed=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(length=st.integers(3, 700))
def test_the_windows_one_after_the_other_are_the_stream(cache: TokenCache, length: int) -> None:
    for name in ("train", "held_out"):
        sequences = Sequences(cache, name, length=length)
        stream = cache.stream(name).astype(np.int64)
        width = length - 2
        assert len(sequences) == -(-len(stream) // width)
        tokens = sequences.tokens(np.arange(len(sequences)))
        assert tokens.dtype == np.int64 and tokens.shape == (len(sequences), length)
        assert (tokens[:, 0] == 2).all()
        whole, last = tokens[:-1], tokens[-1]
        rest = len(stream) - width * (len(sequences) - 1)
        assert (whole[:, -1] == 3).all() and np.array_equal(whole[:, 1:-1].ravel(), stream[: width * len(whole)])
        assert np.array_equal(last, [2, *stream[-rest:], 3] + [0] * (width - rest))
        attended = sequences.attended(np.arange(len(sequences)))
        assert (attended[:-1] == 1).all() and np.array_equal(attended[-1], [1] * (rest + 2) + [0] * (width - rest))


def test_a_batch_is_the_same_whatever_else_is_in_it_and_on_any_number_of_ranks(cache: TokenCache) -> None:
    sequences, tokenizer = Sequences(cache, "train", length=32), small_tokenizer()
    indices, epochs = GlobalOrder(len(sequences), seed=4).take(len(sequences) - 10, 20)  # over the end of an epoch
    whole = sequences.batch(indices, epochs, seed=7, tokenizer=tokenizer)
    for ranks in (2, 3):
        edges = [20 * rank // ranks for rank in range(ranks + 1)]
        parts = [
            sequences.batch(indices[low:high], epochs[low:high], seed=7, tokenizer=tokenizer)
            for low, high in pairwise(edges)
        ]
        for field in range(3):
            assert torch.equal(torch.cat([part[field] for part in parts]), whole[field])
    assert all(tensor.dtype == torch.int64 and tensor.shape == (20, 32) for tensor in whole)
    chosen = whole.labels != -1
    tokens = torch.from_numpy(sequences.tokens(indices))
    assert torch.equal(whole.labels[chosen], tokens[chosen])
    assert torch.equal(whole.input_ids[~chosen], tokens[~chosen])
    assert torch.equal(whole.attention_mask, torch.from_numpy(sequences.attended(indices)))


def test_sequences_are_small_to_pickle_and_read_the_same(cache: TokenCache) -> None:
    sequences = Sequences(cache, "train", length=16)
    sequences.tokens(np.arange(3))
    content = pickle.dumps(sequences)
    assert len(content) < 1000
    again = pickle.loads(content)  # noqa: S301
    assert np.array_equal(again.tokens(np.arange(5)), sequences.tokens(np.arange(5)))


def test_the_unigram_baseline_is_the_smoothed_frequency(cache: TokenCache) -> None:
    stream = cache.stream("train").tolist()
    ordinary = [token for token in stream if token >= 5]
    probabilities = unigram_baseline(cache)
    assert probabilities.dtype == np.float64 and probabilities.shape == (600,)
    assert abs(probabilities.sum() - 1) < 1e-12
    for token in (*range(5), 5, 17, max(ordinary)):
        count = ordinary.count(token)
        assert probabilities[token] == pytest.approx((count + 1) / (len(ordinary) + 600), rel=1e-12)


def test_samples_that_are_not_there_are_refused(cache: TokenCache) -> None:
    sequences = Sequences(cache, "train", length=16)
    for index in (-1, len(sequences)):
        with pytest.raises(IndexError, match=rf"expected samples in \[0, {len(sequences)}\), got {index}"):
            sequences.tokens(np.array([index]))
    assert sequences.tokens(np.zeros(0, dtype=np.int64)).shape == (0, 16)
    with pytest.raises(ValueError, match="expected at least 3"):
        Sequences(cache, "train", length=2)


def test_nothing_held_out_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TOPICS[0])
    cache = build_cache(tmp_path / "cache", open_corpus([tmp_path]), small_tokenizer(), held_out=0, seed=0)
    assert len(Sequences(cache, "held_out", length=16)) == 0
