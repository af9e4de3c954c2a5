"""Samples for masked-language modelling: windows of a stream of tokens, with some words masked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.bert.data.cache import Stream, TokenCache
from recipes.bert.data.masking import mask_batch
from recipes.bert.data.tokenizer import WordPiece

HELD_OUT_SEED = 0x4E1D
"""Masks of held-out samples are the same in all runs, whatever their seed, so that their figures can be compared."""

Int64Array = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """B samples of T tokens.

    Attributes:
        input_ids: int64 [B, T], masked.
        attention_mask: int64 [B, T], 0 at padding and 1 elsewhere.
        labels: int64 [B, T], the token where one is to be predicted, -1 elsewhere.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Sequences:
    """The samples of one stream: sample i is window i of ``length - 2`` tokens between [CLS] and [SEP].

    The last window may be shorter and is padded. Windows do not overlap; they may span documents, which [SEP]
    separates.

    Args:
        cache: the tokens.
        stream: "train" or "held_out".
        length: T, tokens of a sample, at least 3.

    Raises:
        ValueError: a length below 3.
    """

    def __init__(self, cache: TokenCache, stream: Stream, *, length: int) -> None:
        if length < 3:
            raise ValueError(f"length: expected at least 3, for [CLS], one token and [SEP], got {length}")
        self.cache, self.name, self.length = cache, stream, length

    def __len__(self) -> int:
        return -(-len(self.cache.stream(self.name)) // (self.length - 2))

    def tokens(self, indices: Int64Array) -> Int64Array:
        """Samples by number, not masked: int64 [B, T].

        Raises:
            IndexError: a number outside [0, len(self)).
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"expected samples in [0, {len(self)}), got {int(indices.min())} .. {int(indices.max())}")
        stream, special = self.cache.stream(self.name), self.cache.special_ids
        width = self.length - 2
        places = indices[:, None] * width + np.arange(width)
        inside = places < len(stream)
        result = np.full((len(indices), self.length), special["pad"], dtype=np.int64)
        result[:, 0] = special["cls"]
        result[:, 1:-1][inside] = stream[places[inside]]
        result[np.arange(len(indices)), 1 + inside.sum(axis=1)] = special["sep"]
        return result

    def attended(self, indices: Int64Array) -> Int64Array:
        """1 at the tokens of samples, 0 at their padding: int64 [B, T]."""
        width = self.length - 2
        lengths = np.minimum(len(self.cache.stream(self.name)) - indices * width, width) + 2
        return (np.arange(self.length) < lengths[:, None]).astype(np.int64)

    def batch(
        self, indices: Int64Array, epochs: Int64Array, *, seed: int, tokenizer: WordPiece, share: float = 0.15
    ) -> Batch:
        """Samples by number, masked as the epochs, int64 [B], say. See `mask_batch`."""
        tokens = self.tokens(indices)
        inputs, labels = mask_batch(tokens, indices, epochs, seed=seed, tokenizer=tokenizer, share=share)
        return Batch(*(torch.from_numpy(array) for array in (inputs, self.attended(indices), labels)))


def unigram_baseline(cache: TokenCache) -> npt.NDArray[np.float64]:
    """Probability of each token whatever its context, from the stream to train on: float64 [V].

    Counts plus one, divided by their sum, so that tokens that occur only in held-out text have a probability too.
    Special tokens are never to be predicted and count as if they did not occur.
    """
    counts = cache.counts() + 1.0
    return np.asarray(counts / counts.sum(), dtype=np.float64)
