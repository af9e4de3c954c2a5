"""The bucket that its caller sends itself.

# Note [held back]
The last bucket is often complete just before the caller comes to wait for the sums. Nothing is left then that a thread
of its track could hide, and waking that thread, and later the caller, maybe on another core with cold caches, costs a
millisecond. So where the caller came at once in the round before, and all other buckets have been exchanged, the bucket
is held back until it comes, and travels on the caller's thread. Each rank decides for itself: the others cannot see
which thread takes part in a collective.

What is held back keeps other ranks waiting. If the ranks come to wait for several engines in different orders, each
could hold back what another one waits for. So in a process one bucket is held back at most, and it goes to its track as
soon as any other bucket of this process is sent or waited for.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Held(Protocol):
    def hand_over(self) -> None:
        """To its track."""


_LOCK = threading.Lock()
_held: weakref.ref[Held] | None = None


def hold(bucket: Held) -> None:
    """Hold a bucket back, instead of any other."""
    global _held
    with _LOCK:
        _hand_over()
        _held = weakref.ref(bucket)


def let_go() -> None:
    """The caller does something else first: nothing is held back any longer."""
    with _LOCK:
        _hand_over()


def take(bucket: Held) -> bool:
    """Whether this bucket was held back. The caller answers for it from now on."""
    global _held
    with _LOCK:
        if _held is None or _held() is not bucket:
            return False
        _held = None
        return True


def _hand_over() -> None:
    global _held
    bucket, _held = None if _held is None else _held(), None
    if bucket is not None:
        bucket.hand_over()
