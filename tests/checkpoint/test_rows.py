"""Rows are found by class id in whichever shards hold them, in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hybridpar.checkpoint import rows
from hybridpar.partition import build_layout
from tests.head.rules import RandomRule

LIKE = {"weight": (torch.Size([3]), torch.float32), "bias": (torch.Size([]), torch.float64)}


def _dense(classes: int) -> dict[str, Tensor]:
    ids = torch.arange(classes)
    return {"weight": ids[:, None] * 10.0 + torch.arange(3.0), "bias": ids.double() + 0.5}


def _write(path: Path, shards: list[Tensor], classes: int) -> list[str]:
    names = []
    for index, ids in enumerate(shards):
        names.append(f"shard-{index}.safetensors")
        parts = {name: value[ids] for name, value in _dense(classes).items()}
        save_file(parts | {"class_ids": ids}, path / names[-1])
    return names


@settings(max_examples=40)
@given(
    classes=st.integers(4, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    ranks=st.integers(1, 4),
    rule=st.sampled_from(["even", "striped", RandomRule(4)]),
    block=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 99),
)
def test_every_rank_gets_its_rows_from_shards_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    classes: int,
    cuts: list[int],
    ranks: int,
    rule: Any,
    block: int,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("rows")
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    shards = list(order.tensor_split(sorted(min(cut, classes) for cut in cuts)))
    names = _write(path, shards, classes)
    layout = build_layout(rule, classes, ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK", block)
        for rank in range(ranks):
            files = rows.RowFiles(path, names, layout, rank)
            found = files.read(LIKE)
            for name, expected in _dense(classes).items():
                assert torch.equal(found[name], expected[layout.class_ids(rank)])
                assert found[name].dtype == expected.dtype
            given = {
                name: torch.full_like(value, 7, dtype=torch.float64 if name == "weight" else None)
                for name, value in found.items()
            }
            filled = files.read(LIKE, given)
            for name, value in found.items():
                assert filled[name] is given[name] and torch.equal(given[name], value.to(given[name].dtype))


def test_tensors_of_another_shape_are_left_alone(tmp_path: Path) -> None:
    name = next(iter(LIKE))
    names = _write(tmp_path, [torch.tensor([0, 1, 2]), torch.tensor([3, 4])], 6)
    other = {name: torch.full((5, 1), 7.0)}
    files = rows.RowFiles(tmp_path, names, build_layout("even", 5, 1), 0)
    assert files.read({name: LIKE[name]}, other)[name] is not other[name]
    assert bool((other[name] == 7).all())


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([[0, 1, 2], [3, 4]], "every class in one shard, got class 5 in 0"),
        ([[0, 1, 2], [3, 4, 5], [2]], "every class in one shard, got class 2 in 2"),
        ([[0, 1, 2], [3, 4, 5, 3]], "every class in one shard, got class 3 in 2"),
    ],
)
def test_a_class_in_no_shard_or_in_two_is_named(tmp_path: Path, shards: list[list[int]], message: str) -> None:
    names = _write(tmp_path, [torch.tensor(ids) for ids in shards], 6)
    with pytest.raises(ValueError, match=message):
        rows.RowFiles(tmp_path, names, build_layout("even", 6, 1), 0)


def test_optimizer_state_is_read_only_for_the_optimizers_that_are_asked_for() -> None:
    described = {
        "weight": [[3], "bfloat16"],
        "a/head.weight/exp_avg": [[3], "float32"],
        "b/head.weight/sum": [[], "int64"],
    }
    assert rows.row_likes(described, []) == {"weight": (torch.Size([3]), torch.bfloat16)}
    assert rows.row_likes(described, ["b"]).keys() == {"weight", "b/head.weight/sum"}
    tensors = {
        "weight": torch.zeros(4, 3, dtype=torch.bfloat16),
        "b/head.weight/sum": torch.zeros(4, dtype=torch.int64),
    }
    assert rows.describe_rows(tensors) == {"weight": [[3], "bfloat16"], "b/head.weight/sum": [[], "int64"]}
