"""Broadcasting many tensors as few: every rank ends with the root's values, and what is large is not copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm import coalesce
from hybridpar.comm.coalesce import broadcast_tensors
from tests.ranks import run_threads


def _tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(40, 3, generator=generator),
        torch.randn(2, generator=generator),
        torch.tensor(rank),  # alone of its dtype
        torch.randn(3, 40, generator=generator).t(),
        torch.empty(0, 5),
        torch.randn((), generator=generator),
    ]


def _broadcast(group: Any, root: int) -> list[Tensor]:
    tensors = _tensors(group.rank)
    broadcast_tensors(tensors, group, root)
    return tensors


@pytest.mark.parametrize("limit", [16, 64 << 20])
@pytest.mark.parametrize(("ranks", "root"), [(1, 0), (2, 1), (3, 0)])
def test_every_rank_ends_with_the_values_of_the_root(
    monkeypatch: pytest.MonkeyPatch, limit: int, ranks: int, root: int
) -> None:
    monkeypatch.setattr(coalesce, "_LIMIT", limit)
    for tensors in run_threads(ranks, _broadcast, root):
        torch.testing.assert_close(tensors, _tensors(root), rtol=0, atol=0)


def test_a_tensor_that_travels_alone_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "_LIMIT", 16)
    sent: list[int] = []
    group: Any = SimpleNamespace(size=2, broadcast=lambda tensor, root: sent.append(tensor.data_ptr()))
    table, small = torch.randn(40, 3), torch.randn(2)
    broadcast_tensors([table, small], group)
    assert table.data_ptr() in sent
