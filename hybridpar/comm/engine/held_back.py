"""The bucket that its caller sends itself.

# Note [held back]
The last bucket is often complete just before the caller comes to wait for the sums. Nothing is left then that a thread
of its track could hide, and waking that thread, and later the caller, maybe on another core with cold caches, costs a
millisecond. So where the caller came at once in the round before, and all other buckets have been exchanged, the bucket
is held back until it comes, and travels on the caller's thread. Each rank decides for itself: the others cannot see
which thread takes part in a collective.

What is held back keeps other ranks waiting, and the caller may be waiting for these meanwhile, in another engine or in
a collective that nobody here knows of. So in a process one bucket is held back at most; it goes to its track as soon as
any other bucket of this process is sent or waited for, and in any case within hundredths of a second: a thread looks
after what is held for longer. That thread lives while buckets are held back now and then.

There is no lock: whoever takes a bucket out of the queue, which is one step, answers for it. Handlers of signals and
finalizers may run in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

# Seconds between two looks of the thread, and looks without anything held after which it ends.
_LOOK, _IDLE_LOOKS = 0.01, 100


class Held(Protocol):
    def hand_over(self) -> None:
        """To its track. Raises nothing: what goes wrong is for whoever waits for the bucket."""


_held: deque[Held] = deque()
_watching = False


def hold(bucket: Held) -> None:
    """Hold a bucket back, instead of any other."""
    global _watching
    let_go()
    _held.append(bucket)
    if not _watching:
        _watching = True
        threading.Thread(target=_watch, name="hybridpar-held-back", daemon=True).start()


def let_go() -> None:
    """The caller does something else first: nothing is held back any longer."""
    while True:
        try:
            bucket = _held.popleft()
        except IndexError:
            return
        bucket.hand_over()


def take(bucket: Held) -> bool:
    """Whether this bucket was held back. The caller answers for it from now on."""
    try:
        _held.remove(bucket)
    except ValueError:
        return False
    return True


def _watch() -> None:
    """Hand over what was held at two looks, until nothing has been held for a while."""
    global _watching
    seen, idle = None, 0
    while True:
        time.sleep(_LOOK)
        held = next(iter(_held.copy()), None)
        if held is not None and held is seen and take(held):
            held.hand_over()
        seen, idle = held, 0 if held is not None else idle + 1
        if idle > _IDLE_LOOKS:
            # Whoever holds a bucket from here on starts another thread, or this one sees it.
            _watching = False
            if not _held:
                return
            _watching, idle = True, 0
