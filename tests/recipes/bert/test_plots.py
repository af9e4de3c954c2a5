"""Pictures of a run and the table of its results."""

from __future__ import annotations

from pathlib import Path

from recipes.bert.plots import plot_run
from recipes.bert.presets import PRESETS
from recipes.bert.report import format_table
from tests.recipes.test_plots import records, shades

BASELINES = {"unigram": {"perplexity": 551.0, "accuracy": 0.06}, "uniform": {"perplexity": 4096.0}}


def test_every_value_of_what_is_held_out_has_a_picture(tmp_path: Path) -> None:
    held_out = [
        {"step": step, "held_out/perplexity": 4000.0 / step, "held_out/accuracy": step / 100} for step in (10, 20, 40)
    ]
    written = plot_run([*records(), *held_out], tmp_path, title="a run", baselines=BASELINES)
    names = {"loss.png", "throughput.png", "held-out-perplexity.png", "held-out-accuracy.png"}
    assert {path.name for path in written} == names
    assert all(shades(path) > 20 for path in written)


def test_the_table_has_a_column_for_every_metric_and_a_dash_for_what_is_not_known() -> None:
    table = format_table({"model": {"perplexity": 1213.4, "accuracy": 0.5}, **BASELINES})
    head, _, model, unigram, uniform = (line.split() for line in table.splitlines())
    assert head == ["perplexity", "accuracy"]
    assert model == ["model", "1,213.40", "0.5000"]
    assert unigram == ["unigram", "551.00", "0.0600"]
    assert uniform == ["uniform", "4,096.00", "-"]


def test_presets_have_different_folders() -> None:
    assert len({config.run.out for _, config in PRESETS.values()}) == len(PRESETS)
