"""A checkpoint is there whole or not at all, whenever the writer dies and whatever happens to the files."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hybridpar as hp
from hybridpar.checkpoint import files
from tests.head.cases import errors_of
from tests.ranks import run_threads


def _model(value: float) -> nn.Module:
    model = nn.Linear(8, 8)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _save(directory: Path, step: int, value: float, **arguments: Any) -> None:
    extra = {"value": value}
    hp.checkpoint.save(directory, step=step, model=_model(value), extra=extra, group=hp.Group.alone(), **arguments)


def _load(directory: Path) -> tuple[int, float]:
    """The step and the value, after checking that model and extra are of one and the same checkpoint."""
    model = _model(-1.0)
    found = hp.checkpoint.load(directory, model=model, group=hp.Group.alone())
    value = found.extra["value"]
    assert all(bool((parameter == value).all()) for parameter in model.parameters())
    assert found.skipped == ()
    return found.step, value


class _Death(BaseException):
    """No handler of errors runs when a process dies."""


def _dies_at(monkeypatch: pytest.MonkeyPatch, moment: int, error: type[BaseException]) -> Callable[[], int]:
    """Make the `moment`-th change of the file system fail; returns the count of those that came to pass."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == moment:
                raise error(28, "no space left on device")
            count += 1
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(files, "save_file", counted(files.save_file))
    for name in ("rename", "mkdir", "write_text"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    # One file at a time, so that the writer may die in the middle of a removal.
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


SCENES: dict[str, tuple[int, dict[str, Any]]] = {
    "next-step": (2, {}),
    "next-step-and-removal-of-the-old-one": (2, {"keep": 1}),
    "the-same-step-again": (1, {}),
}


@pytest.mark.parametrize("error", [_Death, OSError])
@pytest.mark.parametrize("scene", SCENES)
def test_a_crash_at_any_instant_leaves_a_whole_checkpoint(
    scene: str, error: type[BaseException], tmp_path: Path
) -> None:
    step, arguments = SCENES[scene]
    outcomes = []
    for moment in range(200):
        directory = tmp_path / str(moment)
        _save(directory, 1, 10.0)
        with pytest.MonkeyPatch.context() as patch:
            count = _dies_at(patch, moment, error)
            try:
                _save(directory, step, 20.0, **arguments)
                died = False
            except error:
                died = True
        outcomes.append(_load(directory))
        assert outcomes[-1] in ((1, 10.0), (step, 20.0))
        newest = hp.checkpoint.newest(directory)
        assert newest is not None and (newest / "manifest.json").is_file()
        _save(directory, 3, 30.0, keep=1)
        assert _load(directory) == (3, 30.0)
        assert [path.name for path in directory.iterdir()] == ["step-00000003"]
        if not died:
            break
    assert not died and moment == count() > 10, "not every instant was tried"
    assert {outcomes[0], outcomes[-1]} == {(1, 10.0), (step, 20.0)}
    assert outcomes == sorted(outcomes)  # once the new one is there, it stays


def test_everything_is_forced_to_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name itself afterwards: a machine that loses power keeps what was forced, and little else."""
    trail: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        trail.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def watched_rename(path: Path, target: Path) -> Path:
        trail.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    _save(tmp_path / "checkpoints", 1, 10.0)
    named = trail.index("rename .step-00000001.partial step-00000001")
    written = {path.name for path in (tmp_path / "checkpoints" / "step-00000001").iterdir()}
    assert len(written) == 4
    assert set(trail[:named]) == {f"sync {name}" for name in written} | {"sync .step-00000001.partial"}
    assert trail[named - 2 : named] == ["sync manifest.json", "sync .step-00000001.partial"]
    assert trail[named + 1 :] == ["sync checkpoints"]


@pytest.mark.parametrize("moment", range(0, 14, 3))
def test_an_error_of_one_of_two_ranks_is_raised_on_both(moment: int, tmp_path: Path) -> None:
    _save(tmp_path, 1, 10.0)

    def work(group: hp.Group) -> None:
        hp.checkpoint.save(tmp_path, step=2, model=_model(20.0), group=group)

    with pytest.MonkeyPatch.context() as patch:
        _dies_at(patch, moment, OSError)
        errors = errors_of(2, work)
    assert all(isinstance(error, OSError) and "no space left" in str(error) for error in errors)
    assert _load(tmp_path) == (1, 10.0)


PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import hybridpar as hp
torch.set_num_threads(1)
directory, draw, group = Path(sys.argv[1]), random.Random(int(sys.argv[2])), hp.Group.alone()

def model(value):
    made = nn.Linear(200, 200)
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made

def write(step):
    while True:
        hp.checkpoint.save(directory, step=step, model=model(step), extra={"value": step}, keep=2, group=group)
        step += 1

hp.checkpoint.save(directory, step=0, model=model(0), extra={"value": 0}, group=group)
last = 0
for turn in range(12):
    before = hp.checkpoint.newest(directory).name
    child = os.fork()
    if child == 0:
        write(last)
    # Now and then after a save that was surely finished, however slow the machine; else at any moment at all.
    while turn % 3 == 0 and hp.checkpoint.newest(directory).name <= before:
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = model(-1)
    checkpoint = hp.checkpoint.load(directory, model=found, group=group)
    assert checkpoint.skipped == (), checkpoint.skipped
    assert checkpoint.step == checkpoint.extra["value"] >= last, (checkpoint, last)
    assert all(bool((parameter == checkpoint.step).all()) for parameter in found.parameters())
    last = checkpoint.step
print(f"<last {last}>")
"""


def test_a_writer_that_is_killed_again_and_again_never_loses_the_last_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "7"],
        env=environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split("<last ")[1].split(">")[0]) > 0, "no save was ever finished"


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / "manifest.json"
        content = json.loads(path.read_text())
        changed = change(content)
        path.write_text(json.dumps(content if changed is None else changed))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no-manifest": (lambda path: (path / "manifest.json").unlink(), r"expected manifest\.json, got none"),
    "manifest-cut": (
        lambda path: _truncate(path / "manifest.json") or _truncate(path / "manifest.json"),
        "expected JSON",
    ),
    "manifest-empty": (lambda path: (path / "manifest.json").write_text(""), "expected JSON"),
    "manifest-binary": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "expected JSON"),
    "manifest-a-list": (_manifest(lambda _: [1, 2]), "expected checkpoint format 1, got 'list'"),
    "unknown-format": (_manifest(lambda m: m.update(format=99)), "expected checkpoint format 1, got 99"),
    "missing-key": (_manifest(lambda m: m.pop("files") and None), r"got none of \['files'\]"),
    "file-cut": (
        lambda path: _truncate(path / "model.safetensors"),
        r"model\.safetensors: expected \d+ bytes, got \d+",
    ),
    "file-gone": (lambda path: (path / "model.safetensors").unlink(), r"expected \d+ bytes, got no file"),
    "byte-flipped": (
        lambda path: _flip(path / "model.safetensors"),
        r"model\.safetensors: expected sha256 .* is corrupt",
    ),
    "random-flipped": (lambda path: _flip(next(path.glob("random-*"))), "expected sha256 .* is corrupt"),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    what: str, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGES[what]
    _save(tmp_path, 1, 10.0)
    _save(tmp_path, 2, 20.0)
    damage(tmp_path / "step-00000002")

    def work(group: hp.Group) -> tuple[hp.checkpoint.Checkpoint, float]:
        model = _model(-1.0)
        found = hp.checkpoint.load(tmp_path, model=model, group=group)
        return found, next(model.parameters()).mean().item()

    with caplog.at_level(logging.WARNING, "hybridpar"):
        for found, value in run_threads(ranks, work):
            assert (found.step, value, found.extra, found.path.name) == (1, 10.0, {"value": 10.0}, "step-00000001")
            assert len(found.skipped) == 1 and "step-00000002" in found.skipped[0]
            assert re.search(reason, found.skipped[0])
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once, whatever the number of ranks
    assert found.skipped[0] in caplog.text and "using step-00000001 instead" in caplog.text

    def explicit(group: hp.Group) -> None:
        hp.checkpoint.load(tmp_path, step=2, group=group)

    for error in errors_of(ranks, explicit):
        assert type(error) is FileNotFoundError
        with pytest.raises(FileNotFoundError, match=reason):
            raise error


