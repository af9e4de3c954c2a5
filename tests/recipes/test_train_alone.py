"""One rank, in this process: what the recipe refuses, says, and leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from recipes.common.config import RunConfig
from recipes.insightface import evaluate, train
from recipes.insightface.config import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from recipes.insightface.data import write_bin
from recipes.insightface.data.decode import encode_png
from recipes.insightface.presets import PRESETS
from recipes.insightface.trained import load_backbone
from tests.ranks import run_program


def _config(out: Path, **changes: object) -> TrainConfig:
    base = TrainConfig(
        data=DataConfig(kind="synthetic", identities=20, images_per_identity=4, image_size=16, channels=1),
        model=ModelConfig(name="convnet", options={"width": 0.25}, embedding_size=8),
        optimizer=OptimizerConfig(learning_rate=0.01),
        run=RunConfig(out=out, tensorboard=False, export=False, quiet=True, log_every=1),
        batch=8,
        steps=2,
        threads=1,
    )
    return dataclasses.replace(base, **changes)


def test_glyphs_beat_raw_pixels_on_characters_never_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = PRESETS["glyphs"][1]
    run = dataclasses.replace(preset.run, out=tmp_path, quiet=True, log_every=5, evaluate_every=200)
    train.main(dataclasses.replace(preset, run=run, steps=200, threads=1))
    printed = capsys.readouterr().out
    model, raw = (float(text) for text in re.findall(r"(?:model|raw pixels) +(0\.\d+) \+-", printed))
    assert 0.82 < raw < 0.90
    assert model > 0.93
    for name in ("loss.png", "throughput.png", "accuracy.png", "roc-glyphs.png"):
        assert (tmp_path / "plots" / name).stat().st_size > 5000
        assert str(tmp_path / "plots" / name) in printed
    checkpoint = tmp_path / "checkpoints" / "step-00000200"
    assert str(checkpoint) in printed
    assert list((tmp_path / "tensorboard").iterdir())

    # What was exported computes what was trained, and the report can be made again from the checkpoint alone.
    trained = load_backbone(tmp_path)
    images = torch.rand(3, 1, 32, 32) * 2 - 1
    session = onnxruntime.InferenceSession(str(tmp_path / "export" / "backbone.onnx"))
    with torch.no_grad():
        expected = trained.model(images).numpy()
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=1e-4)
    centers = load_file(tmp_path / "export" / "class_centers.safetensors")
    assert centers["class_ids"].tolist() == list(range(len(centers["class_ids"])))
    assert len(centers["class_ids"]) == json.loads((checkpoint / "manifest.json").read_text())["head"]["num_classes"]
    evaluate.main(evaluate.Options(checkpoint=tmp_path, glyphs=True, out=tmp_path / "again"))
    again = capsys.readouterr().out
    assert f"{model:.4f} +-" in again


def test_an_empty_data_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    data = DataConfig(kind="folders", path=tmp_path / "empty", image_size=16, channels=1)
    with pytest.raises(ValueError, match="empty"):
        train.main(_config(tmp_path / "out", data=data))
    with pytest.raises(ValueError, match=r"expected --data\.path, got none"):
        train.main(_config(tmp_path / "out", data=DataConfig(kind="records")))


def test_an_output_folder_that_cannot_be_written_to_is_refused_before_work_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"--run\.out .*file/out: expected a folder that can be written to"):
        train.main(_config(tmp_path / "file" / "out"))


def test_resuming_with_another_architecture_or_class_count_names_both(tmp_path: Path) -> None:
    train.main(_config(tmp_path))
    other = ModelConfig(name="convnet", options={"width": 0.5}, embedding_size=8)
    with pytest.raises(ValueError, match=r"another architecture: blocks.*float32\[8.*in the checkpoint.*float32\[16"):
        train.main(_config(tmp_path, model=other, steps=4))
    more = DataConfig(kind="synthetic", identities=40, images_per_identity=2, image_size=16, channels=1)
    with pytest.raises(ValueError, match="num_classes is 20 in the checkpoint and 40 in the head"):
        train.main(_config(tmp_path, data=more, steps=4))
    fewer = DataConfig(kind="synthetic", identities=20, images_per_identity=2, image_size=16, channels=1)
    with pytest.raises(ValueError, match="num_samples 80, this run has 40"):
        train.main(_config(tmp_path, data=fewer, steps=4))


def test_resuming_with_another_seed_is_refused_and_with_other_optimizer_options_obeyed(tmp_path: Path) -> None:
    train.main(_config(tmp_path))
    with pytest.raises(ValueError, match="data seed 0, this run has 1"):
        train.main(_config(tmp_path, seed=1, steps=4))
    train.main(_config(tmp_path, optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.25), steps=4))
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    (group,) = manifest["optimizers"]["optimizer"]["groups"]
    assert group["options"]["weight_decay"] == 0.25


def test_pairs_that_no_verification_can_use_are_refused_at_the_start(tmp_path: Path) -> None:
    images = [encode_png(np.full((1, 16, 16), value, dtype=np.uint8)) for value in range(24)]
    data = DataConfig(kind="synthetic", image_size=16, channels=1, bins=(tmp_path / "few.bin",))
    write_bin(tmp_path / "few.bin", images[:8], [True, False] * 2)
    with pytest.raises(ValueError, match=r"few: expected at least 10 pairs, of both kinds, got 2 .* and 2"):
        train.main(_config(tmp_path / "out", data=data))
    write_bin(tmp_path / "few.bin", images, [True] * 12)
    with pytest.raises(ValueError, match=r"got 12 of the same and 0 of different"):
        train.main(_config(tmp_path / "out", data=data))
    write_bin(tmp_path / "few.bin", images, [True, False] * 6)
    twice = dataclasses.replace(data, bins=(tmp_path / "few.bin", tmp_path / "few.bin"))
    with pytest.raises(ValueError, match="got few twice"):
        train.main(_config(tmp_path / "out", data=twice))


def test_what_only_the_end_of_a_run_needs_is_not_loaded_before() -> None:
    """80 MB in each rank."""
    program = """
