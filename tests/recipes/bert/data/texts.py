"""Text that tests learn from, and a small tokenizer of it."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

from recipes.bert.data.tokenizer import WordPiece, train_tokenizer

TOPICS = [text for _, text in sorted(topics.items())]
"""English texts that come with Python."""


@cache
def small_tokenizer() -> WordPiece:
    """600 tokens, so that words have many pieces."""
    return train_tokenizer(TOPICS[:40], vocab_size=600)
