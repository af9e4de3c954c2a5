"""Reading a trained backbone back without ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridpar as hp
from recipes.common.checkpoints import find_checkpoint, run_of
from recipes.insightface.export import export_class_centers
from recipes.insightface.models import build_model
from recipes.insightface.trained import load_backbone
from tests.recipes.checkpoint_files import write_checkpoint


def rewrite(directory: Path, **recipe: object) -> None:
    """Change the recipe that a manifest describes; None removes a field."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["extra"]["recipe"].update(recipe)
    for name in [name for name, value in recipe.items() if value is None]:
        del manifest["extra"]["recipe"][name]
    path.write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "options"),
    [("convnet", {"channels": [4, 8]}), ("mobilefacenet", {"width": 0.125}), ("iresnet18", {"width": 0.0625})],
)
def test_the_loaded_model_gives_the_embeddings_of_the_saved_one(
    tmp_path: Path, model: str, options: dict[str, object]
) -> None:
    directory, saved = write_checkpoint(tmp_path, step=12, model=model, model_options=options, flip=True)
    trained = load_backbone(directory)
    images = torch.randn(5, 1, 16, 16)
    torch.testing.assert_close(trained.model(images), saved(images), rtol=0, atol=0)
    assert not trained.model.training
    assert (trained.image_shape, trained.embedding_size, trained.flip) == ((1, 16, 16), 8, True)
    assert (trained.step, trained.directory, dict(trained.config)) == (12, directory, {"seed": 7})
    assert dict(trained.glyphs) == {}


def test_the_options_of_the_glyphs_come_along(tmp_path: Path) -> None:
    directory, _ = write_checkpoint(tmp_path, glyphs={"seed": 3, "pairs": 600})
    assert dict(load_backbone(directory).glyphs) == {"seed": 3, "pairs": 600}


def test_a_run_means_its_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, step=9)
    newest, _ = write_checkpoint(tmp_path, step=10)
    unfinished, _ = write_checkpoint(tmp_path, step=11)
    (unfinished / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path) == newest
    assert "step-00000011 has no manifest.json" in caplog.text
    assert find_checkpoint(tmp_path / "checkpoints") == newest
    assert run_of(newest) == tmp_path


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=99_999_999)
    newest, _ = write_checkpoint(tmp_path, step=100_000_000)
    assert find_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("kind", ["missing", "empty", "unfinished only"])
def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    if kind != "missing":
        run.mkdir()
    if kind == "unfinished only":
        directory, _ = write_checkpoint(run)
        (directory / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"run, which holds no complete checkpoint"):
        load_backbone(run)


def test_weights_that_do_not_fit_are_refused_with_both_sides_named(tmp_path: Path) -> None:
    directory, _ = write_checkpoint(tmp_path)
    rewrite(directory, embedding_size=16)
    with pytest.raises(ValueError, match=r"(?s)convnet with embedding_size=16.*size mismatch"):
        load_backbone(directory)


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    directory, saved = write_checkpoint(tmp_path)
    weights = saved.state_dict()
    del weights["embedding.weight"]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)Missing key.*embedding\.weight"):
        load_backbone(directory)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    directory, _ = write_checkpoint(tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*another checkpoint"):
        load_backbone(directory)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_backbone(directory)


def test_a_checkpoint_of_the_package_is_read_with_its_synchronised_normalisation(tmp_path: Path) -> None:
    group = hp.Group.alone()
    backbone = build_model("convnet", image_shape=(1, 16, 16), embedding_size=8, width=0.25)
    model = hp.DataParallel(hp.SyncBatchNorm.convert(backbone, group), group=group)
    model(torch.randn(8, 1, 16, 16) + 0.5)
    head = hp.ShardedClassifier(8, 11, group=group)
    recipe = {"model": "convnet", "model_options": {"width": 0.25}, "embedding_size": 8, "image_shape": [1, 16, 16]}
    extra = {"recipe": {**recipe, "num_classes": 11, "flip": False}}
    hp.checkpoint.save(tmp_path / "checkpoints", step=2, model=model, head=head, extra=extra, group=group)
    trained = load_backbone(tmp_path)
    images = torch.randn(3, 1, 16, 16)
    torch.testing.assert_close(trained.model(images), model.eval()(images))
    assert trained.step == 2
    export_class_centers(tmp_path, tmp_path / "centers.safetensors")
    centers = load_file(tmp_path / "centers.safetensors")["centers"]
    torch.testing.assert_close(centers, head.weight.detach() / head.weight.detach().norm(dim=1, keepdim=True))


def test_manifests_of_others_are_refused(tmp_path: Path) -> None:
    directory, _ = write_checkpoint(tmp_path)
    rewrite(directory, flip=None, model_options=None)
    with pytest.raises(ValueError, match="lacks flip, model_options"):
        load_backbone(directory)
    for text, message in (("{}", "not written by"), ("[]", "JSON object.*got list"), ("{", "not valid JSON")):
        (directory / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_backbone(directory)
