"""What an engine's plan is and how its last round went, as JSON can carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.rounds import BucketRound
from hybridpar.comm.timeline.trace import union


def report_of(plan: Plan, rounds: Sequence[BucketRound], count: int) -> dict[str, Any]:
    """The report of one rank.

    Args:
        count: how many rounds there were.

    Returns:
        ``plan`` and, in words, ``describe``; ``rounds`` so far; ``bytes``, what a rank hands to its lanes in a step;
        ``buckets`` in the order of sending, each with its ``track``, ``tensors``, ``values``, ``bytes``, ``dtype``, and
        for the last round ``ready``, ``begun``, ``packed`` and ``sent``, seconds after the first one was ready;
        ``tracks`` with the seconds that each spent to ``pack`` and to ``send``; ``busy``, seconds in which any of them
        did; ``waited``, seconds for which the caller stood still; and ``hidden``, the part of ``busy``, in [0, 1],
        during which it did not. On CUDA times are those of handing work over.
    """
    origin = min((current.times.ready for current in rounds), default=0.0)
    tracks: dict[int, dict[str, float]] = {}
    buckets = []
    for current in rounds:
        times, codec = current.times, current.codec
        track = tracks.setdefault(current.track.number, {"pack": 0.0, "send": 0.0})
        track["pack"] += times.packed - times.begun
        track["send"] += times.sent - times.packed
        buckets.append(
            {
                "track": current.track.number,
                "tensors": len(current.members),
                "values": codec.bucket.numel,
                "bytes": codec.nbytes,
                "dtype": str(current.dtype).removeprefix("torch."),
                **{name: getattr(times, name) - origin for name in ("ready", "begun", "packed", "sent") if count},
            }
        )
    intervals = union((round(1e9 * each.times.begun), round(1e9 * each.times.sent)) for each in rounds)
    busy = sum(end - begin for begin, end in intervals) / 1e9
    waited = sum(current.times.waited for current in rounds)
    return {
        "plan": plan.to_json(),
        "describe": plan.describe(),
        "rounds": count,
        "bytes": sum(current.codec.nbytes for current in rounds),
        "buckets": buckets,
        "tracks": [tracks[number] for number in sorted(tracks)],
        "busy": busy,
        "waited": waited,
        "hidden": max(0.0, 1.0 - waited / busy) if busy else 1.0,
    }
