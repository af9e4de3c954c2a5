"""PNG plots that every run has: loss over learning rate, and throughput; and how all plots are dressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from recipes.common.metrics import Record, series

LOSS = "loss"
LEARNING_RATE = "learning_rate"
THROUGHPUT = "samples_per_second"
"""Names of the metrics that the plots read."""

BLUE, ORANGE, GREY = "#2a6fb0", "#d9772b", "#7f7f7f"
COLOURS = (BLUE, ORANGE, "#3a923a", "#8c564b", "#7a5ab5", "#c03d3e")

Floats = npt.NDArray[np.float64]


def plot_loss(records: Sequence[Record], path: Path | str, *, title: str, unit: str = "sample") -> bool:
    """Loss (as measured, and smoothed) over the learning rate, by step. False, and no file, without a loss."""
    steps, loss = series(records, LOSS)
    if len(steps) == 0:
        return False
    rate_steps, rates = series(records, LEARNING_RATE)
    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), squeeze=False)[:, 0]
    upper, lower = panels
    upper.plot(steps, loss, color=BLUE, alpha=0.3, linewidth=1.0, label="each report")
    upper.plot(steps, smoothed(loss), color=BLUE, linewidth=2.0, label="smoothed")
    upper.set_ylabel(f"loss (nats per {unit})")
    upper.legend(loc="upper right", frameon=False)
    lower.plot(rate_steps, rates, color=ORANGE, linewidth=1.6)
    lower.set_ylabel("learning rate")
    lower.set_ylim(bottom=0.0)
    dress(upper, f"Training loss: {title}", "")
    dress(lower, "", "step")
    save(figure, path)
    return True


def plot_throughput(records: Sequence[Record], path: Path | str, *, title: str) -> bool:
    """Samples per second of all ranks together, by step, with the median. False, and no file, without values."""
    steps, speed = series(records, THROUGHPUT)
    if len(steps) == 0:
        return False
    median = float(np.nanmedian(speed))
    figure, axes = new_figure()
    axes.plot(steps, speed, color=BLUE, linewidth=1.2, label="each report")
    axes.axhline(median, color=ORANGE, linewidth=1.6, linestyle="--", label=f"median {median:,.0f}")
    axes.set_ylabel("samples per second, all ranks")
    # From zero: a curve cut off below exaggerates small swings.
    axes.set_ylim(0.0, 1.2 * max(float(np.nanmax(speed)), 1e-9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(loc="lower right", frameon=False)
    dress(axes, f"Throughput: {title}", "step")
    save(figure, path)
    return True


def smoothed(values: Floats, *, width: float | None = None) -> Floats:
    """Gaussian moving average float64 [n] of values [n], centred so that it does not lag, passing over NaN.

    ``width``: standard deviation in reports; a hundredth of the run by default. Near the ends, and beside NaN, the
    weights that are left are scaled to sum to one.
    """
    if width is None:
        width = max(len(values) / 100, 1.0)
    reach = max(1, int(3 * width))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    known = np.isfinite(values)
    # "same" would return the kernel's length where that is the longer one.
    sums = np.convolve(np.where(known, values, 0.0), kernel)[reach : reach + len(values)]
    weights = np.convolve(known.astype(np.float64), kernel)[reach : reach + len(values)]
    return np.divide(sums, weights, out=np.full(len(values), np.nan), where=weights > 0)


def cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    return figure, figure.subplots()


def dress(axes: Axes, title: str, xlabel: str) -> None:
    if title:
        axes.set_title(title, fontsize=12)
    axes.set_xlabel(xlabel)
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save(figure: Figure, path: Path | str) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(Path(path), dpi=120, facecolor="white")
