"""The recipe in MXNet: the model, the training curve and the checkpoints are those of the recipe in torch."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_program
from tests.recipes.launch import losses, run, start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None, reason="needs mxnet (pip install 'hybridpar[mxnet]')"
)

MXNET = "recipes.insightface.train_mxnet"
# Batch statistics are each rank's own in both recipes then.
OPTIONS = ("--model.no-sync-batch-norm",)
STEPS = 12


def _program(text: str) -> dict[str, Any]:
    """What a program on one rank stores in ``results``."""
    whole = "import json\nresults = {}\n" + text + "\nprint('RESULTS' + json.dumps(results))"
    (status,), ((output, complaints),) = run_program(whole, 1)
    assert status == 0, complaints
    found: dict[str, Any] = json.loads(output.partition("RESULTS")[2])
    return found


def _assert_same_curve(found: dict[int, float], expected: dict[int, float], tolerance: float) -> None:
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step in expected:
        assert math.isclose(found[step], expected[step], rel_tol=tolerance), (step, found[step], expected[step])


MODEL = """
import dataclasses
import numpy as np
import torch
from recipes.insightface.gluon.backbone import GluonBackbone, TorchFace
import mxnet as mx
from hybridpar.comm.mxnet.arrays import from_torch
from recipes.insightface.presets import PRESETS
from recipes.insightface.models import build_model

config = PRESETS["glyphs"][1]
config = dataclasses.replace(config, model=dataclasses.replace(config.model, options={"width": 0.5}))
backbone = GluonBackbone(config)
torch.manual_seed(config.seed)
twin = build_model("convnet", image_shape=(1, 32, 32), embedding_size=128, width=0.5)
images, by_output = torch.randn(16, 1, 32, 32), torch.randn(16, 128)

def worst(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())

for step in range(2):
    with mx.autograd.record():
        output = backbone.net(from_torch(images))
    output.backward(from_torch(by_output))
    expected = twin(images)
    twin.zero_grad()
    expected.backward(by_output)
results["output"] = worst(torch.from_numpy(output.asnumpy()), expected.detach())
gradients = dict(backbone.with_gradients())
results["gradients"] = {
    name: worst(gradients[f"backbone.{name}"].grad, each.grad) for name, each in twin.named_parameters()
}
state = backbone.torch_model(step=2).state_dict()
results["names"] = list(state) == list(twin.state_dict())
# MXNet's moving variance is of the batch, torch's of the population.
count = {"blocks.0.1": 16 * 256, "blocks.1.1": 16 * 64, "blocks.2.1": 16 * 16, "blocks.3.1": 16 * 4}
results["moving"] = {}
for name, value in twin.state_dict().items():
    if name.endswith("running_mean"):
        results["moving"][name] = worst(state[name], value)
    if name.endswith("running_var"):
        n = count.get(name.removesuffix(".running_var"), 16)
        results["moving"][name] = worst(state[name], 0.81 + (value - 0.81) * (n - 1) / n)
twin.load_state_dict(state)
twin.eval()
with torch.inference_mode():
    results["predicting"] = worst(TorchFace(backbone.net)(images), twin(images))
