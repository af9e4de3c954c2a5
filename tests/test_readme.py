"""The README's script runs as it stands there, on one rank and with fewer classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridpar as hp

README = Path(__file__).parents[1] / "README.md"


def test_the_script_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert "1_000_000" in script
    monkeypatch.chdir(tmp_path)
    batches = [(torch.randn(4, 6), torch.tensor([0, 999, -1, 5])) for _ in range(2)]
    scope = {"backbone": nn.Linear(6, 512), "loader": batches}
    exec(script.replace("1_000_000", "1_000"), scope)
    assert scope["classes"].shape == (4, 5)
    assert torch.isfinite(scope["loss"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json").exists()


def test_every_public_name_is_there_and_documented() -> None:
    for name in hp.__all__:
        assert getattr(hp, name).__doc__, name
    for name in re.findall(r"`(?:hp\.)?([A-Z][A-Za-z]+)`", README.read_text()):
        assert hasattr(hp, name), f"the README names {name}"
