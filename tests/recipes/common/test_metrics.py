"""The record of a run: what is written is read back, also after a kill and a resume."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.common.metrics import MetricsWriter, read_metrics, series


def write_steps(directory: Path, steps: range, *, resumed_step: int = 0, offset: float = 0.0) -> None:
    with MetricsWriter(directory, resumed_step=resumed_step) as writer:
        for step in steps:
            writer.write(step, {"loss": step + offset})


def test_each_line_is_json_with_step_time_and_values(tmp_path: Path) -> None:
    before = time.time()
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 2.5, "learning_rate": 0.1})
        # Readable while the run goes on.
        (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads(line)
    assert before - 0.01 <= record.pop("time") <= time.time() + 0.01
    assert record == {"step": 1, "loss": 2.5, "learning_rate": 0.1}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_the_same_values(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6), offset=0.5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(s, s + 0.5) for s in range(1, 6)]


def test_resuming_drops_what_came_after_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 10), resumed_step=4, offset=0.5)
    steps, loss = series(read_metrics(tmp_path), "loss")
    assert steps.tolist() == list(range(1, 10))
    assert loss.tolist() == [1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == loss.tolist()


def test_a_new_run_starts_an_empty_record(tmp_path: Path) -> None:
    write_steps(tmp_path, range(4))
    write_steps(tmp_path, range(2), offset=0.5)
    assert series(read_metrics(tmp_path), "loss")[1].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("cut", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}'])
def test_a_line_cut_short_by_a_kill_is_left_out_and_dropped_on_resume(tmp_path: Path, cut: str) -> None:
    write_steps(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(cut)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    write_steps(tmp_path, range(3, 5), resumed_step=2)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_values_that_are_not_finite_come_back_as_nan(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan})
        writer.write(2, {"loss": math.inf})
        writer.write(3, {"loss": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text  # neither is JSON
    np.testing.assert_array_equal(series(read_metrics(tmp_path), "loss")[1], [math.nan, math.nan, 1.0])


def test_a_series_passes_over_records_without_the_metric(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(1, {"accuracy/glyphs": 0.5})
        writer.write(2, {"loss": 0.5})
    records = read_metrics(tmp_path)
    assert [values.tolist() for values in series(records, "loss")] == [[1, 2], [1.0, 0.5]]
    assert [values.tolist() for values in series(records, "nothing")] == [[], []]


@pytest.mark.parametrize(("line", "message"), [("{", "line 1 of .* is not JSON"), ('{"loss": 1}', 'integer "step"')])
def test_a_spoiled_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 1}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_metrics(tmp_path)


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(ValueError, match="other than step"):
        writer.write(1, {"step": 1.0})
