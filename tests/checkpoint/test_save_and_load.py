"""Training that stops on n ranks and goes on with m, under another rule, equals training that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hybridpar as hp
from tests.checkpoint.training import CLASSES, STEPS, STOP, Setting, Trainee, assert_state, dense_run
from tests.head.rules import RandomRule
from tests.ranks import run_processes, run_threads

RULES: list[Any] = ["even", "striped", RandomRule(1), RandomRule(2)]
SETTINGS = {
    "arcface-sgd": Setting(hp.ArcFace(scale=8.0), "sgd"),
    "softmax-bias-adamw": Setting(hp.Softmax(bias=True), "adamw"),
    "adaface-adamw": Setting(hp.AdaFace(scale=8.0, t_alpha=0.3), "adamw"),
}


def _first_part(group: hp.Group, setting: Setting, rule: Any, directory: Path) -> list[float]:
    trainee = Trainee(group, setting, rule)
    losses = trainee.train(0, STOP)
    path = trainee.save(directory, STOP, extra={"position": STOP})
    assert path == directory / f"step-{STOP:08d}"
    assert_state(trainee.state(), dense_run(setting, STOP)[1])  # saving changes nothing
    return losses


def _second_part(group: hp.Group, setting: Setting, rule: Any, directory: Path) -> tuple[list[float], dict[str, Any]]:
    trainee = Trainee(group, setting, rule)
    trainee.train(STOP, STOP + 1)  # a state that loading must overwrite, optimizer and all
    found = trainee.load(directory)
    assert (found.step, found.extra, found.skipped) == (STOP, {"position": STOP}, ())
    assert_state(trainee.state(), dense_run(setting, STOP)[1])
    return trainee.train(found.extra["position"], STEPS), trainee.state()


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_exactly_on_any_number_of_ranks(name: str, saved_on: int, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    losses, final = dense_run(setting)
    close = {"rel": 1e-10, "abs": 1e-10}
    for found in run_threads(saved_on, _first_part, setting, RULES[saved_on - 1], tmp_path):
        assert found == pytest.approx(losses[:STOP], **close)
    for loaded_on in (1, 2, 3, 4):
        rule = RULES[(saved_on + loaded_on) % len(RULES)]
        for found, state in run_threads(loaded_on, _second_part, setting, rule, tmp_path):
            assert found == pytest.approx(losses[STOP:], **close)
            assert_state(state, final)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_replicated_head_and_a_sharded_one_load_each_other(name: str, tmp_path: Path) -> None:
    sharded, replicated = Setting(optimizer=name), Setting(optimizer=name, sharded=False)
    for before, after in ((replicated, sharded), (sharded, replicated), (replicated, replicated)):
        run_threads(2, _replaced, before, after, tmp_path / f"{before.sharded} {after.sharded}")


def _replaced(group: hp.Group, before: Setting, after: Setting, directory: Path) -> None:
    writer = Trainee(group, before)
    writer.train(0, STOP)
    writer.save(directory, STOP)
    shards = sorted(path.name for path in (directory / f"step-{STOP:08d}").glob("head-*"))
    if before.sharded:
        assert shards == ["head-00000-of-00002.safetensors", "head-00001-of-00002.safetensors"]
    else:
        assert shards == ["head-00000-of-00001.safetensors"]
    reader = Trainee(group, after, "striped" if after.sharded else "even")
    reader.load(directory)
    assert len(reader.head.weight) == (CLASSES if not after.sharded else (CLASSES + 1 - group.rank) // 2)
    assert_state(reader.state(), dense_run(Setting(optimizer=before.optimizer), STOP)[1])
    reader.train(STOP, STEPS)
    assert_state(reader.state(), dense_run(Setting(optimizer=before.optimizer))[1])


def test_half_precision_rows_and_their_state_come_back_bit_by_bit(tmp_path: Path) -> None:
    setting = Setting(dtype=torch.bfloat16)

    def write(group: hp.Group) -> dict[str, Any]:
        trainee = Trainee(group, setting, "striped")
        trainee.train(0, 2)
        trainee.save(tmp_path, 2)
        return trainee.state()

    def read(group: hp.Group) -> dict[str, Any]:
        trainee = Trainee(group, setting, RandomRule(3))
        trainee.load(tmp_path)
        return trainee.state()

    def dense(states: list[dict[str, Any]], name: str) -> torch.Tensor:
        ids = torch.cat([state["ids"] for state in states])
        return torch.cat([state[name] for state in states])[ids.argsort()]

    written, loaded = run_threads(2, write), run_threads(3, read)
    for name in ("head.weight", "head.weight/momentum_buffer"):
        assert dense(written, name).dtype == torch.bfloat16
        assert torch.equal(dense(loaded, name), dense(written, name))
    for name, value in written[0].items():
        if name.startswith("model."):
            assert torch.equal(loaded[2][name], value)


def _over_gloo(group: hp.Group, directory: str) -> list[float]:
    losses = _first_part(group, SETTINGS["arcface-sgd"], "striped", Path(directory))
    return losses + _second_part(group, SETTINGS["arcface-sgd"], "even", Path(directory))[0]


def test_processes_over_gloo(tmp_path: Path) -> None:
    for losses in run_processes(2, _over_gloo, str(tmp_path)):
        assert losses == pytest.approx(dense_run(SETTINGS["arcface-sgd"])[0], rel=1e-10)
