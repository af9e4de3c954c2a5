"""What does not fit is refused on every rank, by name, and before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hybridpar as hp
from tests.checkpoint.training import EMBEDDING, Setting, Trainee
from tests.head.cases import errors_of
from tests.ranks import run_threads


def _save(group: hp.Group, directory: Path) -> None:
    trainee = Trainee(group, Setting())
    trainee.train(0, 2)
    trainee.save(directory, 2)


def _wider(trainee: Trainee) -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(5, 9, bias=False), *list(trainee.backbone.module)[1:]), "optimizer": None}


def _deeper(trainee: Trainee) -> dict[str, Any]:
    return {"model": nn.Sequential(*trainee.backbone.module, nn.Linear(6, 6)), "optimizer": None}


def _classes(trainee: Trainee) -> dict[str, Any]:
    return {"head": hp.ShardedClassifier(EMBEDDING, 12, group=trainee.group), "optimizer": None}


def _embedding(trainee: Trainee) -> dict[str, Any]:
    return {"head": hp.ShardedClassifier(7, 11, group=trainee.group), "optimizer": None}


def _bias(trainee: Trainee) -> dict[str, Any]:
    head = hp.ShardedClassifier(EMBEDDING, 11, margin=hp.Softmax(bias=True), group=trainee.group)
    return {"head": head, "optimizer": None}


def _parameters(trainee: Trainee) -> list[torch.Tensor]:
    return [*trainee.backbone.parameters(), *trainee.head.parameters()]


def _kind(trainee: Trainee) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(_parameters(trainee))}


def _groups(trainee: Trainee) -> dict[str, Any]:
    groups = [{"params": list(trainee.backbone.parameters())}, {"params": list(trainee.head.parameters())}]
    return {"optimizer": torch.optim.SGD(groups, lr=0.1)}


def _names(trainee: Trainee) -> dict[str, Any]:
    return {"optimizer": {"sgd": torch.optim.SGD(_parameters(trainee), lr=0.1)}}


def _foreign(trainee: Trainee) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD([*_parameters(trainee), nn.Parameter(torch.ones(2, 3))], lr=0.1)}


MISFITS: dict[str, tuple[Callable[[Trainee], dict[str, Any]], str]] = {
    "wider": (
        _wider,
        r"another architecture: 0\.weight is float64\[8, 5\] in the checkpoint and float32\[9, 5\] in the",
    ),
    "deeper": (_deeper, r"4\.bias is absent in the checkpoint and float32\[6\] in the model"),
    "classes": (_classes, "num_classes is 11 in the checkpoint and 12 in the head"),
    "embedding": (_embedding, "embedding_size is 6 in the checkpoint and 7 in the head"),
    "bias": (_bias, r"margin is ArcFace\(.*\) in the checkpoint and Softmax\(.*bias=True\) in the head"),
    "optimizer-kind": (_kind, r"holds SGD over \[6\] parameters, expected here AdamW over \[6\]"),
    "optimizer-groups": (_groups, r"holds SGD over \[6\] parameters, expected here SGD over \[5, 1\]"),
    "optimizer-names": (_names, r"holds \['optimizer'\], expected here \['sgd'\]"),
    "optimizer-foreign": (_foreign, r"only parameters of the given model and head, got another of shape \[2, 3\]"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_and_leaves_all_as_it_was(what: str, tmp_path: Path) -> None:
    change, message = MISFITS[what]
    run_threads(2, _save, tmp_path)

    def work(group: hp.Group) -> None:
        trainee = Trainee(group, Setting())
        before = copy.deepcopy(trainee.state())
        changed = change(trainee)
        with pytest.raises(ValueError, match=message):
            trainee.load(tmp_path, **changed)
        after = trainee.state()
        assert all(torch.equal(after[name], value) for name, value in before.items())

    run_threads(3, work)


def test_a_class_that_one_rank_misses_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    """Also the rank that found all of its own."""
    run_threads(2, _save, tmp_path)
    (path,) = tmp_path.glob("step-*")
    shard = path / "head-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["class_ids"][-1] = tensors["class_ids"][0]
    save_file(tensors, shard)

    def work(group: hp.Group) -> Exception:
        trainee = Trainee(group, Setting())
        trainee.train(0, 1)
        before = [value.detach().clone() for value in _parameters(trainee)]
        with pytest.raises(ValueError, match="expected every class in one shard") as caught:
            hp.checkpoint.load(
                tmp_path, model=trainee.backbone, head=trainee.head, optimizer=trainee.optimizer, verify=False,
                group=group,
            )  # fmt: skip
        assert all(torch.equal(one, other) for one, other in zip(_parameters(trainee), before, strict=True))
        return caught.value

    run_threads(2, work)


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def _inside(trainee: Trainee) -> dict[str, Any]:
    return {"model": nn.ModuleDict({"body": trainee.backbone.module, "head": trainee.head}), "optimizer": None}


def _lbfgs(trainee: Trainee) -> dict[str, Any]:
    optimizer = torch.optim.LBFGS(trainee.head.parameters())
    optimizer.state[trainee.head.weight] = {"old_dirs": [torch.ones(2)]}
    return {"optimizer": optimizer}


def _factored(trainee: Trainee) -> dict[str, Any]:
    optimizer = torch.optim.SGD(trainee.head.parameters(), lr=0.1)
    optimizer.state[trainee.head.weight] = {"column": torch.ones(1, EMBEDDING)}
    return {"optimizer": optimizer}


UNSAVABLE: dict[str, tuple[Callable[[Trainee], dict[str, Any]], str]] = {
    "extra": (lambda _: {"extra": {"model": nn.Linear(1, 1)}}, "extra: expected a value that JSON can hold"),
    "extra-tensor": (lambda _: {"extra": {"loss": torch.ones(())}}, "extra: expected a value that JSON can hold"),
    "keep": (lambda _: {"keep": 0}, "keep: expected at least 1 or None, got 0"),
    "step": (lambda _: {"step": -1}, "step: expected a whole number of at least 0, got -1"),
    "fraction": (lambda _: {"step": 1.5}, r"step: expected a whole number of at least 0, got 1\.5"),
    "foreign-parameter": (_foreign, r"got another of shape \[2, 3\]"),
    "optimizer-name": (lambda t: {"optimizer": {"a/b": t.optimizer}}, "no slash in them, got 'a/b'"),
    "optimizer-lists": (_lbfgs, "old_dirs: expected a value that JSON can hold, got list"),
    "state-of-columns": (_factored, r"state of head\.weight with an entry for each .* got column of shape \[1, 6\]"),
    "head-inside": (_inside, r"model: expected parameters that every rank holds whole, got head\.weight"),
    "extra-state": (
        lambda _: {"model": _WithExtraState(1, 1), "optimizer": None},
        "model: expected a state_dict of tensors, got a dict as _extra_state",
    ),
}


@pytest.mark.parametrize("what", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    change, message = UNSAVABLE[what]
    directory = tmp_path / "checkpoints"

    def work(group: hp.Group) -> None:
        trainee = Trainee(group, Setting())
        with pytest.raises(ValueError, match=message):
            trainee.save(directory, **({"step": 1} | change(trainee)))

    run_threads(2, work)
    assert not directory.exists()


def test_what_one_rank_cannot_save_is_refused_on_all(tmp_path: Path) -> None:
    def work(group: hp.Group) -> None:
        trainee = Trainee(group, Setting())
        changed = _foreign(trainee) if group.rank == 1 else {}
        trainee.save(tmp_path / "checkpoints", 1, **changed)

    assert all(type(error) is ValueError for error in errors_of(2, work))
    assert not (tmp_path / "checkpoints").exists()


def test_a_head_over_a_part_of_the_ranks_is_refused(tmp_path: Path) -> None:
    pairs = [hp.thread_groups(2) for _ in range(2)]

    def work(group: hp.Group) -> None:
        head = hp.ShardedClassifier(4, 8, group=pairs[group.rank // 2][group.rank % 2])
        hp.checkpoint.save(tmp_path, step=1, head=head, group=group)

    for error in errors_of(4, work):
        assert type(error) is ValueError and "over all 4 ranks or whole on each, got one that is cut over 2" in str(
            error
        )


def test_an_unwritable_directory_is_an_os_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")

    def work(group: hp.Group, directory: Path) -> None:
        Trainee(group, Setting()).save(directory, 1)

    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        assert all(isinstance(error, OSError) for error in errors_of(3, work, directory))
    assert (tmp_path / "file").read_text() == "here"


def test_a_rank_that_cannot_write_stops_all_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    run_threads(2, _save, tmp_path)

    def work(group: hp.Group) -> Exception | None:
        trainee = Trainee(group, Setting())
        if group.rank == 1:
            trainee.head.layout = _FullDisk()  # type: ignore[assignment]
        try:
            trainee.save(tmp_path, 3)
        except OSError as error:
            return error
        return None

    errors = run_threads(2, work)
    assert "rank 1: " in str(errors[0]) and all("no space left" in str(error) for error in errors)
    assert hp.checkpoint.newest(tmp_path) == tmp_path / "step-00000002"
    run_threads(2, lambda group: Trainee(group, Setting()).load(tmp_path))


class _FullDisk:
    def class_ids(self, rank: int) -> torch.Tensor:
        raise OSError(28, "no space left on device")
