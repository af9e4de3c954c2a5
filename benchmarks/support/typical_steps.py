"""Those steps of a timeline that took as long as most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any


def typical(trace: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The part of a trace with those steps of rank 0, so many in a row, whose length is nearest to the median."""
    events = [event for event in trace["traceEvents"] if event["ph"] in {"X", "i"} and event["pid"] == 0]
    marks = [event["ts"] for event in events if event["ph"] == "i" and event["name"] == "step"]
    parts = list(zip(marks, marks[steps:], strict=False))
    middle = statistics.median(end - begin for begin, end in parts)
    left, right = min(parts, key=lambda part: abs(part[1] - part[0] - middle))
    kept = []
    for event in events:
        begin, end = max(event["ts"], left), min(event["ts"] + event.get("dur", 0.0), right)
        if event["ph"] == "i" and left <= event["ts"] < right:
            kept.append(event)
        elif begin < end:
            kept.append({**event, "ts": begin, "dur": end - begin})
    return {"traceEvents": kept}
