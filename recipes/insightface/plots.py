"""PNG plots of a run: loss and learning rate, throughput, verification accuracy, ROC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from recipes.common.metrics import Record, series
from recipes.common.plots import GREY, cycle, dress, new_figure, plot_loss, plot_throughput, save
from recipes.insightface.verification import VerificationResult

ACCURACY = "accuracy/"
"""Begins the names of metrics that are accuracies; the name of the set of pairs follows."""


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


def plot_accuracy(
    records: Sequence[Record], path: Path | str, *, title: str, raw_pixels: Mapping[str, float] | None = None
) -> bool:
    """Verification accuracy by step, one curve per set of pairs. False, and no file, without values.

    ``raw_pixels``: accuracy of the pixels themselves by the name of the set, drawn as a dashed line.
    """
    names = sorted({key for record in records for key in record if key.startswith(ACCURACY)})
    if not names:
        return False
    figure, axes = new_figure()
    for name, colour in zip(names, cycle(len(names)), strict=True):
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
    dress(axes, f"Verification: {title}", "step")
    save(figure, path)
    return True


def plot_roc(curves: Sequence[tuple[str, VerificationResult]], path: Path | str, *, title: str) -> None:
    """ROC curves with a logarithmic axis of false accepts; ``curves`` are (label, result), such as ours and raw pixels.

    Raises ``ValueError`` without curves.
    """
    if not curves:
        raise ValueError("expected at least one ROC curve, got none")
    lowest = min(_first_resolved(result) for _, result in curves)
    figure, axes = new_figure()
    for (label, result), colour in zip(curves, cycle(len(curves)), strict=True):
        # The stretch with no false accept at all has no place on a logarithmic axis: the curve enters at its left edge.
        start = int(np.searchsorted(result.false_accept_rates, lowest, side="right")) - 1
        false_accepts = np.maximum(result.false_accept_rates[start:], lowest)
        true_accepts = result.true_accept_rates[start:]
        text = f"{label}: accuracy {result.accuracy:.2%}, AUC {result.auc:.4f}"
        axes.step(false_accepts, 100 * true_accepts, where="post", color=colour, linewidth=1.8, label=text)
    chance = np.geomspace(lowest, 1.0, 200)
    axes.plot(chance, 100 * chance, color=GREY, linestyle=":", linewidth=1.2, label="chance")
    axes.set_xscale("log")
    axes.set_xlim(lowest, 1.0)
    axes.set_ylim(0.0, 102.0)
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("true accept rate (%)")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    dress(axes, f"ROC: {title}", "false accept rate")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    save(figure, path)


def _first_resolved(result: VerificationResult) -> float:
    """The smallest false accept rate above zero on the curve."""
    positive = result.false_accept_rates[result.false_accept_rates > 0]
    return float(positive[0])
