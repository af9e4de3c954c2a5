"""Buckets of many tensors: announced one by one and submitted together, packed by the caller where they are small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.timeline.timeline import Timeline
from hybridpar.kernels.pack_table import PackTable
from tests.head.cases import errors_of
from tests.ranks import run_threads


def _engine(group: Any, sizes: list[int], **arguments: Any) -> Engine:
    engine = Engine(group, **arguments)
    engine.register([f"layer {i}" for i in range(len(sizes))], [torch.empty(size) for size in sizes])
    return engine


def test_a_bucket_may_be_announced_and_submitted_whole() -> None:
    """With some of its tensors missing, beside a bucket whose tensors are submitted one by one."""

    def work(group: Any) -> None:
        engine = _engine(group, [2, 2, 1, 3], plan=Plan(16))
        assert [engine.members(number) for number in range(2)] == [(0, 1), (2, 3)]
        for _ in range(2):
            given = {index: torch.full((size,), float(index + group.rank)) for index, size in enumerate([2, 2, 1, 3])}
            assert engine.announce(1) is None
            assert engine.announced(1) and not engine.announced(0) and not engine.submitted(1)
            if group.rank == 0:
                assert engine.announce(0) == 0
            assert engine.open_buckets() == [0, 1]
            engine.submit_bucket(0, [given[0] if group.rank == 0 else None, given[1]])
            assert engine.open_buckets() == [1]
            assert engine.missing() == ([2, 3] if group.rank == 0 else [0, 2, 3])
            engine.submit(3, given[3])
            engine.submit(2, given[2])
            received = engine.flush()
            assert received.keys() == (set() if group.rank == 0 else {0})
            sums = given | received
            assert [sums[index].tolist() for index in range(4)] == [[0.0] * 2, [3.0] * 2, [5.0], [7.0] * 3]
        assert engine.report()["rounds"] == 2

    run_threads(2, work)


def test_a_bucket_that_cannot_be_meant_is_refused() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, [2, 2])
        engine.announce(0)
        for announce_or_submit in (lambda: engine.announce(0), lambda: engine.submit(0, torch.ones(2))):
            with pytest.raises(RuntimeError, match="layer 0 was submitted twice in one round"):
                announce_or_submit()
        with pytest.raises(RuntimeError, match="between rounds"):
            engine.replan(Plan())
        with pytest.raises(RuntimeError, match="layer 0: expected the tensor that was announced, got None"):
            engine.submit_bucket(0, [None, torch.ones(2)])
        for wrong in (torch.ones(1, 2), torch.ones(2, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"layer 1: expected float32\[2\] on cpu as registered"):
                engine.submit_bucket(0, [torch.ones(2), wrong])
        both = [torch.ones(2), torch.ones(2)]
        engine.submit_bucket(0, both)
        with pytest.raises(RuntimeError, match="layer 0 was submitted twice in one round"):
            engine.submit_bucket(0, both)
        engine.close_round()
        with pytest.raises(RuntimeError, match="layer 0 was submitted"):
            engine.announce(0)
        engine.deliver(0)
        assert both[0].tolist() == both[1].tolist() == [float(group.size)] * 2
        engine.close_round()  # nothing was submitted
        for announce_or_submit in (lambda: engine.announce(1), lambda: engine.submit_bucket(0, both)):
            with pytest.raises(RuntimeError, match="closed round"):
                announce_or_submit()
        engine.deliver(0)

    run_threads(2, work)


@pytest.mark.parametrize(("size", "row"), [(3, "computation"), (9000, "lane 0")])
def test_many_small_tensors_are_packed_by_the_caller(size: int, row: str) -> None:
    """Those of 9,000 values are not small. Either way the sums are right, round after round."""

    def work(group: Any) -> None:
        timeline = Timeline(rank=group.rank)
        engine = _engine(group, [size] * 100, plan=Plan(1 << 30), timeline=timeline)
        for number in range(2):
            given = {
                index: torch.full((size,), float(index + number + group.rank))
                for index in range(100)
                if index != 7 or group.rank == 0
            }
            for index, tensor in given.items():
                engine.submit(index, tensor)
            received = engine.flush()
            assert received.keys() == (set() if group.rank == 0 else {7})
            for index, tensor in (given | received).items():
                assert tensor.eq(7.0 + number if index == 7 else 2.0 * (index + number) + 1.0).all()
        assert [event.row for event in timeline.recording().events if event.name == "pack"] == [row] * 2
        for bucket in engine.report()["buckets"]:
            assert 0 <= bucket["ready"] <= bucket["begun"] <= bucket["packed"] <= bucket["sent"]

    run_threads(2, work)


def test_a_caller_that_cannot_pack_sends_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second bucket would otherwise meet the other rank's first one, which has the same size."""
    original, poisoned = PackTable.pack, torch.ones(2)

    def pack(table: PackTable, tensors: Any, *arguments: Any) -> Any:
        if tensors[0] is poisoned:
            raise MemoryError("no memory")
        return original(table, tensors, *arguments)

    monkeypatch.setattr(PackTable, "pack", pack)

    def work(group: Any) -> None:
        engine = _engine(group, [2] * 200, plan=Plan(800))
        tensors = [torch.ones(2) for _ in range(100)]
        if group.rank == 0:
            with pytest.raises(MemoryError):
                engine.submit_bucket(0, [poisoned, *tensors[1:]])
            assert engine.failed
            with pytest.raises(RuntimeError, match="earlier operation of this engine failed: MemoryError"):
                engine.submit_bucket(1, tensors)
            return
        engine.submit_bucket(0, tensors)
        engine.submit_bucket(1, tensors)
        engine.flush()

    first, second = errors_of(2, work)
    assert first is None
    assert isinstance(second, CommunicationError) and "layer 0 .. layer 99" in second.tensor