# After predicting MXNet keeps weights in an order of its own; what is seen of them is in the usual one.
again = backbone.torch_model(step=2).state_dict()
results["unchanged"] = all(bool((again[name] == value).all()) for name, value in twin.state_dict().items())
"""


def test_the_gluon_model_is_the_torch_model() -> None:
    results = _program(MODEL)
    assert results["names"] and results["unchanged"]
    assert results["output"] < 1e-4 and results["predicting"] < 1e-4
    assert len(results["gradients"]) == 19 and len(results["moving"]) == 10
    different = {
        name: value for part in ("gradients", "moving") for name, value in results[part].items() if not value < 1e-3
    }
    assert not different


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a checkpoint half way and one at the end, and what it exports."""
    out = tmp_path_factory.mktemp("mxnet")
    options = (*OPTIONS, "--steps", str(STEPS), "--run.checkpoint-every", str(STEPS // 2), "--run.export")
    run(2, out, *options, module=MXNET)
    return out


@pytest.mark.slow
def test_the_curve_is_that_of_the_recipe_in_torch(tmp_path: Path) -> None:
    """At a constant learning rate: MXNet's momentum holds the rate of earlier steps, torch's does not."""
    constant = (*OPTIONS, "--steps", str(STEPS), "--optimizer.schedule", "constant", "--optimizer.warmup", "0")
    run(2, tmp_path / "mxnet", *constant, "--accumulate", "3", "--optimizer.clip", "1.0", module=MXNET)
    run(2, tmp_path / "torch", *constant, "--accumulate", "3", "--optimizer.clip", "1.0")
    _assert_same_curve(losses(tmp_path / "mxnet"), losses(tmp_path / "torch"), tolerance=1e-4)
    assert losses(tmp_path / "mxnet")[STEPS] < losses(tmp_path / "mxnet")[1]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
    output = run(2, out, *OPTIONS, "--steps", str(STEPS), module=MXNET)
    assert f"resumed from {out}/checkpoints/step-{STEPS // 2:08d}" in output
    _assert_same_curve(losses(out), losses(trained), tolerance=1e-6)


def test_the_torch_recipe_says_why_it_does_not_go_on_from_a_run_in_mxnet(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    process = start(1, out, *OPTIONS, "--steps", str(STEPS))
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "optimizers: the checkpoint holds ['backbone', 'head'], expected here ['optimizer']" in output


EXPORTED = """
import torch
from pathlib import Path
import hybridpar.mxnet
import mxnet as mx
from hybridpar.comm.mxnet.arrays import from_torch
from recipes.insightface.trained import load_backbone

out = Path({out!r})
trained = load_backbone(out)
images = torch.rand(3, *trained.image_shape) * 2 - 1
net = mx.gluon.SymbolBlock.imports(
    str(out / "export" / "backbone-symbol.json"), ["data"], str(out / "export" / "backbone-0000.params")
)
with torch.no_grad():
    expected = trained.model(images)
found = torch.from_numpy(net(from_torch(images)).asnumpy())
results["worst"] = float((found - expected).abs().max() / expected.abs().max())
results["step"] = trained.step
"""


def test_what_is_exported_for_mxnet_is_what_the_checkpoint_holds_for_torch(trained: Path) -> None:
    results = _program(EXPORTED.format(out=str(trained)))
    assert results["step"] == STEPS
    assert results["worst"] < 1e-5
    assert (trained / "export" / "backbone.onnx").exists()


REFUSED = """
import dataclasses
import torch
import hybridpar as hp
from recipes.common.config import GradientsConfig
from recipes.insightface.config import OptimizerConfig
from recipes.insightface.presets import PRESETS
from recipes.insightface.gluon import backbone, learner
from recipes.insightface.inputs import Batch

base = PRESETS["synthetic"][1]
config = dataclasses.replace(base, batch=8)
changes = {
    "--mode data": {"mode": "data"},
    "--model.sync-batch-norm": {"model": dataclasses.replace(base.model, sync_batch_norm=True)},
    "--optimizer.name adamw": {"optimizer": OptimizerConfig(name="adamw")},
    "--precision bfloat16": {"precision": "bfloat16"},
    "--gradients options": {"gradients": GradientsConfig(top_k=0.1)},
    "iresnet50": {"model": dataclasses.replace(base.model, name="iresnet50")},
    "options": {"model": dataclasses.replace(base.model, options={"depth": 3})},
}
group = hp.Group.alone()
for name, change in changes.items():
    try:
        learner.GluonLearner(dataclasses.replace(config, **change), 20, group, hp.NoTimeline())
    except ValueError as error:
        results[name] = str(error)

# A step with NaN among the features, or among the gradients: nothing has changed.
config = dataclasses.replace(config, gradients=GradientsConfig(wire="bfloat16"))
pupil = learner.GluonLearner(config, 20, group, hp.NoTimeline())
good = Batch(torch.randn(8, 1, 32, 32), torch.arange(8))
bad = Batch(good.images * float("nan"), good.labels)

def state():
    rows = pupil.head.classifier.state_dict()
    whole = {**pupil.backbone.torch_model(0).state_dict(), **{f"head.{name}": value for name, value in rows.items()}}
    return {name: value.clone() for name, value in whole.items()}

def skipped(batch):
    before = state()
    try:
        pupil.step([batch], 0.1)
    except hp.NonFiniteError as error:
        after = state()
        return [str(error), all(bool((after[name] == value).all()) for name, value in before.items())]

first = pupil.step([good], 0.01)
results["features"] = skipped(bad)
exact = hp.clip_grad_norm_
def poisoned(named, *arguments, **options):
    named[0][1].grad[0] = float("nan")
    return exact(named, *arguments, **options)
hp.clip_grad_norm_ = poisoned
results["gradients"] = skipped(good)
hp.clip_grad_norm_ = exact
second = pupil.step([good], 0.01)
results["losses"] = [first.loss, second.loss]
pupil.close()
"""


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    return _program(REFUSED)


@pytest.mark.parametrize(
    "option",
    [
        "--mode data",
        "--model.sync-batch-norm",
        "--optimizer.name adamw",
        "--precision bfloat16",
        "--gradients options",
    ],
)
def test_options_of_the_torch_recipe_alone_are_refused(refused: dict[str, Any], option: str) -> None:
    assert f"expected options that go with MXNet, got {option}" in refused[option]


def test_models_and_options_that_there_are_not_are_named(refused: dict[str, Any]) -> None:
    assert "expected a model that there is in MXNet, convnet, got iresnet50" in refused["iresnet50"]
    assert "model convnet has the options channels, dropout, width; got depth" in refused["options"]


@pytest.mark.parametrize("what", ["features", "gradients"])
def test_a_step_that_is_not_finite_changes_nothing(refused: dict[str, Any], what: str) -> None:
    message, unchanged = refused[what]
    assert ("features must be finite" if what == "features" else "gradient of backbone.") in message
    assert unchanged
    first, second = refused["losses"]
    assert second < first


def test_a_mistake_of_the_user_ends_the_run_in_one_line(tmp_path: Path) -> None:
    process = start(1, tmp_path, *OPTIONS, "--mode", "data", module=MXNET)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "error: expected options that go with MXNet, got --mode data" in output
    assert "recipes/insightface/train.py" not in output, "a traceback"
