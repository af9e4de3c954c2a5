"""The head that every rank holds whole equals the sharded one, and its errors reach every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridpar as hp
from tests.ranks import run_threads

CLASSES, WIDTH = 13, 5


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(3 + 2 * rank, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, CLASSES, (3 + 2 * rank,), generator=generator)
    labels[rank] = -1  # another share is ignored on each rank
    return features, labels


@pytest.mark.parametrize("margin", [hp.ArcFace(scale=8.0), hp.MagFace(scale=8.0, l_a=1.0, u_a=3.0), hp.Softmax()])
def test_it_computes_what_the_sharded_head_computes(margin: hp.Margin) -> None:
    class Both(nn.Module):
        def __init__(self, group: hp.Group) -> None:
            super().__init__()
            self.backbone = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            nn.init.eye_(self.backbone.weight)
            nn.init.zeros_(self.backbone.bias)
            head = hp.ShardedClassifier(
                WIDTH, CLASSES, margin=margin, dtype=torch.float64, initial_std=1.0, group=hp.Group.alone()
            )
            self.head = hp.ReplicatedClassifier(head, group)

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.backbone(features), labels)
            return loss

    def replicated(group: hp.Group) -> tuple[torch.Tensor, ...]:
        model = hp.DataParallel(Both(group), group=group)
        loss = model(*_batch(group.rank))
        loss.backward()
        return loss.detach(), model.module.backbone.weight.grad, model.module.head.head.weight.grad

    def sharded(group: hp.Group) -> tuple[torch.Tensor, ...]:
        backbone = Both(hp.Group.alone()).backbone
        model = hp.DataParallel(backbone, group=group)
        head = hp.ShardedClassifier(WIDTH, CLASSES, margin=margin, dtype=torch.float64, initial_std=1.0, group=group)
        features, labels = _batch(group.rank)
        loss = head(model(features), labels)
        loss.backward()
        rows = group.all_gather(head.weight.grad, head.layout.sizes)
        return loss.detach(), backbone.weight.grad, rows

    for ours, theirs in zip(run_threads(3, replicated), run_threads(3, sharded), strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_an_error_on_one_rank_is_raised_on_every_rank_and_the_next_step_works() -> None:
    def work(group: hp.Group) -> None:
        alone = hp.ShardedClassifier(WIDTH, CLASSES, dtype=torch.float64, group=hp.Group.alone())
        head = hp.ReplicatedClassifier(alone, group)
        features, labels = _batch(group.rank)
        with pytest.raises(hp.NonFiniteError) as caught:
            head(features * torch.nan if group.rank == 1 else features, labels)
        assert caught.value.ranks == (1,)
        with pytest.raises(ValueError, match="class ids"):
            head(features, labels + 100 if group.rank == 2 else labels)
        assert torch.isfinite(head(features, labels))

    run_threads(3, work)


def test_margins_that_remember_the_global_batch_are_refused() -> None:
    def work(group: hp.Group) -> None:
        for margin in (hp.AdaFace(), hp.CurricularFace()):
            head = hp.ShardedClassifier(WIDTH, CLASSES, margin=margin, group=hp.Group.alone())
            with pytest.raises(ValueError, match="statistics of the global batch"):
                hp.ReplicatedClassifier(head, group)
        sharded = hp.ShardedClassifier(WIDTH, CLASSES, group=group)
        with pytest.raises(ValueError, match=r"expected a head of Group\.alone"):
            hp.ReplicatedClassifier(sharded, group)

    run_threads(2, work)
