"""Rows and state in mapped files: the same training, nothing left behind, and a full disk told in time."""

from __future__ import annotations

import copy
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.head.row_memory import MappedMemory, RowMemory, row_memory
from tests.ranks import run_threads

POLICIES: list[Any] = [
    None,
    hp.RowSGD(lr=0.5, momentum=0.9, weight_decay=1e-3, lazy_decay=True),
    hp.RowAdamW(lr=0.05, state_dtype=torch.bfloat16),
    hp.RowAdagrad(lr=0.5),
]


def _head(group: Any, policy: Any, state_dir: Path | None) -> hp.ShardedClassifier:
    return hp.ShardedClassifier(
        8, 50, margin=hp.Softmax(bias=True), optimizer=policy, dtype=torch.bfloat16 if policy else torch.float32,
        sampler=hp.UniformSampler(rate=0.5), state_dir=state_dir, group=group,
    )  # fmt: skip


def _train(group: Any, policy: Any, state_dir: Path | None) -> list[Tensor]:
    head = _head(group, policy, state_dir)
    generator = torch.Generator().manual_seed(group.rank)
    sgd = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9) if policy is None else None
    for _ in range(3):
        features = torch.randn(4, 8, generator=generator)
        head(features, torch.randint(50, (4,), generator=generator)).backward()
        if sgd is not None:
            sgd.step()
            sgd.zero_grad()
    head.settle()
    assert state_dir is None or not list(state_dir.iterdir())
    states = [] if head.row_optimizer is None else list(head.row_optimizer.state[head.weight].values())
    return [head.weight.detach().clone(), *states]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_in_files_equals_training_in_memory_and_leaves_no_file(
    tmp_path: Path, policy: Any, ranks: int
) -> None:
    for in_files, in_memory in zip(
        run_threads(ranks, _train, policy, tmp_path / "new" / "folder"),
        run_threads(ranks, _train, policy, None),
        strict=True,
    ):
        assert len(in_files) == len(in_memory)
        assert all(torch.equal(one, other) for one, other in zip(in_files, in_memory, strict=True))


def test_rows_and_moments_are_mapped_and_a_copy_is_in_memory_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hybridpar"):
        head = _head(hp.Group.alone(), POLICIES[2], tmp_path)
    assert f"GB of rows and optimizer state in files under {tmp_path}" in caplog.text
    # 50 x 8 of bfloat16, and two moments of it; biases have moments, too.
    assert _mapped(tmp_path) == 3 + 2
    other = copy.deepcopy(head)
    assert _mapped(tmp_path) == 5
    before = other.weight.detach().clone()
    head(torch.randn(4, 8), torch.arange(4)).backward()
    assert torch.equal(other.weight, before) and not torch.equal(head.weight, before)
    del head
    assert _mapped(tmp_path) == 0


def test_a_checkpoint_is_loaded_into_the_files(tmp_path: Path) -> None:
    group, states = hp.Group.alone(), tmp_path / "states"
    head = _head(group, POLICIES[1], None)
    head(torch.randn(4, 8), torch.arange(4)).backward()
    hp.checkpoint.save(tmp_path / "saved", step=1, head=head, optimizer=head.row_optimizer, group=group)
    other = _head(group, POLICIES[1], states)
    assert other.row_optimizer is not None and head.row_optimizer is not None
    mapped = _mapped(states)
    hp.checkpoint.load(tmp_path / "saved", head=other, optimizer=other.row_optimizer, group=group)
    assert _mapped(states) == mapped
    assert torch.equal(other.weight, head.weight)
    mine, theirs = (one.row_optimizer.state[one.weight]["momentum_buffer"] for one in (head, other))  # type: ignore[union-attr]
    assert torch.equal(mine, theirs)


def test_going_back_to_a_checkpoint_in_a_head_that_went_on_forgets_what_its_rows_have_missed(tmp_path: Path) -> None:
    group = hp.Group.alone()
    head = _head(group, POLICIES[1], None)
    assert head.row_optimizer is not None

    def train(steps: int) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            head(torch.randn(4, 8, generator=generator), torch.arange(4)).backward()

    train(5)
    hp.checkpoint.save(tmp_path, step=5, head=head, optimizer=head.row_optimizer, group=group)
    saved = [head.weight.detach().clone(), head.row_optimizer.state[head.weight]["momentum_buffer"].clone()]
    train(5)
    hp.checkpoint.load(tmp_path, head=head, optimizer=head.row_optimizer, group=group)
    head.settle()
    found = [head.weight.detach(), head.row_optimizer.state[head.weight]["momentum_buffer"]]
    assert all(torch.equal(one, other) for one, other in zip(found, saved, strict=True))


def test_a_full_disk_is_told_to_every_rank_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if "full" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def work(group: Any) -> None:
        folder = tmp_path / ("full" if group.rank == 1 else "fine")
        with pytest.raises(OSError, match=r"state_dir: expected room for .* GB more, got No space left on device"):
            _head(group, POLICIES[1], folder)
        assert not list(folder.iterdir())

    run_threads(2, work)


def test_files_are_for_rows_on_the_cpu_and_a_folder_that_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state_dir: expected rows on the CPU with it, got device cuda:1"):
        row_memory(tmp_path, torch.device("cuda", 1))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        _head(hp.Group.alone(), None, tmp_path / "file")
    assert type(row_memory(None, torch.device("cpu"))) is RowMemory
    assert MappedMemory(tmp_path).zeros((0, 4), torch.float32).shape == (0, 4)


def _mapped(folder: Path) -> int:
    """How many files of a folder are mapped into this process."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
