"""Recorded events as intervals, and as a Chrome trace.

# Note [what counts]
The row ``computation`` is what the rank's own thread does; a row ``lane ...`` is one communication thread. A span
called ``wait`` is time in which its row stands still, and ``pack``, ``send`` and ``unpack`` are communication on
whichever row, also within a longer span. So communication is the union of those three and of what lanes do besides
waiting; computation is what the row ``computation`` does besides those four. What both have in common is communication
hidden under computation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPUTATION = "computation"
LANE = "lane"
WAIT = "wait"
_SENDING = frozenset({"pack", "send", "unpack"})

Interval = tuple[int, int]


class Event(NamedTuple):
    """What happened on a row: from ``begin`` to ``end`` (nanoseconds of the recorder's clock), or at ``begin``."""

    name: str
    row: str
    begin: int
    end: int | None
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """Where the time of one rank went, in seconds. Note [what counts].

    Attributes:
        rank: whose time.
        computation, communication: seconds in which the rank computed, in which any of its lanes worked.
        hidden: seconds of communication during which the rank computed.
        names: seconds of all spans of each name, added up (lanes work side by side).
        dropped: events that were recorded but had to make room for later ones; they are not in the other figures.
    """

    rank: int
    computation: float
    communication: float
    hidden: float
    names: Mapping[str, float]
    dropped: int

    @property
    def hidden_share(self) -> float | None:
        """Part of communication that is hidden, in [0, 1]; None where there was none to hide."""
        return self.hidden / self.communication if self.communication else None

    def __str__(self) -> str:
        share = "none" if self.hidden_share is None else f"{self.hidden_share:.0%}"
        dropped = f"; {self.dropped} earlier events were dropped" if self.dropped else ""
        return (
            f"rank {self.rank}: {self.computation:.3f} s of computation, {self.communication:.3f} s of communication, "
            f"{share} of it hidden{dropped}"
        )


@dataclass(frozen=True)
class Recording:
    """The events of one rank, with what it takes to place them among others'.

    Attributes:
        rank, host: whose they are.
        events: in any order.
        dropped: as in ``Summary``.
        offset, error: nanoseconds to add to this clock to get that of the first recording, and how far that may be off.
    """

    rank: int
    host: str
    events: Sequence[Event]
    dropped: int = 0
    offset: int = 0
    error: int = 0


def summarize(rank: int, events: Iterable[Event], dropped: int = 0) -> Summary:
    """Note [what counts]. Instants do not count."""
    rows: dict[str, list[Event]] = {}
    names: dict[str, float] = {}
    for event in events:
        if event.end is not None:
            rows.setdefault(event.row, []).append(event)
            names[event.name] = names.get(event.name, 0.0) + (event.end - event.begin) / 1e9
    own = rows.get(COMPUTATION, [])
    sending = [span for span in own if span.name in _SENDING]
    computation = difference(_busy(own), _busy(sending))
    lanes = [spans for row, spans in rows.items() if row.split(" ")[0] == LANE]
    communication = union(interval for spans in [*lanes, sending] for interval in _busy(spans))
    return Summary(
        rank=rank,
        computation=_seconds(computation),
        communication=_seconds(communication),
        hidden=_seconds(intersection(computation, communication)),
        names=dict(sorted(names.items())),
        dropped=dropped,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common, as a union."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What only the first of two unions has, as a union."""
    if not first:
        return []
    # The complement of the second within the reach of the first.
    edges = [first[0][0], *(edge for interval in second for edge in interval), first[-1][1]]
    return intersection(first, [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2) if edges[i] < edges[i + 1]])


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The Trace Event Format (JSON object form), which Perfetto and chrome://tracing open.

    A process for each rank and a thread for each of its rows; spans are complete events ("X"), instants "i", in
    microseconds from the earliest event, sorted by time. Spans of one thread must nest, so spans of a row that overlap
    without nesting (several threads wrote them) go to a further thread, called as the row with a number.
    """
    begins = [event.begin + recording.offset for recording in recordings for event in recording.events]
    origin = min(begins, default=0)
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for recording in recordings:
        pid = recording.rank
        metadata.append(_metadata("process_name", pid, name=f"rank {recording.rank} ({recording.host})"))
        metadata.append(_metadata("process_sort_index", pid, sort_index=recording.rank))
        for tid, (row, nested) in enumerate(_threads(recording.events), start=1):
            metadata.append(_metadata("thread_name", pid, tid, name=row))
            metadata.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [_event(event, pid, tid, recording.offset - origin) for event in nested]
    # An outer span before the inner ones that begin with it.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "hybridpar",
            "dropped_events": {f"rank {each.rank}": each.dropped for each in recordings},
            "clock_error_us": {f"rank {each.rank}": each.error / 1e3 for each in recordings},
            "summary": [
                str(summarize(recording.rank, recording.events, recording.dropped)) for recording in recordings
            ],
        },
    }


def natural(row: str) -> tuple[object, ...]:
    """Sort key of rows: computation first, then by name, numbers by value."""
    words = [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", row)]
    return (row != COMPUTATION, words)


def _busy(spans: Sequence[Event]) -> list[Interval]:
    work = union((span.begin, span.end or span.begin) for span in spans if span.name != WAIT)
    waits = union((span.begin, span.end or span.begin) for span in spans if span.name == WAIT)
    return difference(work, waits)


def _seconds(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9


class _Thread:
    """Events of one row of which all spans nest; offered in order of their beginning, the longest first."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._open_ends: list[int] = []

    def take(self, event: Event) -> bool:
        """Add the event if it nests with those before it."""
        while self._open_ends and self._open_ends[-1] <= event.begin:
            self._open_ends.pop()
        end = event.begin if event.end is None else event.end
        if self._open_ends and end > self._open_ends[-1]:
            return False
        self.events.append(event)
        if event.end is not None:
            self._open_ends.append(end)
        return True


def _threads(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Rows in order, each as one or several threads in which all spans nest."""
    rows: dict[str, list[_Thread]] = {row: [] for row in sorted({event.row for event in events}, key=natural)}
    for event in sorted(events, key=lambda event: (event.begin, -(event.end or event.begin))):
        threads = rows[event.row]
        if not any(thread.take(event) for thread in threads):
            threads.append(_Thread())
            threads[-1].take(event)
    return [
        (f"{row} ({number})" if number > 1 else row, thread.events)
        for row, threads in rows.items()
        for number, thread in enumerate(threads, start=1)
    ]


def _metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _event(event: Event, pid: int, tid: int, shift: int) -> dict[str, Any]:
    # Whole nanoseconds as decimal fractions of microseconds: exact to 2**53, as text too.
    common = {"name": event.name, "cat": event.row, "pid": pid, "tid": tid, "args": dict(event.args)}
    timed = {**common, "ts": (event.begin + shift) / 1e3}
    if event.end is None:
        return {**timed, "ph": "i", "s": "t"}
    return {**timed, "ph": "X", "dur": (event.end - event.begin) / 1e3}