import sys
import recipes.insightface.train
large = {"matplotlib", "onnxruntime", "sklearn", "tensorboard"} & {name.split(".")[0] for name in sys.modules}
assert not large, large
"""
    statuses, outputs = run_program(program, 1)
    assert statuses == [0], outputs


@pytest.mark.parametrize("optimizer", ["shared", "sgd", "adamw", "adagrad"])
def test_accumulated_micro_batches_give_the_step_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Any
) -> None:
    """With a backbone that has no batch norm, for the statistics of a micro-batch are its own."""

    def linear(name: str, *, image_shape: tuple[int, int, int], embedding_size: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(image_shape), embedding_size))

    monkeypatch.setattr("recipes.insightface.recognizer.build_model", linear)
    curves = []
    for accumulate in (1, 3):
        out = tmp_path / str(accumulate)
        model = ModelConfig(name="linear", embedding_size=8, channels_last=False)
        head = HeadConfig(optimizer=optimizer)
        train.main(_config(out, model=model, head=head, batch=12, accumulate=accumulate, steps=5))
        curves.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][-1] < curves[0][0]


def test_a_half_written_checkpoint_is_passed_over_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(out=tmp_path, tensorboard=False, export=False, quiet=True, log_every=1, checkpoint_every=1)
    train.main(_config(tmp_path, run=run))
    newest = tmp_path / "checkpoints" / "step-00000002"
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:100])
    capsys.readouterr()
    train.main(_config(tmp_path, run=run, steps=3))
    printed = capsys.readouterr().out
    assert "resumed from" in printed
    assert "step 1; skipped" in printed
    assert "model.safetensors: expected" in printed
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()


def test_never_resume_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    train.main(_config(tmp_path))
    run = RunConfig(out=tmp_path, tensorboard=False, export=False, quiet=True, resume="never")
    with pytest.raises(ValueError, match=r"expected no checkpoints with --run\.resume never"):
        train.main(_config(tmp_path, run=run))


def test_unknown_names_and_impossible_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="margin arcface has the options"):
        train.main(_config(tmp_path, head=dataclasses.replace(HeadConfig(), margin_options={"m": 1.0})))
    with pytest.raises(ValueError, match=r"even.*striped"):
        train.main(_config(tmp_path, head=dataclasses.replace(HeadConfig(), rule="unheard-of")))
    with pytest.raises(ValueError, match="--plugins: expected a Python file"):
        train.main(_config(tmp_path, plugins=("missing.py",)))
    with pytest.raises(ValueError, match="accumulate divides"):
        _config(tmp_path, batch=8, accumulate=3)
    with pytest.raises(ValueError, match="at least 2 samples a rank and pass"):
        train.main(_config(tmp_path, batch=8, accumulate=8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "data"},
            "head.optimizer sgd: expected --mode hybrid with it, because rows step in the backward pass",
        ),
        (
            {"mode": "data", "optimizer": OptimizerConfig(clip=1.0)},
            "head.optimizer sgd: expected --mode hybrid, --optimizer.clip 0 with it",
        ),
    ],
)
def test_what_a_head_with_an_optimizer_of_its_own_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _config(tmp_path, head=HeadConfig(optimizer="sgd"), **options)
    with pytest.raises(ValueError, match=r"head.sample_rate: expected a share in \(0, 1\], got 0"):
        HeadConfig(sample_rate=0)
    with pytest.raises(ValueError, match=r"head.hard_share: expected a share in \[0, 1\], and 0 where all classes"):
        HeadConfig(hard_share=0.5)
    with pytest.raises(ValueError, match=r"head.state bfloat16, head.state-dir: expected --head.optimizer sgd, adamw"):
        HeadConfig(state="bfloat16", state_dir=tmp_path)


def test_steps_with_non_finite_features_are_skipped_and_ten_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def poisoned(images: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(len(images))
        pixels = images.float() / 255
        return pixels * torch.nan if len(calls) in bad else pixels

    monkeypatch.setattr("recipes.insightface.inputs.augment", poisoned)
    bad = {2}
    train.main(_config(tmp_path / "one", steps=4))
    assert "step 2 is skipped: features must be finite" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] is None for record in records] == [False, True, False, False]
    saved = load_file(tmp_path / "one" / "checkpoints" / "step-00000004" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.values()), "batch norm took the bad batch in"
    calls.clear()
    bad = set(range(1, 100))
    with pytest.raises(ArithmeticError, match="features must be finite"):
        train.main(_config(tmp_path / "all", steps=40))
    assert len(calls) == 10
