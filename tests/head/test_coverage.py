"""The coverage report says what a count of the draws by hand says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.head.coverage import DrawnSoFar
from tests.ranks import run_threads

CLASSES = 31


def _labels(step: int) -> Tensor:
    return torch.randint(-1, CLASSES // 2, (4,), generator=torch.Generator().manual_seed(step))


def _work(group: Any, sampler: hp.UniformSampler) -> tuple[hp.Coverage, Tensor, Tensor]:
    """The report, and counts of this rank's classes as positives and negatives, of draws that are made again."""
    head = hp.ShardedClassifier(4, CLASSES, sampler=sampler, rule="striped", group=group)
    ids = head.layout.class_ids(group.rank)
    positives, negatives = torch.zeros(CLASSES), torch.zeros(CLASSES)
    for step in range(9):
        labels = _labels(step)
        head(torch.ones(4, 4), labels)  # every rank brings the same labels
        head.eval()(torch.ones(4, 4), labels)  # counts for nothing
        head.train()
        mine = torch.nonzero(torch.isin(ids, labels)).flatten()
        drawn = sampler.draw(mine, len(ids), CLASSES, step, group.rank)
        positives[ids[mine]] += 1
        negatives[ids[drawn.rows]] += 1
        negatives[ids[mine]] -= 1
    return head.coverage(), positives, negatives


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_it_is_what_counting_by_hand_gives_on_every_rank(ranks: int, rate: float) -> None:
    results = run_threads(ranks, _work, hp.UniformSampler(rate=rate))
    positives, negatives = (torch.stack([rank[place] for rank in results]).sum(dim=0) for place in (1, 2))
    expected = hp.Coverage(
        draws=9,
        positive=float((positives > 0).float().mean(dtype=torch.float64)),
        negative=float((negatives > 0).float().mean(dtype=torch.float64)),
        least=int(negatives.min()),
        most=int(negatives.max()),
        mean=float(negatives.double().mean()),
    )
    assert 0 < expected.positive < 1
    for report, _, _ in results:
        assert report == expected


def test_it_costs_four_bytes_a_class() -> None:
    counts = DrawnSoFar(1000)
    assert sum(value.nbytes for value in vars(counts).values() if isinstance(value, Tensor)) == 4000


def test_before_the_first_step_nothing_is_covered() -> None:
    head = hp.ShardedClassifier(4, 9, sampler=hp.UniformSampler(rate=0.5), group=hp.Group.alone())
    assert head.coverage() == hp.Coverage(0, 0.0, 0.0, 0, 0, 0.0)


def test_hard_negatives_count() -> None:
    head = hp.ShardedClassifier(4, 9, sampler=hp.HardSampler(count=3, neighbors=4, uniform=0.0), group=hp.Group.alone())
    for _ in range(5):
        head(torch.ones(1, 4), torch.tensor([2]))
    assert head.coverage() == hp.Coverage(5, 1 / 9, 2 / 9, 0, 5, 10 / 9)  # always the same two


def test_without_a_sampler_there_is_nothing_to_report() -> None:
    head = hp.ShardedClassifier(4, 9, group=hp.Group.alone())
    with pytest.raises(ValueError, match="expected a head with a sampler, got one in which all classes always take"):
        head.coverage()
