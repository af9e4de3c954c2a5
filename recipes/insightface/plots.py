"""PNG plots of a run: loss and learning rate, throughput, verification accuracy, ROC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from recipes.insightface.metrics import Record, series
from recipes.insightface.verification import VerificationResult

LOSS = "loss"
LEARNING_RATE = "learning_rate"
THROUGHPUT = "samples_per_second"
ACCURACY = "accuracy/"
"""Names of the metrics that the plots read; accuracy is followed by the name of the set of pairs."""

_BLUE, _ORANGE, _GREY = "#2a6fb0", "#d9772b", "#7f7f7f"
_COLOURS = (_BLUE, _ORANGE, "#3a923a", "#8c564b", "#7a5ab5", "#c03d3e")

Floats = npt.NDArray[np.float64]


def plot_run(
    records: Sequence[Record], folder: Path | str, *, title: str, raw_pixels: Mapping[str, float] | None = None
) -> list[Path]:
    """Draw every plot that the records have values for into ``folder`` (which exists); return the files written.

    ``raw_pixels``: as for :func:`plot_accuracy`.
    """
    loss, throughput, accuracy = (Path(folder) / f"{name}.png" for name in ("loss", "throughput", "accuracy"))
    drawn = {
        loss: plot_loss(records, loss, title=title),
        throughput: plot_throughput(records, throughput, title=title),
        accuracy: plot_accuracy(records, accuracy, title=title, raw_pixels=raw_pixels),
    }
    return [path for path, done in drawn.items() if done]


def plot_loss(records: Sequence[Record], path: Path | str, *, title: str) -> bool:
    """Loss (as measured, and smoothed) over the learning rate, by step. False, and no file, without a loss."""
    steps, loss = series(records, LOSS)
    if len(steps) == 0:
        return False
    rate_steps, rates = series(records, LEARNING_RATE)
    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), squeeze=False)[:, 0]
    upper, lower = panels
    upper.plot(steps, loss, color=_BLUE, alpha=0.3, linewidth=1.0, label="each report")
    upper.plot(steps, smoothed(loss), color=_BLUE, linewidth=2.0, label="smoothed")
    upper.set_ylabel("loss (nats per sample)")
    upper.legend(loc="upper right", frameon=False)
    lower.plot(rate_steps, rates, color=_ORANGE, linewidth=1.6)
    lower.set_ylabel("learning rate")
    lower.set_ylim(bottom=0.0)
    _dress(upper, f"Training loss: {title}", "")
    _dress(lower, "", "step")
    _save(figure, path)
    return True


def plot_throughput(records: Sequence[Record], path: Path | str, *, title: str) -> bool:
    """Samples per second of all ranks together, by step, with the median. False, and no file, without values."""
    steps, speed = series(records, THROUGHPUT)
    if len(steps) == 0:
        return False
    median = float(np.nanmedian(speed))
    figure, axes = _figure()
    axes.plot(steps, speed, color=_BLUE, linewidth=1.2, label="each report")
    axes.axhline(median, color=_ORANGE, linewidth=1.6, linestyle="--", label=f"median {median:,.0f}")
    axes.set_ylabel("samples per second, all ranks")
    # From zero: a curve cut off below exaggerates small swings.
    axes.set_ylim(0.0, 1.2 * max(float(np.nanmax(speed)), 1e-9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(loc="lower right", frameon=False)
    _dress(axes, f"Throughput: {title}", "step")
    _save(figure, path)
    return True


def plot_accuracy(
    records: Sequence[Record], path: Path | str, *, title: str, raw_pixels: Mapping[str, float] | None = None
) -> bool:
    """Verification accuracy by step, one curve per set of pairs. False, and no file, without values.

    ``raw_pixels``: accuracy of the pixels themselves by the name of the set, drawn as a dashed line.
    """
    names = sorted({key for record in records for key in record if key.startswith(ACCURACY)})
    if not names:
        return False
    figure, axes = _figure()
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        steps, values = series(records, name)
        pairs = name.removeprefix(ACCURACY)
        axes.plot(steps, 100 * values, color=colour, marker="o", markersize=4, label=f"{pairs} (last {values[-1]:.2%})")
        if raw_pixels and pairs in raw_pixels:
            floor = raw_pixels[pairs]
            label = f"{pairs}, raw pixels ({floor:.2%})"
            axes.axhline(100 * floor, color=colour, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylabel("accuracy on unseen identities (%)")
    figure.legend(loc="outside lower center", frameon=False, ncols=2, fontsize=9)
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    _dress(axes, f"Verification: {title}", "step")
    _save(figure, path)
    return True


def plot_roc(curves: Sequence[tuple[str, VerificationResult]], path: Path | str, *, title: str) -> None:
    """ROC curves with a logarithmic axis of false accepts; ``curves`` are (label, result), such as ours and raw pixels.

    Raises ``ValueError`` without curves.
    """
    if not curves:
        raise ValueError("expected at least one ROC curve, got none")
    lowest = min(_first_resolved(result) for _, result in curves)
    figure, axes = _figure()
    for (label, result), colour in zip(curves, _cycle(len(curves)), strict=True):
        # The stretch with no false accept at all has no place on a logarithmic axis: the curve enters at its left edge.
        start = int(np.searchsorted(result.false_accept_rates, lowest, side="right")) - 1
        false_accepts = np.maximum(result.false_accept_rates[start:], lowest)
        true_accepts = result.true_accept_rates[start:]
        text = f"{label}: accuracy {result.accuracy:.2%}, AUC {result.auc:.4f}"
        axes.step(false_accepts, 100 * true_accepts, where="post", color=colour, linewidth=1.8, label=text)
    chance = np.geomspace(lowest, 1.0, 200)
    axes.plot(chance, 100 * chance, color=_GREY, linestyle=":", linewidth=1.2, label="chance")
    axes.set_xscale("log")
    axes.set_xlim(lowest, 1.0)
    axes.set_ylim(0.0, 102.0)
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("true accept rate (%)")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    _dress(axes, f"ROC: {title}", "false accept rate")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _save(figure, path)


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


def _first_resolved(result: VerificationResult) -> float:
    """The smallest false accept rate above zero on the curve."""
    positive = result.false_accept_rates[result.false_accept_rates > 0]
    return float(positive[0])


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    return figure, figure.subplots()


def _dress(axes: Axes, title: str, xlabel: str) -> None:
    if title:
        axes.set_title(title, fontsize=12)
    axes.set_xlabel(xlabel)
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _save(figure: Figure, path: Path | str) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(Path(path), dpi=120, facecolor="white")