def test_hashes_are_not_compared_where_that_is_not_wanted(tmp_path: Path) -> None:
    _save(tmp_path, 2, 20.0)
    _flip(tmp_path / "step-00000002" / "model.safetensors")
    model = _model(-1.0)
    hp.checkpoint.load(tmp_path, model=model, verify=False, group=hp.Group.alone())
    assert any(bool((parameter != 20.0).any()) for parameter in model.parameters())


def test_a_file_that_safetensors_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    _save(tmp_path, 2, 20.0)
    path = tmp_path / "step-00000002" / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)

    def work(group: hp.Group) -> None:
        hp.checkpoint.load(tmp_path, model=_model(0.0), verify=False, group=group)

    assert all(isinstance(error, Exception) for error in errors_of(2, work))


def test_nothing_to_load_is_said_with_every_reason(tmp_path: Path) -> None:
    _save(tmp_path, 1, 10.0)
    _save(tmp_path, 2, 20.0)
    _flip(tmp_path / "step-00000001" / "model.safetensors")
    (tmp_path / "step-00000002" / "manifest.json").unlink()

    def work(group: hp.Group, directory: Path) -> None:
        hp.checkpoint.load(directory, model=_model(0.0), group=group)

    for error in errors_of(2, work, tmp_path):
        assert type(error) is FileNotFoundError
        assert "step-00000001" in str(error) and "corrupt" in str(error) and "manifest.json" in str(error)
    for directory in (tmp_path / "none", tmp_path / "step-00000001" / "model.safetensors"):
        for error in errors_of(2, work, directory):
            assert type(error) is FileNotFoundError and "there is no directory step-*" in str(error)


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".hidden").mkdir()
    for step in (1, 2, 3):
        _save(tmp_path, step, float(step), keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-notes.txt", "step-1", ".hidden", "step-00000003"}
    assert _load(tmp_path) == (3, 3.0)
