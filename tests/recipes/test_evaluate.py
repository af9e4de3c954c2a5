"""The evaluation command on checkpoints and files as users have them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.insightface.data.bin_pairs import write_bin
from recipes.insightface.data.glyphs import glyph_datasets
from recipes.insightface.evaluate import Options, evaluate, format_table, main, read_pairs, write_report
from recipes.insightface.trained import load_backbone
from recipes.insightface.verification import embed, raw_pixel_result, verify
from tests.recipes.checkpoint_files import write_checkpoint


def png(seed: int, noise: int) -> bytes:
    """A picture of an identity: random blocks that the seed fixes, with noise that it does not."""
    blocks = np.random.default_rng(seed).integers(0, 200, (4, 4))
    picture = np.kron(blocks, np.ones((4, 4))) + np.random.default_rng(1000 * seed + noise).integers(0, 50, (16, 16))
    buffer = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_pictures(folder: Path, count: int = 40) -> list[tuple[str, str, bool]]:
    """Pairs of pictures: every even one of one identity."""
    pairs = []
    for pair in range(count):
        same = pair % 2 == 0
        names = (f"{pair}-a.png", f"{pair}-b.png")
        (folder / names[0]).write_bytes(png(pair, 0))
        (folder / names[1]).write_bytes(png(pair if same else 500 + pair, 1))
        pairs.append((*names, same))
    return pairs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "run", step=7, glyphs={"pairs": 200, "verification_identities": 50, "seed": 3})
    return tmp_path / "run"


def test_the_command_prints_a_table_and_writes_the_report(run: Path, tmp_path: Path) -> None:
    pairs = write_pictures(tmp_path)
    images = [(tmp_path / name).read_bytes() for pair in pairs for name in pair[:2]]
    write_bin(tmp_path / "faces.bin", images, [same for _, _, same in pairs])
    listing = "".join(f"{first}\t{second}\t{int(same)}\n" for first, second, same in pairs)
    (tmp_path / "listed.txt").write_text(listing, encoding="utf-8")
    command = [sys.executable, "-m", "recipes.insightface.evaluate", str(run), "--bin", str(tmp_path / "faces.bin")]
    command += ["--pairs", str(tmp_path / "listed.txt"), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 7" in done.stdout
    out = run / "evaluation"
    assert sorted(path.name for path in out.iterdir()) == ["evaluation.json", "roc-faces.png", "roc-listed.png"]
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    faces, listed = report["results"]
    assert report["step"] == 7
    assert faces["model"]["name"] == "faces"
    # The same pictures in the same order, by two ways.
    assert {**faces["model"], "name": ""} == {**listed["model"], "name": ""}
    assert faces["raw_pixels"]["accuracy"] > 0.9
    for line in ("faces   40     model", "faces   40     raw pixels", "listed  40     model"):
        assert line in done.stdout


def test_figures_are_those_of_the_parts(run: Path) -> None:
    trained = load_backbone(run)
    (pairs,) = read_pairs(Options(checkpoint=run, glyphs=True), trained)
    got = evaluate(trained.model, pairs, flip=True, folds=5)
    assert got.model == verify(embed(trained.model, pairs.images, flip=True), pairs, folds=5)
    assert got.raw_pixels == raw_pixel_result(pairs, folds=5)


def test_glyphs_are_split_as_in_training(run: Path) -> None:
    (pairs,) = read_pairs(Options(checkpoint=run, glyphs=True), load_backbone(run))
    _, expected = glyph_datasets(image_shape=(1, 16, 16), pairs=200, verification_identities=50, seed=3)
    assert torch.equal(pairs.images, expected.images)
    assert torch.equal(pairs.first, expected.first)
    _, other = glyph_datasets(image_shape=(1, 16, 16), pairs=200, verification_identities=50, seed=4)
    assert not torch.equal(pairs.images, other.images)


@pytest.mark.parametrize("asked", [None, True, False])
def test_mirror_images_are_used_as_in_training_unless_asked_otherwise(
    tmp_path: Path, asked: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, flip=True, glyphs={"pairs": 40, "verification_identities": 20})
    main(Options(checkpoint=tmp_path, glyphs=True, flip=asked, folds=2))
    assert ("not used" in capsys.readouterr().out) == (asked is False)


def test_the_table_marks_rates_that_cannot_be_resolved(run: Path) -> None:
    trained = load_backbone(run)
    (pairs,) = read_pairs(Options(checkpoint=run, glyphs=True), trained)
    lines = format_table([evaluate(trained.model, pairs, flip=False)]).splitlines()
    assert lines[0].split()[:5] == ["pairs", "count", "embedding", "accuracy", "AUC"]
    # 100 pairs of different identities resolve 1e-1 and 1e-2.
    assert [line.split()[-2:] for line in lines[2:]] == [["-", "-"], ["-", "-"]]
    assert all(line.split().count("-") == 2 for line in lines[2:])


def test_names_of_sets_cannot_leave_the_folder(run: Path, tmp_path: Path) -> None:
    trained = load_backbone(run)
    (pairs,) = read_pairs(Options(checkpoint=run, glyphs=True), trained)
    odd = type(pairs)(pairs.images, pairs.first, pairs.second, pairs.same, name="../../a b/c")
    out = tmp_path / "out"
    written = write_report([evaluate(trained.model, odd, flip=False)], out, step=1)
    assert {path.parent for path in written} == {out}


def test_nothing_to_evaluate_and_half_a_pair_list_are_refused(run: Path, tmp_path: Path) -> None:
    trained = load_backbone(run)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        read_pairs(Options(checkpoint=run), trained)
    with pytest.raises(ValueError, match="belong together"):
        read_pairs(Options(checkpoint=run, root=tmp_path), trained)
