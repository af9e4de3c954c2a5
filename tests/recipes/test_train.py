"""Whole training runs: a rank killed, other numbers of ranks, other rules, SIGTERM, data mode."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.recipes.launch import losses, run, start, wait_for_step, workers

STEPS = 40
# Float32 rounding, amplified by the steps that follow it.
TOLERANCE = 1e-5

RULE = '''
import numpy as np
import hybridpar as hp

@hp.partition.register_rule("odd-ones-first")
def odd_ones_first(num_classes, num_ranks):
    """Odd classes on rank 0, even ones dealt out to the other ranks."""
    classes = np.arange(num_classes)
    others = max(num_ranks - 1, 1)
    return np.where(classes % 2 == 1, 0, (1 + classes // 2 % others) % num_ranks)
'''


def _assert_same_curve(found: dict[int, float], expected: dict[int, float], first: int = 1) -> None:
    assert sorted(found) == list(range(1, STEPS + 1))
    for step in range(first, STEPS + 1):
        assert math.isclose(found[step], expected[step], rel_tol=TOLERANCE), (step, found[step], expected[step])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("uninterrupted")
    run(2, out, "--steps", str(STEPS))
    curve = losses(out)
    assert curve[STEPS] < 0.7 * curve[1], "nothing was learned"
    return curve


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under a custom rule, of which one rank was killed a few steps after its last checkpoint."""
    out = tmp_path_factory.mktemp("killed") / "run"
    rule = out.parent / "my_rule.py"
    rule.write_text(RULE)
    options = ("--run.checkpoint-every", "10", "--plugins", str(rule), "--head.rule", "odd-ones-first")
    process = start(2, out, "--steps", str(STEPS), *options)
    wait_for_step(out, 24, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert len(steps) == 2, output
    manifest = json.loads((out / "checkpoints" / steps[-1] / "manifest.json").read_text())
    assert manifest["head"]["layout"]["kind"] == "owners"
    return out


@pytest.mark.parametrize(("ranks", "rule"), [(2, "even"), (3, "striped"), (1, "even")])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    uninterrupted: dict[int, float], killed: Path, tmp_path: Path, ranks: int, rule: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    output = run(ranks, out, "--steps", str(STEPS), "--head.rule", rule)
    assert "resumed from" in output
    _assert_same_curve(losses(out), uninterrupted)


def test_data_mode_computes_the_same(uninterrupted: dict[int, float], tmp_path: Path) -> None:
    run(2, tmp_path, "--steps", str(STEPS), "--mode", "data")
    _assert_same_curve(losses(tmp_path), uninterrupted)


def test_sigterm_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    # Worker processes get the signal too, and must outlive it.
    process = start(2, tmp_path, "--steps", "100000", "--data.workers", "1")
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    stopped_at = json.loads((checkpoint / "manifest.json").read_text())["step"]
    assert f"stopped at step {stopped_at} of 100000" in output
    assert max(losses(tmp_path)) == stopped_at
    resumed = run(2, tmp_path, "--steps", str(stopped_at + 2))
    assert f"step {stopped_at}" in resumed
    assert sorted(losses(tmp_path)) == list(range(1, stopped_at + 3))


def test_a_head_with_samples_files_and_an_optimizer_of_its_own_goes_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    own = (
        "--steps", str(STEPS), "--run.checkpoint-every", "10", "--head.optimizer", "sgd", "--head.sample-rate", "0.5",
        "--head.hard-share", "0.5", "--head.graph-every", "15", "--head.dtype", "bfloat16", "--head.state", "bfloat16",
        "--head.state-dir", str(tmp_path / "files"),
    )  # fmt: skip
    run(2, tmp_path / "whole", *own)
    whole = losses(tmp_path / "whole")
    assert whole[STEPS] < 0.8 * whole[1], "nothing was learned"
    process = start(2, tmp_path / "killed", *own)
    wait_for_step(tmp_path / "killed", 24, process)
    os.kill(workers(process)[0], signal.SIGKILL)
    process.communicate(timeout=100)
    assert "resumed from" in run(2, tmp_path / "killed", *own)
    assert losses(tmp_path / "killed") == whole
    assert not list((tmp_path / "files").iterdir())
