"""PNG plots of a run: loss and learning rate, throughput, and what is held out beside what needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter

from recipes.common.metrics import Record, series
from recipes.common.plots import BLUE, GREY, ORANGE, dress, new_figure, plot_loss, plot_throughput, save

HELD_OUT = "held_out/"
"""Begins the names of metrics of what is held out."""

_LOGARITHMIC = ("perplexity",)
_SHARES = ("accuracy", "f1")


def plot_run(
    records: Sequence[Record],
    folder: Path | str,
    *,
    title: str,
    baselines: Mapping[str, Mapping[str, float]],
    unit: str = "token",
) -> list[Path]:
    """Draw every plot that the records have values for into ``folder`` (which exists); return the files written.

    Args:
        records: of the run.
        folder: for the plots.
        title: of each of them.
        baselines: what is reached without a model, by name, under the names of the metrics.
        unit: what the loss is the mean over.
    """
    loss, throughput = (Path(folder) / f"{name}.png" for name in ("loss", "throughput"))
    drawn = {
        loss: plot_loss(records, loss, title=title, unit=unit),
        throughput: plot_throughput(records, throughput, title=title),
    }
    for name in sorted({key for record in records for key in record if key.startswith(HELD_OUT)}):
        metric = name.removeprefix(HELD_OUT)
        path = Path(folder) / f"held-out-{metric}.png"
        plot_held_out(records, path, metric=metric, title=title, baselines=baselines)
        drawn[path] = True
    return [path for path, done in drawn.items() if done]


def plot_held_out(
    records: Sequence[Record],
    path: Path | str,
    *,
    metric: str,
    title: str,
    baselines: Mapping[str, Mapping[str, float]],
) -> None:
    """One metric of what is held out, by step, over dashed lines for what is reached without a model."""
    steps, values = series(records, HELD_OUT + metric)
    factor = 100.0 if metric in _SHARES else 1.0
    figure, axes = new_figure()
    last = f"{values[-1]:.2%}" if metric in _SHARES else f"{values[-1]:,.4g}"
    axes.plot(steps, factor * values, color=BLUE, marker="o", markersize=4, label=f"model (last {last})")
    for (name, reached), colour in zip(baselines.items(), (ORANGE, GREY, "#8c564b"), strict=False):
        if metric in reached:
            value = f"{reached[metric]:.2%}" if metric in _SHARES else f"{reached[metric]:,.4g}"
            axes.axhline(
                factor * reached[metric], color=colour, linestyle="--", linewidth=1.4, label=f"{name} ({value})"
            )
    if metric in _LOGARITHMIC:
        axes.set_yscale("log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel(f"{metric} on held-out text" + (" (%)" if metric in _SHARES else ""))
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    figure.legend(loc="outside lower center", frameon=False, ncols=3, fontsize=9)
    dress(axes, f"Held out: {title}", "step")
    save(figure, path)
