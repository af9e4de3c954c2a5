"""A rank that stands aside changes no result, keeps nobody waiting, and returns when all have stood aside."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.readiness import Agreement, Readiness, Terms
from tests.ranks import run_threads

KINDS = [((3,), torch.float32), ((2, 2), torch.int64), ((), torch.float64), ((0,), torch.float32), ((5,), torch.uint8)]


def _engine(group: Any, **settings: Any) -> AnyOrderEngine:
    engine = AnyOrderEngine(group, timeout=30, **settings)
    engine.register([f"tensor {i}" for i in range(len(KINDS))], [torch.empty(s, dtype=d) for s, d in KINDS])
    return engine


def _value(index: int, rank: int, number: int) -> Tensor:
    shape, dtype = KINDS[index]
    drawn = torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(100 * number + 10 * rank + index))
    return drawn.to(dtype)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from(range(len(KINDS))), st.sampled_from(["sum", "max", "min"])), max_size=8),
)
def test_results_are_those_of_the_ranks_that_take_part(counts: list[int], calls: list[tuple[int, Any]]) -> None:
    counts = [min(count, len(calls)) for count in counts]

    def work(group: Any) -> None:
        engine = _engine(group)
        for again in range(2):  # after everybody has returned all is as before
            for number, (index, op) in enumerate(calls[: counts[group.rank]]):
                result = engine.submit(index, _value(index, group.rank, number), op=op).result()
                present = [_value(index, rank, number) for rank in range(3) if counts[rank] > number]
                stacked = torch.stack(present)
                exact = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
                assert torch.equal(result, exact.to(result.dtype)), (again, number)
            engine.step_aside().result(timeout=30)
        engine.close()

    run_threads(3, work)


def test_the_last_one_is_named_the_same_everywhere() -> None:
    def work(group: Any) -> int:
        engine = _engine(group)
        if group.rank == 1:
            time.sleep(0.3)
        last = engine.step_aside().result(timeout=30)
        engine.close()
        return last

    assert run_threads(3, work) == [1, 1, 1]


def test_a_rank_alone_returns_at_once() -> None:
    engine = _engine(hp.Group.alone())
    assert engine.step_aside().result(timeout=5) == 0
    engine.close()


def test_it_hears_of_what_it_went_along_with_and_takes_part_in_registrations() -> None:
    def work(group: Any) -> list[int]:
        engine = _engine(group)
        heard: list[int] = []
        if group.rank == 0:
            future = engine.step_aside(heard.append)
            (late,) = engine.register(["late"], [torch.empty(2)])
            future.result(timeout=30)
        else:
            engine.submit(4, torch.ones(5, dtype=torch.uint8)).result()
            (late,) = engine.register(["late"], [torch.empty(2)])
            assert torch.equal(engine.submit(late, torch.full((2,), 7.0), op="max").result(), torch.full((2,), 7.0))
            engine.submit(1, torch.ones(2, 2, dtype=torch.int64)).result()
            engine.step_aside().result(timeout=30)
        engine.close()
        return heard

    assert run_threads(2, work) == [[4, 5, 1], []]


def test_what_it_submits_itself_is_sent_as_ever() -> None:
    def work(group: Any) -> None:
        engine = _engine(group)
        future: Future[int] | None = None
        if group.rank == 0:
            future = engine.step_aside()
        ones = engine.submit(0, torch.ones(3)).result()
        assert torch.equal(ones, torch.full((3,), 2.0))
        (future or engine.step_aside()).result(timeout=30)
        engine.close()

    run_threads(2, work)


def test_it_has_no_opinion_on_operations_and_disputes_are_seen_past_it() -> None:
    def work(group: Any) -> None:
        readiness = Readiness(group.new_lane())
        readiness.agree({}, [2])
        aside = group.rank == 0
        wants: dict[int, Terms] = {} if aside else {0: Terms("max", 4)}
        assert readiness.agree(wants, [2], aside=aside) == Agreement((0,))
        assert readiness.terms[0] == Terms("max", 4)
        dispute = {} if aside else {1: Terms("min" if group.rank == 1 else "max")}
        found = readiness.agree(dispute, [2], aside=aside)
        assert found.indices == (1,) and dict(found.disputes) == {1: "min on rank 1 and max on rank 2"}
        # The first opinion of the one that stood aside is a new one.
        disputed = readiness.agree({0: Terms("sum" if aside else "max", 4)}, [2]).disputes
        assert dict(disputed) == {0: "sum on rank 0 and max on ranks 1, 2"}

    run_threads(3, work)


def test_it_is_told_when_a_rank_fails_or_the_engine_is_closed() -> None:
    def work(group: Any) -> None:
        engine = _engine(group)
        if group.rank == 0:
            future = engine.step_aside()
            with pytest.raises(ValueError, match="got one that stands aside already"):
                engine.step_aside()
            with pytest.raises(hp.CommunicationError, match="step_aside of nothing failed"):
                future.result(timeout=30)
        else:
            engine.submit(0, torch.ones(3)).result()
            engine._traffic.give_up("rank 1 has had enough")
            with pytest.raises(hp.CommunicationError, match="had enough"):
                engine.step_aside()
        engine.close()

    run_threads(2, work)
    engine = _engine(hp.Group.alone())
    engine.close()
    with pytest.raises(RuntimeError, match="expected an open engine"):
        engine.step_aside()


def test_patience_outlives_the_time_out_but_not_a_rank_that_closes() -> None:
    class Told:
        """What the ranks say of each other, as processes do by way of their watch."""

        statuses: dict[int, Any] = {}  # noqa: RUF012

        def __init__(self, rank: int) -> None:
            self._rank = rank

        def set_status(self, key: str, status: Any) -> None:
            self.statuses[self._rank] = (key, status)

        def ask(self, ranks: Any) -> dict[int, Any]:
            found = {rank: self.statuses[rank] for rank in ranks}
            return {rank: {} if status is None else {key: status()} for rank, (key, status) in found.items()}

    def work(group: Any) -> None:
        engine = AnyOrderEngine(group, timeout=0.4, stall_seconds=0.1, watch=Told(group.rank))
        first, second = engine.register(["first", "second"], [torch.empty(1), torch.empty(1)])
        if group.rank == 0:
            waits = engine.submit(first, torch.ones(1), patient=True)
            time.sleep(1.2)
            assert not waits.done()
            assert engine.submit(second, torch.ones(1)).result(timeout=10) == 2
            with pytest.raises(hp.CommunicationError, match="rank 1 closed the engine"):
                waits.result(timeout=10)
        else:
            time.sleep(1.2)
            engine.submit(second, torch.ones(1)).result(timeout=10)
            engine.close()
            time.sleep(0.5)
        engine.close()

    run_threads(2, work)
