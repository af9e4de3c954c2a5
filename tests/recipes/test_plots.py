"""The plots: files with a picture in them, and the smoothing against SciPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter1d

from recipes.common.metrics import Record
from recipes.common.plots import plot_loss, plot_throughput, smoothed
from recipes.insightface.data.pairs import VerificationPairs
from recipes.insightface.plots import plot_accuracy, plot_roc, plot_run
from recipes.insightface.verification import VerificationResult, verify


def shades(path: Path) -> int:
    """How many different colours a picture has; a blank one has one."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.size) > 400
        return len(image.convert("RGB").getcolors(2**24) or [])


def records(steps: int = 40) -> list[Record]:
    rng = np.random.default_rng(0)
    training = [
        {
            "step": step,
            "loss": float(20 / step + rng.normal()),
            "learning_rate": 0.1,
            "samples_per_second": 900 + 10.0 * step,
        }
        for step in range(1, steps)
    ]
    return [*training, {"step": 20, "accuracy/glyphs": 0.9}, {"step": 40, "accuracy/glyphs": 0.95}]


def result(*, gap: float, pairs: int = 400) -> VerificationResult:
    same = torch.arange(pairs) % 2 == 0
    noise = torch.randn(pairs, generator=torch.Generator().manual_seed(0)) * 0.2
    angles = torch.arccos((noise + gap * same).clamp(-1, 1))
    second = torch.stack([angles.cos(), angles.sin()], dim=1)
    embeddings = torch.cat([torch.tensor([[1.0, 0.0]]), second])
    first = torch.zeros(pairs, dtype=torch.int64)
    images = torch.zeros(pairs + 1, 1, 8, 8, dtype=torch.uint8)
    made_up = VerificationPairs(
        images=images, first=first, second=torch.arange(1, pairs + 1), same=same, name="made up"
    )
    return verify(embeddings, made_up)


def test_a_run_gets_every_plot_that_it_has_values_for(tmp_path: Path) -> None:
    written = plot_run(records(), tmp_path, title="a run", raw_pixels={"glyphs": 0.85})
    assert [path.name for path in written] == ["loss.png", "throughput.png", "accuracy.png"]
    assert all(shades(path) > 20 for path in written)


def test_no_values_no_file(tmp_path: Path) -> None:
    assert plot_run([{"step": 1, "other": 1.0}], tmp_path, title="nothing") == []
    assert list(tmp_path.iterdir()) == []


def test_runs_of_one_record_and_with_gaps_can_be_drawn(tmp_path: Path) -> None:
    assert plot_loss([{"step": 1, "loss": 2.0}], tmp_path / "one.png", title="one report, no learning rate")
    gaps: list[Record] = [{"step": s, "loss": None if s % 3 else 1.0, "learning_rate": 0.1} for s in range(1, 10)]
    assert plot_loss(gaps, tmp_path / "gaps.png", title="gaps")
    assert plot_throughput([{"step": 1, "samples_per_second": 10.0}], tmp_path / "speed.png", title="one")
    assert plot_accuracy([{"step": 1, "accuracy/x": 0.5}], tmp_path / "accuracy.png", title="one")


def test_roc_curves_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "roc.png"
    plot_roc([("model", result(gap=0.6)), ("raw pixels", result(gap=0.2))], path, title="made up")
    assert shades(path) > 20
    plot_roc([("perfect", result(gap=5.0))], path, title="perfect")
    assert shades(path) > 20
    with pytest.raises(ValueError, match="at least one ROC curve"):
        plot_roc([], path, title="none")


def test_smoothing_is_scipys_gaussian_away_from_the_ends() -> None:
    values = np.random.default_rng(0).normal(size=200)
    ours = smoothed(values, width=5.0)
    theirs = gaussian_filter1d(values, 5.0, truncate=3.0)
    np.testing.assert_allclose(ours[15:-15], theirs[15:-15], atol=1e-12)


def test_smoothing_keeps_a_constant_and_passes_over_nan() -> None:
    values = np.full(50, 3.0)
    values[[0, 10, 11, 49]] = np.nan
    np.testing.assert_allclose(smoothed(values), 3.0)
    np.testing.assert_allclose(smoothed(np.array([2.0])), [2.0])
    assert np.isnan(smoothed(np.array([np.nan]))).all()


def test_drawing_opens_no_pyplot_figure(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    plot_run(records(), tmp_path, title="a run")
    plot_roc([("model", result(gap=0.6))], tmp_path / "roc.png", title="made up")
    assert plt.get_fignums() == []
