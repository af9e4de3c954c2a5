"""ONNX files against torch in onnxruntime; class centers against NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from recipes.insightface import export
from recipes.insightface.export import export_class_centers, export_onnx
from recipes.insightface.models import build_model
from tests.recipes.checkpoint_files import write_checkpoint


def used_model(name: str, **options: object) -> nn.Module:
    """A small model whose batch statistics are not those of a fresh one."""
    torch.manual_seed(0)
    model = build_model(name, image_shape=(1, 16, 16), embedding_size=8, **options)
    model(torch.randn(8, 1, 16, 16) + 0.5)
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [("convnet", {"channels": (4, 8)}), ("mobilefacenet", {"width": 0.125}), ("iresnet18", {"width": 0.0625})],
)
def test_onnx_gives_the_embeddings_of_torch_for_any_batch_size(
    tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    model = used_model(name, **options)
    path = tmp_path / "model.onnx"
    assert 0 <= export_onnx(model, path, image_shape=(1, 16, 16)) <= 1e-4
    assert model.training  # given back as it was
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    model.eval()
    for batch in (1, 3, 17):
        images = torch.randn(batch, 1, 16, 16)
        (actual,) = session.run(["embeddings"], {"images": images.numpy()})
        np.testing.assert_allclose(actual, model(images).detach().numpy(), atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_file_that_differs_from_torch_is_an_error_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="differs from torch"):
        export_onnx(used_model("convnet", channels=(4,)), path, image_shape=(1, 16, 16))
    assert not path.exists()


def test_the_measured_difference_is_absolute_below_one_and_relative_above(tmp_path: Path) -> None:
    model = used_model("convnet", channels=(4,)).eval()
    normalisation = model.get_submodule("embedding_norm")
    assert isinstance(normalisation, nn.BatchNorm1d)
    path = tmp_path / "model.onnx"
    for bias, difference in ((0.0, 0.25), (100.0, 0.0025)):
        # Embeddings are then all but equal to the bias, and the file's are 0.25 below the model's.
        nn.init.constant_(normalisation.weight, 1e-3)
        nn.init.constant_(normalisation.bias, bias)
        export_onnx(model, path, image_shape=(1, 16, 16))
        nn.init.constant_(normalisation.bias, bias + 0.25)
        measured = export.onnx_difference(model, path, image_shape=(1, 16, 16))
        assert measured == pytest.approx(difference, rel=0.01)


def test_a_diverged_model_is_not_exported(tmp_path: Path) -> None:
    model = used_model("convnet", channels=(4,))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="differs from torch by nan"):
        export_onnx(model, tmp_path / "model.onnx", image_shape=(1, 16, 16))


def shards_of(owner: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows of each rank, where owner[k] is the rank of class k."""
    ids = [torch.nonzero(owner == rank)[:, 0] for rank in range(int(owner.max()) + 1)]
    return [(mine, weight[mine].contiguous()) for mine in ids]


@pytest.mark.parametrize("rule", ["contiguous", "striped", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_centers_are_the_normalised_rows_in_order_of_class(tmp_path: Path, rule: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(23, 8, generator=generator).to(dtype)
    owners = {
        "contiguous": torch.arange(23) // 10,
        "striped": torch.arange(23) % 3,
        "scattered": torch.randint(0, 4, (23,), generator=generator),
    }
    directory, _ = write_checkpoint(tmp_path, shards=shards_of(owners[rule], weight))
    path = tmp_path / "centers.safetensors"
    assert export_class_centers(directory, path) == (23, 8)
    written = load_file(path)
    assert sorted(written) == ["centers", "class_ids"]
    assert written["class_ids"].dtype == np.int64
    assert written["centers"].dtype == np.float32
    np.testing.assert_array_equal(written["class_ids"], np.arange(23))
    rows = weight.double().numpy()
    np.testing.assert_allclose(written["centers"], rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6)


def test_class_centers_pass_in_chunks_and_keep_large_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_CHUNK_ROWS", 4)
    ids = torch.tensor([2**40 + 1, 5, 2**24 + 1, 0, 17, 9, 3, 2**33, 1], dtype=torch.int64)
    weight = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    directory, _ = write_checkpoint(tmp_path, shards=[(ids[:6], weight[:6]), (ids[6:], weight[6:])])
    export_class_centers(directory, tmp_path / "centers.safetensors")
    written = load_file(tmp_path / "centers.safetensors")
    order = np.argsort(ids.numpy())
    np.testing.assert_array_equal(written["class_ids"], ids.numpy()[order])
    rows = weight.numpy()[order]
    np.testing.assert_allclose(written["centers"], rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6)


def test_an_empty_shard_is_no_obstacle(tmp_path: Path) -> None:
    shards = [(torch.arange(2), torch.eye(2)), (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))]
    directory, _ = write_checkpoint(tmp_path, shards=shards)
    assert export_class_centers(directory, tmp_path / "centers.safetensors") == (2, 2)
    np.testing.assert_array_equal(load_file(tmp_path / "centers.safetensors")["centers"], np.eye(2))


def test_incomplete_or_contradictory_heads_are_refused(tmp_path: Path) -> None:
    rows = torch.eye(3)
    out = tmp_path / "centers.safetensors"
    without, _ = write_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match="found none"):
        export_class_centers(without, out)
    missing, _ = write_checkpoint(tmp_path / "b", shards=[(torch.arange(3), rows), (torch.arange(3, 6), rows)])
    (missing / "head-00000-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected 2 head shards.*got 1.*head-00000-of-00002"):
        export_class_centers(missing, out)
    repeated, _ = write_checkpoint(tmp_path / "c", shards=[(torch.arange(3), rows), (torch.arange(2, 5), rows)])
    with pytest.raises(ValueError, match="class 2 is in more than one row"):
        export_class_centers(repeated, out)
    sizes, _ = write_checkpoint(tmp_path / "d", shards=[(torch.arange(3), rows), (torch.arange(3, 5), torch.eye(2))])
    with pytest.raises(ValueError, match=r"one embedding size.*\[2, 3\]"):
        export_class_centers(sizes, out)
    counts, _ = write_checkpoint(tmp_path / "e", shards=[(torch.arange(4), rows)])
    with pytest.raises(ValueError, match="4 class_ids for 3 rows"):
        export_class_centers(counts, out)
    assert not out.exists()


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, model = write_checkpoint(run, step=5, shards=[(torch.arange(6), torch.randn(6, 8))])
    out = tmp_path / "new" / "folder"
    command = [sys.executable, "-m", "recipes.insightface.export", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 5" in done.stdout
    assert "6 class centers of 8 elements" in done.stdout
    session = onnxruntime.InferenceSession(str(out / "backbone.onnx"), providers=["CPUExecutionProvider"])
    images = torch.randn(2, 1, 16, 16)
    (actual,) = session.run(None, {"images": images.numpy()})
    np.testing.assert_allclose(actual, model(images).detach().numpy(), atol=1e-4)
    assert load_file(out / "class_centers.safetensors")["centers"].shape == (6, 8)


def test_the_command_reports_mistakes_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.insightface.export", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected a checkpoint directory")
    assert "Traceback" not in done.stderr
