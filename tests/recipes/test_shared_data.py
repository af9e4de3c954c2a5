"""Real record sets, folders and faces train, where a checkout has them beside it; they are no part of the project."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from recipes.insightface import train
from recipes.insightface.config import TrainConfig
from recipes.insightface.presets import PRESETS
from tests.recipes.data.shared import SHARED, needs_shared

RECORDS = SHARED / "omniglot_rec"
FOLDERS = SHARED / "omniglot_train_folders.zip"
FACES = SHARED / "orl_faces_23x28.zip"


def _config(preset: str, out: Path, steps: int, **data: object) -> TrainConfig:
    base = PRESETS[preset][1]
    run = dataclasses.replace(base.run, out=out, quiet=True, tensorboard=False, export=False, evaluate_every=10_000)
    return dataclasses.replace(base, data=dataclasses.replace(base.data, **data), run=run, steps=steps, threads=1)


def _accuracies(printed: str) -> tuple[float, float]:
    """Of the model and of raw pixels, as the closing table says."""
    model, raw = (float(text) for text in re.findall(r"(?:model|raw pixels) +(0\.\d+) \+-", printed))
    return model, raw


@needs_shared
def test_a_record_set_that_mxnet_wrote_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(_config("characters", tmp_path, 150, path=RECORDS, bins=(RECORDS / "omni.bin",)))
    model, raw = _accuracies(capsys.readouterr().out)
    assert 0.55 < raw < 0.65
    assert model > 0.80  # after 150 of the preset's 1,600 steps


@needs_shared
def test_folders_in_a_zip_file_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config("characters", tmp_path, 80, kind="folders", path=FOLDERS, verification_identities=40)
    train.main(config)
    model, raw = _accuracies(capsys.readouterr().out)
    assert model > raw + 0.1


@needs_shared
def test_faces_of_people_never_trained_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(_config("small-faces", tmp_path, 100, path=FACES))
    model, raw = _accuracies(capsys.readouterr().out)
    assert model > raw + 0.03
