"""The rows a head starts with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hybridpar as hp
from tests.head.cases import (
    dense_rows,
)
from tests.head.rules import RandomRule
from tests.ranks import run_threads


def _rows(group: Any, classes: int, rule: Any, seed: int) -> Any:
    head = hp.ShardedClassifier(5, classes, margin=hp.Softmax(bias=True), rule=rule, seed=seed, group=group)
    torch.manual_seed(group.rank)
    assert head.weight.dtype == torch.float32
    ids = torch.as_tensor(head.layout.class_ids(group.rank))
    return ids, head.weight.detach().clone(), head.bias.detach().clone()


def _dense_start(ranks: int, classes: int, rule: Any, seed: int) -> tuple[Tensor, Tensor]:
    shards = run_threads(ranks, _rows, classes, rule, seed)
    weight = dense_rows([(ids, rows) for ids, rows, _ in shards], classes)
    return weight, dense_rows([(ids, bias) for ids, _, bias in shards], classes)


def test_the_first_rows_depend_on_seed_and_class_id_alone() -> None:
    weight, bias = _dense_start(1, 101, "even", 0)
    for ranks, rule in ((2, "even"), (3, "striped"), (3, RandomRule(seed=1)), (4, "even")):
        other, other_bias = _dense_start(ranks, 101, rule, 0)
        assert torch.equal(other, weight) and torch.equal(other_bias, bias)
    larger, _ = _dense_start(2, 150, "even", 0)
    assert torch.equal(larger[:101], weight), "a row depends on the class count"
    assert not torch.equal(_dense_start(1, 101, "even", 1)[0], weight)


def test_the_first_rows_are_random_distinct_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    head = hp.ShardedClassifier(64, 3000, group=hp.Group.alone())
    assert torch.equal(torch.get_rng_state(), before), "building a head moved the global random state"
    rows = head.weight.detach().double()
    cosine = F.normalize(rows) @ F.normalize(rows).T
    cosine.fill_diagonal_(0)
    # 64 dimensions: the cosine of random directions has deviation 1/8; 4.5 million pairs stay below 7 deviations.
    assert cosine.abs().max() < 7 / 8
    assert cosine.square().mean().sqrt() == pytest.approx(1 / 8, rel=0.02)
    assert abs(rows.mean().item()) < 5 * rows.std().item() / math.sqrt(rows.numel())
    assert np.isclose(rows[:1500].std(), rows[1500:].std(), rtol=0.02)
