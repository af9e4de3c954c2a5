"""Ten thousand rounds in which four ranks submit the same tensors, each in an order of its own."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.lane import Lane, Op
from hybridpar.topology import Topology
from tests.ranks import run_shared_threads

RANKS = 4
SEEDS = 20
ROUNDS = 500
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
# Between two of these rounds a rank may keep back what others have submitted already.
MEETINGS = 5

_COMBINE = {"sum": sum, "max": max, "min": min}


def _value(rank: int, index: int, number: int) -> int:
    """Small whole numbers: exact in every dtype."""
    return (7 * rank + 3 * index + 5 * number) % 11 - 5


def _op(index: int, number: int) -> Op:
    return ("sum", "max", "min")[number // 40 % 3] if index % 4 == 0 else "sum"


class _Rank:
    """One rank's rounds. ``common`` draws the same on every rank, ``own`` does not."""

    def __init__(self, lane: Lane, seed: int) -> None:
        self.rank, self.size = lane.rank, lane.size
        self.common = random.Random(seed)  # noqa: S311
        self.own = random.Random(f"{seed} {lane.rank}")  # noqa: S311
        kinds = [
            (self.common.choice((0, 1, 3, 100, 2000)), self.common.choice(DTYPES))
            for _ in range(self.common.randint(1, 12))
        ]
        bucket_bytes = self.common.choice((1, 1000, 1 << 20))
        group = Group(lane, Topology(lane.rank, lane.size))
        self.engine = AnyOrderEngine(group, bucket_bytes=bucket_bytes, timeout=60)
        self.kinds = kinds
        self.engine.register([f"tensor {i}" for i in range(len(kinds))], [self.new(*kind) for kind in kinds])
        self.numbers = [0] * len(kinds)
        self.kept: list[int] = []
        self.sent: list[tuple[int, int, Future[Tensor]]] = []

    def new(self, size: int, dtype: torch.dtype, value: int = 0) -> Tensor:
        return torch.full((size,), value, dtype=dtype)

    def play(self, number: int) -> None:
        indices = range(len(self.kinds))
        drawn = [i for i in indices for _ in range(self.common.choice((0, 1, 1, 2)))]
        pending = self.kept + drawn
        self.own.shuffle(pending)
        cut = len(pending) if number % MEETINGS == MEETINGS - 1 else self.own.randint(0, len(pending))
        for index in pending[:cut]:
            self.numbers[index] += 1
            turn = self.numbers[index]
            tensor = self.new(*self.kinds[index], _value(self.rank, index, turn))
            priority = self.own.randint(-3, 3) if turn % 30 == 0 else turn // 30
            future = self.engine.submit(index, tensor, op=_op(index, turn), priority=priority)
            self.sent.append((index, turn, future))
        self.kept = pending[cut:]

    def meet(self) -> int:
        """Everything was submitted by all: check it."""
        self.engine.wait_all()
        for index, turn, future in self.sent:
            everyone = [_value(rank, index, turn) for rank in range(self.size)]
            result = future.result(0)
            wanted = _COMBINE[_op(index, turn)](everyone)
            assert bool((result == wanted).all()), (index, turn, wanted, result)
        checked = len(self.sent)
        self.sent.clear()
        return checked


def _play(lane: Lane, seed: int) -> int:
    rank = _Rank(lane, seed)
    checked = 0
    for number in range(ROUNDS):
        rank.play(number)
        if number % MEETINGS == MEETINGS - 1:
            checked += rank.meet()
    rank.engine.close()
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_orders_drawn_by_each_rank_give_the_same_sums_and_never_a_deadlock(seed: int) -> None:
    print(f"seed {seed}: {ROUNDS} rounds on {RANKS} ranks")
    checked: list[Any] = run_shared_threads(RANKS, _play, seed)
    assert len(set(checked)) == 1 and checked[0] > ROUNDS / 2
