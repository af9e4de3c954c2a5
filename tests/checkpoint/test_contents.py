"""What is in a checkpoint, as safetensors and json read it, and what comes back when only a part is asked for."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hybridpar as hp
from tests.checkpoint.training import CLASSES, EMBEDDING, Setting, Trainee, assert_state, dense_run, start
from tests.ranks import run_threads


def _write(group: hp.Group, directory: Path, setting: Setting, step: int = 2) -> Path:
    trainee = Trainee(group, setting, "striped")
    trainee.train(0, step)
    return trainee.save(directory, step, extra={"position": step * 9, "config": {"lr": [0.1, None, "ü"]}})


def test_files_hold_what_the_manifest_says(tmp_path: Path) -> None:
    setting = Setting(hp.CurricularFace(scale=8.0), "adamw")
    path = run_threads(3, _write, tmp_path, setting)[1]
    dense = dense_run(setting, 2)[1]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["topology"]["ranks"]) == (1, 2, 3)
    assert manifest["extra"] == {"position": 18, "config": {"lr": [0.1, None, "ü"]}}
    assert (manifest["head"]["num_classes"], manifest["head"]["embedding_size"]) == (CLASSES, EMBEDDING)
    present = {entry.name for entry in path.iterdir()}
    assert present == {entry["name"] for entry in manifest["files"]} | {"manifest.json"}
    assert {Path(name).suffix for name in present} == {".json", ".safetensors"}  # no pickle
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    model = load_file(path / "model.safetensors")
    assert {f"model.{name}" for name in model} == {n for n in dense if n.startswith("model.") and "/" not in n}
    for name, value in model.items():
        torch.testing.assert_close(value, dense[f"model.{name}"], rtol=1e-10, atol=1e-10)
    _check_shards(path, dense)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]


def _check_shards(path: Path, dense: dict[str, torch.Tensor]) -> None:
    shards = [load_file(path / f"head-{rank:05d}-of-00003.safetensors") for rank in range(3)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard["class_ids"], torch.arange(rank, CLASSES, 3))
        assert shard["class_ids"].dtype == torch.int64
    ids = torch.cat([shard["class_ids"] for shard in shards])
    expected = {
        "weight": "head.weight",
        "optimizer/head.weight/exp_avg": "head.weight/exp_avg",
        "optimizer/head.weight/exp_avg_sq": "head.weight/exp_avg_sq",
    }
    assert all(shard.keys() == expected.keys() | {"class_ids"} for shard in shards)
    for name, source in expected.items():
        rows = torch.cat([shard[name] for shard in shards])
        torch.testing.assert_close(rows, dense[source][ids], rtol=1e-10, atol=1e-10)
    replicated = load_file(path / "replicated.safetensors")
    torch.testing.assert_close(replicated["margin_state"], dense["margin_state"], rtol=1e-10, atol=1e-10)
    assert replicated["optimizer/head.weight/step"].item() == 2


def test_only_the_model_or_only_the_head_can_be_loaded(tmp_path: Path) -> None:
    setting = Setting()
    run_threads(2, _write, tmp_path, setting)
    dense, (backbone, rows, _, _) = dense_run(setting, 2)[1], start()

    def part(group: hp.Group, arguments: dict[str, Any]) -> dict[str, Any]:
        trainee = Trainee(group, setting)
        trainee.load(tmp_path, **arguments)
        return trainee.state()

    for state in run_threads(3, part, {"head": None, "optimizer": None}):
        torch.testing.assert_close(state["model.3.weight"], dense["model.3.weight"], rtol=1e-10, atol=1e-10)
        assert torch.equal(state["head.weight"], rows[state["ids"]])
        assert not any("/" in name for name in state)
    for state in run_threads(3, part, {"model": None, "optimizer": None}):
        assert torch.equal(state["model.3.weight"], backbone.state_dict()["3.weight"])
        torch.testing.assert_close(state["head.weight"], dense["head.weight"][state["ids"]], rtol=1e-10, atol=1e-10)


def test_only_the_model_or_only_the_head_can_be_saved(tmp_path: Path) -> None:
    def work(group: hp.Group) -> None:
        trainee = Trainee(group, Setting())
        trainee.save(tmp_path / "model", 1, head=None, optimizer=None)
        trainee.save(tmp_path / "head", 1, model=None, optimizer=None)
        trainee.save(tmp_path / "nothing", 1, model=None, head=None, optimizer=None, extra={"a": 1})
        for name, arguments in (("model", {"head": None}), ("head", {"model": None})):
            with pytest.raises(ValueError, match=f"expected a {'head' if name == 'model' else 'model'} in the"):
                trainee.load(tmp_path / name, optimizer=None)
            trainee.load(tmp_path / name, optimizer=None, **arguments)
        assert trainee.load(tmp_path / "nothing", model=None, head=None, optimizer=None).extra == {"a": 1}

    run_threads(2, work)
    assert not (tmp_path / "head" / "step-00000001" / "model.safetensors").exists()
    assert not list((tmp_path / "model" / "step-00000001").glob("head-*"))


def test_several_optimizers_go_under_their_names(tmp_path: Path) -> None:
    """One for the backbone and one for the head, with options that a schedule has changed."""

    def optimizers(trainee: Trainee) -> dict[str, torch.optim.Optimizer]:
        slow, fast = list(trainee.backbone.module[0].parameters()), list(trainee.backbone.module[3].parameters())
        groups = [{"params": slow, "lr": 0.01}, {"params": fast, "weight_decay": 0.1}]
        body = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return {"backbone": body, "head": torch.optim.AdamW(trainee.head.parameters(), lr=0.3, amsgrad=True)}

    def step(trainee: Trainee, several: dict[str, torch.optim.Optimizer], number: int) -> None:
        trainee.backbone.zero_grad()
        trainee.train(number, number + 1)  # leaves the gradients
        for optimizer in several.values():
            optimizer.step()

    def write(group: hp.Group) -> dict[str, Any]:
        trainee = Trainee(group, Setting())
        several = optimizers(trainee)
        several["backbone"].param_groups[0]["lr"] = 0.123
        several["head"].param_groups[0]["betas"] = (0.5, 0.6)
        trainee.optimizer = torch.optim.SGD(trainee.head.parameters(), lr=0.0)
        for number in range(2):
            step(trainee, several, number)
        trainee.save(tmp_path, 2, optimizer=several)
        step(trainee, several, 2)
        return trainee.state()

    def read(group: hp.Group) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        trainee = Trainee(group, Setting())
        several = optimizers(trainee)
        trainee.load(tmp_path, optimizer=several)
        trainee.optimizer = torch.optim.SGD(trainee.head.parameters(), lr=0.0)
        step(trainee, several, 2)
        return trainee.state(), [group for optimizer in several.values() for group in optimizer.param_groups]

    written, loaded = run_threads(2, write), run_threads(1, read)
    state, groups = loaded[0]
    whole = torch.cat([part["head.weight"] for part in written])
    torch.testing.assert_close(state["head.weight"], whole, rtol=1e-10, atol=1e-10)
    for name in ("model.0.weight", "model.3.weight", "model.3.bias"):
        torch.testing.assert_close(state[name], written[0][name], rtol=1e-10, atol=1e-10)
    assert [group["lr"] for group in groups] == [0.123, 0.1, 0.3]
    assert [group["weight_decay"] for group in groups] == [0, 0.1, 0.01]
    assert groups[2]["betas"] == (0.5, 0.6)


def test_state_that_is_no_tensor_comes_back_too(tmp_path: Path) -> None:
    model, group = nn.Linear(2, 2), hp.Group.alone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"calls": 3, "momentum_buffer": None, "average": torch.ones(2, 2)}
    hp.checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, group=group)
    optimizer.state.clear()
    hp.checkpoint.load(tmp_path, model=model, optimizer=optimizer, group=group)
    found = optimizer.state[model.weight]
    assert (found["calls"], found["momentum_buffer"], found["average"].sum().item()) == (3, None, 4.0)
    assert model.bias not in optimizer.state


def test_tied_weights_are_written_for_each_of_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    group = hp.Group.alone()
    path = hp.checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, group=group)
    saved = load_file(path / "model.safetensors")
    assert torch.equal(saved["0.weight"], saved["1.weight"]) and torch.equal(saved["0.weight"], model[0].weight)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    hp.checkpoint.load(tmp_path, model=model, optimizer=optimizer, group=group)
    assert torch.equal(model[1].weight, before) and model[0].weight is model[1].weight


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    group, model = hp.Group.alone(), nn.Linear(1, 1)
    for step in (5, 20, 100, 7):
        hp.checkpoint.save(tmp_path, step=step, model=model, group=group)
    assert hp.checkpoint.newest(tmp_path) == tmp_path / "step-00000100"
    hp.checkpoint.save(tmp_path, step=120, model=model, keep=3, group=group)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100", "step-00000120"]
    # A run that goes on from step 20 must not lose what it writes to later steps that it could not use.
    hp.checkpoint.save(tmp_path, step=30, model=model, keep=1, group=group)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000100", "step-00000120"]
    assert hp.checkpoint.load(tmp_path, model=model, step=30, group=group).step == 30
    assert hp.checkpoint.newest(tmp_path / "none") is None


def test_one_step_can_be_asked_for_by_number_or_by_path(tmp_path: Path) -> None:
    group, model = hp.Group.alone(), nn.Linear(1, 1)
    for step in (1, 2, 123456789):
        hp.checkpoint.save(tmp_path / "step-by-step", step=step, extra={"at": step}, group=group)
    directory = tmp_path / "step-by-step"  # not itself a checkpoint, though its name begins like one
    assert hp.checkpoint.load(directory, group=group).extra == {"at": 123456789}
    assert hp.checkpoint.load(directory, step=1, group=group).extra == {"at": 1}
    assert hp.checkpoint.load(directory / "step-00000002", group=group).extra == {"at": 2}
    with pytest.raises(FileNotFoundError, match=r"step-00000003.*manifest\.json"):
        hp.checkpoint.load(directory, step=3, model=model, group=group)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    group = hp.Group.alone()
    for value in (1, 2):
        hp.checkpoint.save(tmp_path, step=1, extra={"value": value}, group=group)
    assert hp.checkpoint.load(tmp_path, group=group).extra == {"value": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _draw() -> list[float]:
    # An odd number of normals: the other one of a pair waits inside the generator.
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.random(), np.random.randn()]  # noqa: NPY002, S311


def test_random_generators_go_on_where_the_number_of_ranks_is_the_same(tmp_path: Path) -> None:
    _draw()
    hp.checkpoint.save(tmp_path, step=1, group=hp.Group.alone())
    expected = [_draw(), _draw()]
    hp.checkpoint.load(tmp_path, group=hp.Group.alone())
    assert [_draw(), _draw()] == expected


def test_random_generators_are_left_alone_where_that_is_asked(tmp_path: Path) -> None:
    hp.checkpoint.save(tmp_path, step=1, group=hp.Group.alone())
    _draw()
    before = torch.get_rng_state(), random.getstate()
    hp.checkpoint.load(tmp_path, random_generators=False, group=hp.Group.alone())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_random_generators_are_left_alone_on_another_number_of_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hp.checkpoint.save(tmp_path, step=1, group=hp.Group.alone())
    _draw()
    before = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "hybridpar"):
        run_threads(2, lambda group: hp.checkpoint.load(tmp_path, group=group))
    assert torch.equal(torch.get_rng_state(), before)
    assert [record.message for record in caplog.records] == [
        "saved by 1 ranks, loaded on 2: random generators are left as they are"
    ]


def test_another_margin_starts_with_its_own_state_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_threads(2, _write, tmp_path, Setting(hp.AdaFace(scale=8.0, t_alpha=0.3)))

    def work(group: hp.Group) -> list[float]:
        trainee = Trainee(group, Setting(hp.AdaFace(scale=8.0, t_alpha=0.5)))
        trainee.load(tmp_path)
        return list(trainee.head.margin_state.tolist())

    assert run_threads(2, work) == [[20.0, 100.0]] * 2
    assert "t_alpha=0.3" in caplog.text and "t_alpha=0.5" in caplog.text


def test_a_loaded_state_is_the_trainees_own(tmp_path: Path) -> None:
    """Two loads of one checkpoint do not share memory with each other or with the file."""

    def work(group: hp.Group) -> None:
        first, second = Trainee(group, Setting()), Trainee(group, Setting())
        first.train(0, 2)
        first.save(tmp_path, 2)
        for trainee in (first, second):
            trainee.load(tmp_path)
        first.train(2, 4)
        assert_state(second.state(), dense_run(Setting(), 2)[1])

    run_threads(2, work)
