"""A picture of timelines: for each rank its computation and its lanes, coloured by what they do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.comm.timeline.trace import COMPUTATION, WAIT, Event, natural, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Trace = Mapping[str, Any]

# The colours of Okabe and Ito, which most colour-blind readers can tell apart; blue and green compute, warm ones send.
_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "pack": "#F0E442",
    "send": "#D55E00",
    "unpack": "#E69F00",
    WAIT: "#E4E4E4",
}
_OTHER = "#9A9A9A"
_STEP_LINE: dict[str, Any] = {"color": "black", "linewidth": 0.8, "linestyle": (0, (4, 3))}
_ROW, _GAP, _WIDTH = 0.24, 0.12, 12.0  # inches


def draw(
    path: str | Path,
    traces: Trace | str | Path | Sequence[tuple[str, Trace | str | Path]],
    *,
    steps: range | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Write a picture of one trace, or of several below each other on one time scale.

    Args:
        path: the picture; its format is what the name ends in, such as .png or .svg.
        traces: what ``Timeline.save`` wrote, as its file or as the parsed JSON; or (title, trace) for each panel.
        steps: steps to show, counted from 0 in each trace; a step begins at an instant ``step`` of ``computation`` of
            the first rank. None shows the whole trace.
        ranks: those to show; None shows all.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a trace holds no such steps or ranks, or nothing at all.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "expected matplotlib for pictures of timelines, found none: pip install 'hybridpar[plots]'; "
            "the trace itself opens at ui.perfetto.dev without it"
        ) from error
    titled = [("", traces)] if isinstance(traces, str | Path | Mapping) else traces
    panels = [_panel(title, trace, steps, ranks) for title, trace in titled]
    heights = [len(panel.rows) * _ROW + len(panel.ranks) * _GAP for panel in panels]
    # Margins in inches, so that text takes the same room in every picture.
    top, between, bottom, left, right = 0.55, 0.75, 0.95, 1.55, 0.2
    height = top + sum(heights) + between * (len(panels) - 1) + bottom
    figure = Figure(figsize=(_WIDTH, height), dpi=150)
    longest = max(panel.length for panel in panels)
    above = top
    for panel, inches in zip(panels, heights, strict=True):
        box = (left / _WIDTH, 1 - (above + inches) / height, 1 - (left + right) / _WIDTH, inches / height)
        _draw_panel(figure.add_axes(box), panel, longest)
        above += inches + between
    figure.axes[-1].set_xlabel("milliseconds")
    _draw_legend(figure, panels)
    figure.savefig(path)


@dataclass(frozen=True)
class _Panel:
    """What one panel shows: events by (rank, row), nanoseconds counted from its left edge."""

    title: str
    rows: dict[tuple[int, str], list[Event]]
    length: int
    step_begins: list[int]

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.rows})

    def spans(self) -> list[tuple[tuple[int, str], Event]]:
        return [(row, event) for row, events in self.rows.items() for event in events if event.end is not None]

    def caption(self) -> str:
        """Title, milliseconds a step, and the hidden share over all ranks."""
        summaries = [
            summarize(rank, [event for (owner, _), events in self.rows.items() if owner == rank for event in events])
            for rank in self.ranks
        ]
        facts = []
        if self.step_begins:
            facts.append(f"{self.length / 1e6 / len(self.step_begins):.1f} ms a step")
        if communication := sum(summary.communication for summary in summaries):
            facts.append(f"{sum(summary.hidden for summary in summaries) / communication:.0%} of communication hidden")
        return ": ".join(filter(None, [self.title, ", ".join(facts)]))


def _panel(title: str, trace: Trace | str | Path, steps: range | None, ranks: Sequence[int] | None) -> _Panel:
    parsed: Trace = json.loads(Path(trace).read_text()) if isinstance(trace, str | Path) else trace
    rows: dict[tuple[int, str], list[Event]] = {}
    for entry in parsed["traceEvents"]:
        if entry["ph"] in {"X", "i"} and (ranks is None or entry["pid"] in ranks):
            begin = round(entry["ts"] * 1e3)
            end = begin + round(entry["dur"] * 1e3) if "dur" in entry else None
            event = Event(entry["name"], entry["cat"], begin, end, entry["args"])
            rows.setdefault((entry["pid"], event.row), []).append(event)
    if not rows:
        raise ValueError(f"expected a trace with events of ranks {'any' if ranks is None else list(ranks)}, got none")
    everything = [event for events in rows.values() for event in events]
    marks = sorted(
        event.begin for event in rows.get((min(rows)[0], COMPUTATION), []) if event.name == "step" and event.end is None
    )
    left, right = min(event.begin for event in everything), max(event.end or event.begin for event in everything)
    if steps is not None:
        if not set(steps) <= set(range(len(marks))) or len(steps) == 0 or steps.step != 1:
            raise ValueError(f"expected consecutive steps out of the {len(marks)} of the trace, got {steps}")
        left = marks[steps.start]
        right = marks[steps.stop] if steps.stop < len(marks) else right
        marks = marks[steps.start : steps.stop]
    return _Panel(
        title,
        {
            key: [cut for event in rows[key] if (cut := _cut(event, left, right)) is not None]
            for key in sorted(rows, key=lambda key: (key[0], natural(key[1])))
        },
        max(right - left, 1),
        [mark - left for mark in marks],
    )


def _cut(event: Event, left: int, right: int) -> Event | None:
    """The part between the edges, counted from the left one."""
    end = event.begin if event.end is None else event.end
    if end < left or event.begin > right:
        return None
    begin, end = max(event.begin, left) - left, min(end, right) - left
    return event._replace(begin=begin, end=None if event.end is None else end)


def _draw_panel(axes: Axes, panel: _Panel, longest: int) -> None:
    middles: dict[tuple[int, str], float] = {}
    below, last = 0.0, None
    for rank, row in panel.rows:
        below += _GAP if rank != last else 0.0
        middles[rank, row] = below + _ROW / 2
        below, last = below + _ROW, rank
    bars: dict[tuple[tuple[int, str], str, bool], list[tuple[float, float]]] = {}
    for key, event in panel.spans():
        assert event.end is not None
        # A white edge would hide a span that is thinner than the edge.
        edged = event.end - event.begin > longest / 200
        length = (event.end - event.begin) / 1e6
        bars.setdefault((key, event.name, edged), []).append((event.begin / 1e6, length))
    # The longest first, so that inner spans lie upon outer ones.
    for (key, name, edged), places in sorted(bars.items(), key=lambda bar: -max(length for _, length in bar[1])):
        colour = _COLOURS.get(name, _OTHER)
        axes.broken_barh(
            places,
            (middles[key] - 0.42 * _ROW, 0.84 * _ROW),
            facecolor=colour,
            hatch="////" if name == WAIT else None,
            edgecolor="white" if edged or name == WAIT else colour,
            linewidth=0.3,
        )
    for begin in panel.step_begins:
        axes.axvline(begin / 1e6, zorder=0, **_STEP_LINE)
    axes.set_yticks(list(middles.values()), [row for _, row in middles])
    for rank in panel.ranks:
        own = [middle for (owner, _), middle in middles.items() if owner == rank]
        axes.text(
            -0.095,
            (min(own) + max(own)) / 2,
            f"rank {rank}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontweight="bold",
        )
    axes.set_xlim(0, longest / 1e6)
    axes.set_ylim(below, 0)
    axes.set_title(panel.caption(), loc="left", fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: Figure, panels: Sequence[_Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {event.name for panel in panels for _, event in panel.spans()}
    entries: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch="////" if name == WAIT else None, edgecolor="white", label=name)
        for name, colour in _COLOURS.items()
        if name in used
    ]
    if used - _COLOURS.keys():
        entries.append(Patch(facecolor=_OTHER, label="other"))
    if any(panel.step_begins for panel in panels):
        entries.append(Line2D([], [], **_STEP_LINE, label="step begins"))
    figure.legend(handles=entries, loc="lower center", ncols=len(entries), frameon=False)
