"""Timelines: what is recorded, what it adds up to, and the file that Perfetto opens."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridpar as hp
from hybridpar.comm.timeline import plot as timeline_plot
from hybridpar.comm.timeline.clocks import clock_identity, clock_offset, offset_bounds
from hybridpar.comm.timeline.timeline import NoTimeline, Timeline
from hybridpar.comm.timeline.trace import (
    Event,
    Recording,
    chrome_trace,
    difference,
    intersection,
    natural,
    summarize,
    union,
)
from tests.ranks import run_threads

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: (min(ends), max(ends))))


def points(of: list[tuple[int, int]]) -> set[int]:
    return {point for begin, end in of for point in range(begin, end)}


def check_trace(trace: dict[str, Any]) -> None:
    """The facts of the Trace Event Format that viewers rely on."""
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    times: list[float] = []
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        pid, tid = event["pid"], event["tid"]
        assert isinstance(pid, int)
        assert isinstance(tid, int)
        if event["ph"] == "M":
            kind = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert isinstance(event["args"][kind], int if kind == "sort_index" else str)
            assert event["name"].removesuffix("_sort_index").removesuffix("_name") in {"process", "thread"}
            named.setdefault(event["name"], set()).add((pid, tid))
            continue
        assert isinstance(event["ts"], float)
        assert isinstance(event["cat"], str)
        assert (pid, 0) in named["process_name"]
        assert (pid, tid) in named["thread_name"]
        times.append(event["ts"])
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            # Viewers count in whole nanoseconds too.
            begin, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            spans.setdefault((pid, tid), []).append((begin, begin + length))
    assert times == sorted(times)
    assert not times or times[0] == 0
    for of_thread in spans.values():
        for (begin, end), (later, its_end) in itertools.combinations(of_thread, 2):
            assert later >= end or its_end <= end, ((begin, end), (later, its_end))


def ticking(start: int = 0) -> Callable[[], int]:
    """A clock that says one nanosecond more each time."""
    return itertools.count(start).__next__


def test_spans_nest_and_keep_their_arguments() -> None:
    timeline = Timeline(rank=3, now=ticking(100))
    with timeline.span("outer", row="lane 0", bucket=1), timeline.span("inner", row="lane 0"):
        timeline.instant("now", row="lane 0", name="free", row_="too")
    assert list(timeline.recording("host").events) == [
        Event("now", "lane 0", 102, None, {"name": "free", "row_": "too"}),
        Event("inner", "lane 0", 101, 103, {}),
        Event("outer", "lane 0", 100, 104, {"bucket": 1}),
    ]


def test_a_span_that_raises_is_recorded_and_the_error_goes_on() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("send", row="lane 0"):
        raise KeyError
    assert [event.name for event in timeline.recording().events] == ["send"]


def test_the_latest_events_are_kept_and_the_others_counted(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    timeline = Timeline(capacity=3)
    for number in range(10):
        timeline.instant(f"{number}", row="lane 0")
    assert [event.name for event in timeline.recording().events] == ["7", "8", "9"]
    assert timeline.recording().dropped == timeline.summary().dropped == 7
    assert "7 earlier events were dropped" in str(timeline.summary())
    with caplog.at_level(logging.WARNING, "hybridpar"):
        timeline.save(tmp_path / "trace.json", hp.Group.alone())
    assert "lacks its first 7 events" in caplog.text
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_events"] == {"rank 0": 7}
    timeline.clear()
    assert timeline.recording() == Recording(0, "", [])
    with pytest.raises(ValueError, match="at least one event, got capacity 0"):
        Timeline(capacity=0)


def test_threads_record_at_once_and_nothing_is_lost() -> None:
    timeline = Timeline(capacity=4 * 500)
    start = threading.Barrier(5)

    def work(row: str) -> None:
        start.wait(10)
        for number in range(500):
            with timeline.span("send", row=row, number=number):
                pass

    threads = [threading.Thread(target=work, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait(10)
    for _ in range(20):
        timeline.summary()
    for thread in threads:
        thread.join()
    recording = timeline.recording()
    assert recording.dropped == 0
    for i in range(4):
        mine = [event for event in recording.events if event.row == f"lane {i}"]
        assert [event.args["number"] for event in mine] == list(range(500))
    check_trace(chrome_trace([recording]))


def test_what_is_off_records_nothing_but_saves_with_the_others(tmp_path: Path) -> None:
    off = NoTimeline()
    with off.span("send", row="lane 0", bucket=1):
        off.instant("step", row="computation")
    assert off.recording() == Recording(0, "", [])
    assert off.summary().hidden_share is None

    def work(group: hp.Group) -> None:
        timeline = Timeline(rank=0) if group.rank == 0 else NoTimeline(rank=1)
        with timeline.span("send", row="lane 0"):
            pass
        timeline.save(tmp_path / "trace.json", group)

    run_threads(2, work)
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    assert [event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"] == [0]


def test_seconds_are_those_counted_by_hand() -> None:
    def span(name: str, row: str, begin: float, end: float) -> Event:
        return Event(name, row, int(begin * 1e9), int(end * 1e9), {})

    summary = summarize(
        2,
        [
            Event("step", "computation", 0, None, {}),
            span("step", "computation", 0, 10),
            span("forward", "computation", 0, 3),
            span("backward", "computation", 3, 7),
            span("wait", "computation", 7, 9),  # stands still within the step
            span("unpack", "computation", 9, 9.5),  # communication, within the step too
            span("optimizer", "computation", 9.5, 10),
            span("send", "lane 0", 4, 6),
            span("send", "lane 1", 5, 8),
            span("wait", "lane 0", 6, 8),  # no work of its own, but lane 1 works
            span("unpack", "lane 0", 8, 8.5),
            span("copy", "disk", 0, 10),  # neither
        ],
    )
    assert (summary.computation, summary.communication, summary.hidden) == (7.5, 5.0, 3.0)
    assert summary.hidden_share == pytest.approx(3 / 5)
    assert summary.names["send"] == 5
    assert summary.names["wait"] == 4
    assert str(summary) == "rank 2: 7.500 s of computation, 5.000 s of communication, 60% of it hidden"


@given(intervals, intervals)
def test_intervals_are_sets_of_points(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, two = union(first), union(second)
    assert points(one) == points(first)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(one))
    assert points(intersection(one, two)) == points(first) & points(second)
    assert points(difference(one, two)) == points(first) - points(second)


@given(st.lists(st.tuples(st.sampled_from(["lane 0", "computation"]), st.integers(0, 20), st.integers(0, 20))))
def test_spans_that_overlap_get_threads_in_which_they_nest(given_spans: list[tuple[str, int, int]]) -> None:
    events = [Event("send", row, begin, begin + length, {}) for row, begin, length in given_spans]
    trace = chrome_trace([Recording(0, "a", events)])
    check_trace(trace)
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    origin = min((begin for _, begin, _ in given_spans), default=0)
    assert sorted((event["cat"], event["ts"], event["dur"]) for event in found) == sorted(
        (row, (begin - origin) / 1e3, length / 1e3) for row, begin, length in given_spans
    )


def test_rows_stand_in_order_computation_first() -> None:
    rows = ["lane 10", "wires", "lane 2", "computation", "lane 2 (2)", "7", "lane 1"]
    assert sorted(rows, key=natural) == ["computation", "7", "lane 1", "lane 2", "lane 2 (2)", "lane 10", "wires"]


def test_ranks_meet_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def work(group: hp.Group) -> None:
        timeline = Timeline(rank=group.rank)
        group.barrier()
        for step in range(2):
            timeline.instant("step", row="computation", step=step)
            with timeline.span("backward", row="computation"):
                lane = threading.Thread(target=send, args=(timeline,))
                lane.start()
                lane.join()
        timeline.save(path, group)

    def send(timeline: Timeline) -> None:
        with timeline.span("pack", row="lane 0", bucket=0, bytes=128), timeline.span("copy", row="lane 0"):
            time.sleep(0.001)
        with timeline.span("send", row="lane 0", bucket=0, shape=Path("not JSON")):
            time.sleep(0.001)

    run_threads(3, work)
    trace = json.loads(path.read_text())
    check_trace(trace)
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in metadata if "name" in event["args"]}
    host = hp.Group.alone().host
    for rank in range(3):
        assert names[rank, 0] == f"rank {rank} ({host})"
        assert [names[rank, 1], names[rank, 2]] == ["computation", "lane 0"]
        mine = [event for event in trace["traceEvents"] if event["pid"] == rank and event["ph"] != "M"]
        assert [event["name"] for event in mine] == ["step", "backward", "pack", "copy", "send"] * 2
        assert mine[2]["args"] == {"bucket": 0, "bytes": 128}
        assert mine[4]["args"]["shape"] == "not JSON"
        # Two sleeps of a millisecond in each of two steps.
        assert sum(event["dur"] for event in mine if event["name"] == "backward") >= 4000
    assert trace["otherData"]["clock_error_us"] == {"rank 0": 0, "rank 1": 0, "rank 2": 0}


def test_ranks_that_claim_one_rank_are_refused_everywhere(tmp_path: Path) -> None:
    def work(group: hp.Group) -> None:
        with pytest.raises(ValueError, match=r"different ranks, got \[0, 0\]"):
            Timeline().save(tmp_path / "trace.json", group)
        with pytest.raises(OSError, match="No such file"):
            Timeline(rank=group.rank).save(tmp_path / "missing" / "trace.json", group)

    run_threads(2, work)
    assert list(tmp_path.iterdir()) == []


def test_clocks_of_other_hosts_are_found_within_the_stated_error(tmp_path: Path) -> None:
    skews = [5_000_000_000, 5_000_000_000, -70_000_000_000, 3, 3]

    def work(group: hp.Group) -> tuple[int, int]:
        skew = skews[group.rank]

        def now() -> int:
            return time.monotonic_ns() + skew

        timeline = Timeline(rank=group.rank, now=now, clock=f"clock {skew}")
        group.barrier()
        timeline.instant("met", row="computation")
        timeline.save(tmp_path / "trace.json", group)
        return clock_offset(group, now, f"clock {skew}")

    for skew, (offset, error) in zip(skews, run_threads(5, work), strict=True):
        assert abs(offset - (skews[0] - skew)) <= error
        assert error < 0.5e9
        assert (error == 0) == (skew == skews[0])
    trace = json.loads((tmp_path / "trace.json").read_text())
    met = [event["ts"] for event in trace["traceEvents"] if event["name"] == "met"]
    errors = trace["otherData"]["clock_error_us"]
    assert list(errors) == [f"rank {rank}" for rank in range(5)]
    # Seventy seconds apart by their own clocks; a moment apart in truth.
    assert len(met) == 5
    assert 0 <= min(met) <= max(met) < 1e6


def test_barriers_bound_an_offset_from_both_sides() -> None:
    # Our clock is 100 behind theirs. In the first barrier we came last, by 50, in the second they did; it took 4 to 6.
    theirs = [[(1000, 1054), (2050, 2054)]]
    ours = [[(950, 955), (1900, 1956)]]
    # 2050 - 1956 = 94 and 1054 - 950 = 104 are the tightest.
    assert offset_bounds(theirs, ours) == (99, 5)
    # A second rank of ours, that came and left at other times, tightens them.
    assert offset_bounds(theirs, [*ours, [(951, 960), (1910, 1953)]]) == (100, 3)


def test_one_clock_is_recognised() -> None:
    def work(group: hp.Group) -> tuple[int, int]:
        return clock_offset(group, time.monotonic_ns, clock_identity())

    assert run_threads(2, work) == [(0, 0), (0, 0)]


def columns_of(path: Path, colour: str) -> tuple[float, float]:
    """Where bars of a colour begin and end, as parts of the width between the outermost bars of forward and send."""
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)

    def columns(colour: str) -> np.ndarray[Any, Any]:
        # Bars are 30 pixels high; the samples of the legend and letters are lower.
        found = (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=2)
        return np.nonzero(found.sum(axis=0) > 20)[0]

    left = min(columns("#56B4E9")[0], columns("#D55E00")[0])
    right = max(columns("#56B4E9")[-1], columns("#D55E00")[-1])
    first, last = columns(colour)[[0, -1]]
    return (first - left) / (right - left), (last - left) / (right - left)


def steps_of(length: int) -> dict[str, Any]:
    """A trace of steps of 100 ms: forward for 75, send from 50 to 100; ``length`` steps."""
    events = []
    for begin in range(0, length * 100, 100):
        events += [
            Event("step", "computation", begin * 1_000_000, None, {}),
            Event("forward", "computation", begin * 1_000_000, (begin + 75) * 1_000_000, {}),
            Event("send", "lane 0", (begin + 50) * 1_000_000, (begin + 100) * 1_000_000, {}),
            Event("unheard of", "lane 0", (begin + 60) * 1_000_000, (begin + 61) * 1_000_000, {}),
        ]
    return chrome_trace([Recording(0, "a", events)])


def test_bars_stand_where_and_as_long_as_their_spans(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    timeline_plot.draw(path, steps_of(1))
    assert columns_of(path, "#56B4E9") == pytest.approx((0, 0.75), abs=0.01)
    assert columns_of(path, "#D55E00") == pytest.approx((0.5, 1), abs=0.01)
    # An inner span lies upon the outer one.
    assert columns_of(path, "#9A9A9A") == pytest.approx((0.6, 0.61), abs=0.01)
    timeline_plot.draw(path, [("two", steps_of(3)), ("and one", steps_of(1))], steps=range(1), ranks=[0])
    assert columns_of(path, "#56B4E9") == pytest.approx((0, 0.75), abs=0.01)
    (tmp_path / "trace.json").write_text(json.dumps(steps_of(3)))
    timeline_plot.draw(path, tmp_path / "trace.json", steps=range(1, 3))
    assert columns_of(path, "#56B4E9") == pytest.approx((0, 0.875), abs=0.01)


def test_what_a_picture_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.png"
    for steps in (range(2, 4), range(0), range(0, 3, 2), range(-1, 1)):
        with pytest.raises(ValueError, match="out of the 3 of the trace"):
            timeline_plot.draw(path, steps_of(3), steps=steps)
    with pytest.raises(ValueError, match=r"events of ranks \[5\], got none"):
        timeline_plot.draw(path, steps_of(3), ranks=[5])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hybridpar\[plots\]'"):
        timeline_plot.draw(path, steps_of(1))
    assert not path.exists()
