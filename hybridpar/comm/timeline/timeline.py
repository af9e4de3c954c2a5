"""A timeline: what each thread of a rank did when, for Perfetto and for a summary.

# Note [recording is cheap]
A span costs two readings of the clock, one number and one append to a bounded deque: well below a microsecond, without
a lock, since the interpreter runs each of the three as one step. Everything else is done when the timeline is read.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hybridpar.comm.agreement import together
from hybridpar.comm.group import Group
from hybridpar.comm.timeline.clocks import clock_identity, clock_offset
from hybridpar.comm.timeline.trace import Event, Recording, Summary, chrome_trace, summarize

_LOG = logging.getLogger(__name__)

_Entry = tuple[int, str, str, int, "int | None", dict[str, Any]]


class Timeline:
    """Records spans and instants of any thread, the latest ``capacity`` of them.

    A row is what one thread does: ``computation``, or ``lane 0``, ``lane 1``, ... for communication threads. A span
    called ``wait`` is time in which the row stands still. Other names are free; ``timeline_plot`` has colours for
    forward, backward, optimizer, pack, send and unpack, and an instant ``step`` on ``computation`` begins a step.

    Args:
        rank: whose timeline this is.
        capacity: events kept; when more are recorded the earliest are dropped, which is counted and reported. One takes
            about 300 bytes.
        now: the clock, in nanoseconds.
        clock: text that is equal for ranks whose ``now`` is the same clock; None means that of this host.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        capacity: int = 1 << 16,
        now: Callable[[], int] = time.monotonic_ns,
        clock: str | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"expected room for at least one event, got capacity {capacity}")
        self.rank, self.capacity = rank, capacity
        self._now, self._clock = now, clock
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Timeline:
        """Itself: a copied module is recorded by the same timeline."""
        return self

    def span(self, name: str, /, *, row: str, **args: Any) -> AbstractContextManager[None]:
        """Record what happens within ``with``, also if it raises. ``args``, numbers or texts, are shown with it."""
        return _Span(self, name, row, args)

    def instant(self, name: str, /, *, row: str, **args: Any) -> None:
        """Record a point in time."""
        self._record((next(self._numbers), name, row, self._now(), None, args))

    def clear(self) -> None:
        """Forget everything, the count of dropped events too. Not while another thread is within a span."""
        self._numbers = itertools.count()
        self._entries: deque[_Entry] = deque(maxlen=self.capacity)
        self._record = self._entries.append

    def recording(self, host: str = "") -> Recording:
        """What has been recorded so far; spans that are still open are not in it."""
        entries = self._entries.copy()
        recorded = max((entry[0] for entry in entries), default=-1) + 1
        # A number that another thread has taken but not yet appended is not a drop.
        dropped = recorded - len(entries) if len(entries) == self.capacity else 0
        return Recording(self.rank, host, [Event(*entry[1:]) for entry in entries], dropped)

    def summary(self) -> Summary:
        """Where the recorded time of this rank went. ``print`` it, or read its attributes."""
        recording = self.recording()
        return summarize(self.rank, recording.events, recording.dropped)

    def save(self, path: str | Path, group: Group) -> None:
        """Collective: write the timelines of all ranks to ``path`` on rank 0, as a Chrome trace.

        Open it at ui.perfetto.dev or chrome://tracing. Clocks of different hosts are compared first; how well is under
        ``otherData`` in the file, with the number of dropped events. Call it between steps, from the thread that uses
        the group. ``json`` writes what it does not know in ``args`` as text.

        Raises:
            OSError: the file could not be written (on every rank).
            ValueError: two ranks have timelines of the same rank (on every rank).
        """
        clock = clock_identity() if self._clock is None else self._clock
        offset, error = clock_offset(group, self._now, clock)
        mine = self.recording(group.host)
        if mine.dropped:
            _LOG.warning(
                "rank %d: the timeline lacks its first %d events; make it with a capacity above %d to keep more",
                self.rank,
                mine.dropped,
                self.capacity,
            )
        texts = _gather_text(
            group, json.dumps([mine.rank, mine.host, mine.events, mine.dropped, offset, error], default=str)
        )
        together(group, lambda: _write(Path(path), texts) if group.rank == 0 else None)


class NoTimeline(Timeline):
    """A timeline that records nothing. ``save`` still takes part, so that ranks may differ in what they record."""

    def __init__(self, *, rank: int = 0) -> None:
        super().__init__(rank=rank, capacity=1)

    def span(self, name: str, /, *, row: str, **args: Any) -> AbstractContextManager[None]:
        """Nothing is recorded."""
        return _NO_SPAN

    def instant(self, name: str, /, *, row: str, **args: Any) -> None:
        """Nothing is recorded."""


class _Span(AbstractContextManager[None]):
    __slots__ = ("_args", "_begin", "_name", "_row", "_timeline")

    def __init__(self, timeline: Timeline, name: str, row: str, args: dict[str, Any]) -> None:
        self._timeline, self._name, self._row, self._args = timeline, name, row, args

    def __enter__(self) -> None:
        self._begin = self._timeline._now()

    def __exit__(self, *_: object) -> None:
        to = self._timeline
        to._record((next(to._numbers), self._name, self._row, self._begin, to._now(), self._args))


class _NoSpan(AbstractContextManager[None]):
    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        pass


_NO_SPAN = _NoSpan()


def _gather_text(group: Group, text: str) -> list[str]:
    """Collective: every rank's text, on rank 0; elsewhere nothing. Only rank 0 ever holds more than one of them."""
    mine = torch.frombuffer(bytearray(zlib.compress(text.encode(), 1)), dtype=torch.uint8)
    texts = []
    for root, size in enumerate(group.all_gather_json(len(mine))):
        data = mine if root == group.rank else torch.empty(size, dtype=torch.uint8)
        group.broadcast(data, root)
        if group.rank == 0:
            texts.append(zlib.decompress(data.numpy().tobytes()).decode())
    return texts


def _write(path: Path, texts: list[str]) -> None:
    recordings = []
    for text in texts:
        rank, host, events, dropped, offset, error = json.loads(text)
        recordings.append(Recording(rank, host, [Event(*event) for event in events], dropped, offset, error))
    ranks = [recording.rank for recording in recordings]
    if len(set(ranks)) < len(ranks):
        raise ValueError(
            f"expected timelines of different ranks, got {ranks}; make each with Timeline(rank=group.rank)"
        )
    path.write_text(json.dumps(chrome_trace(recordings)))
