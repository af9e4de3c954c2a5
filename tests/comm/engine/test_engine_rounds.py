"""Rounds of an engine beyond plain sums: bad values, other plans, delivery bucket by bucket, what is recorded."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.compose import Route
from hybridpar.comm.lanes.lane import Lane, Op, ThreadLane
from hybridpar.comm.timeline.timeline import Timeline
from tests.head.cases import errors_of
from tests.ranks import run_threads

BF16, FP16 = torch.bfloat16, torch.float16


def _play(engine: Engine, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    for index, tensor in tensors.items():
        engine.submit(index, tensor)
    return tensors | engine.flush()


def _engine(group: Any, sizes: list[int], dtype: torch.dtype = torch.float32, **arguments: Any) -> Engine:
    engine = Engine(group, **arguments)
    engine.register([f"layer {i}" for i in range(len(sizes))], [torch.empty(size, dtype=dtype) for size in sizes])
    return engine


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(8, 2), Plan(wire=Wire(BF16, error_feedback=True)), Plan(wire=Wire(top_k=0.1))]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_every_rank_learns_which_tensor_of_which_ranks_is_not_finite(plan: Plan, bad: float) -> None:
    def work(group: Any) -> None:
        engine = _engine(group, [2, 1500, 3, 4], plan=plan, check_finite=True)
        for number in range(3):
            given = {
                index: torch.ones(size) for index, size in enumerate([2, 1500, 3]) if (index, group.rank) != (2, 0)
            }
            if number == 1 and group.rank > 0:
                given[2][1:] = bad
                if group.rank == 1:
                    given[1][7] = given[0][0] = 1e30
                    given[1][7] = bad
            if number != 1:
                _play(engine, given)
                continue
            with pytest.raises(hp.NonFiniteError) as caught:
                _play(engine, given)
            # Rank 1 has two of them; the first that was registered is named.
            assert (caught.value.tensor, caught.value.ranks) == ("layer 1", (1,))
            assert caught.value.detail == "1 of 1500 values; 1 more tensors are not finite"
        found = _play(engine, {0: torch.ones(2)})
        assert found[0].tolist() == [3.0, 3.0]

    run_threads(3, work)


def test_a_sum_that_overflows_is_told_apart_from_bad_values() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, [2, 3], FP16, check_finite=True)
        given = {0: torch.full((2,), 1.0, dtype=FP16)}
        if group.rank < 2:
            given[1] = torch.tensor([1.0, 40000.0, 1.0], dtype=FP16)
        with pytest.raises(hp.NonFiniteError, match="sum overflows in float16") as caught:
            _play(engine, given)
        assert (caught.value.tensor, caught.value.ranks) == ("layer 1", (0, 1))
        assert given[0].tolist() == [3.0, 3.0]
        assert _play(engine, {1: torch.ones(3, dtype=FP16)})[1].tolist() == [3.0] * 3
        engine.replan(Plan(wire=Wire()))
        # float32 gradients in float16 are divided first.
        wide = _engine(group, [1], check_finite=True, plan=Plan(wire=Wire(FP16)))
        assert _play(wide, {0: torch.tensor([40000.0])})[0].item() == pytest.approx(120000, rel=2**-10)

    run_threads(3, work)


def test_a_refused_round_changes_nothing_of_later_ones() -> None:
    def work(group: Any) -> None:
        plan = Plan(100, 2, wire=Wire(top_k=0.01))
        engines = [_engine(group, [3000, 2000], check_finite=True, plan=plan) for _ in range(2)]
        for number in range(4):
            generator = torch.Generator().manual_seed(10 * number + group.rank)
            given = [torch.randn(3000, generator=generator), torch.randn(2000, generator=generator)]
            if number == 2:
                spoilt = {
                    index: tensor * math.nan if group.rank == 1 else tensor.clone()
                    for index, tensor in enumerate(given)
                }
                with pytest.raises(hp.NonFiniteError, match="on rank 1 "):
                    _play(engines[0], spoilt)
            found = [_play(engine, {i: tensor.clone() for i, tensor in enumerate(given)}) for engine in engines]
            assert all(torch.equal(found[0][i], found[1][i]) for i in range(2))

    run_threads(2, work)


def test_without_the_check_bad_sums_are_delivered() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, [2])
        value = 1.0 if group.rank else math.inf
        assert _play(engine, {0: torch.tensor([value, 1.0])})[0].tolist() == [math.inf, 2.0]

    run_threads(2, work)


def test_buckets_are_delivered_one_by_one_in_any_order() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, [2, 2, 2], plan=Plan(8, 2))
        for number in range(3):
            given = {index: torch.full((2,), float(group.rank + 1 + number)) for index in range(3 - group.rank)}
            for index, tensor in given.items():
                engine.submit(index, tensor)
            assert engine.missing() == [2][: group.rank]
            engine.close_round()
            if not group.rank:
                with pytest.raises(RuntimeError, match="twice in one round"):
                    engine.submit(0, torch.ones(2))
            total = 3.0 + 2 * number
            assert engine.deliver(2).keys() == ({2} if group.rank else set())
            assert [given[index].tolist() == [total] * 2 for index in (0, 1)] == [False, False]
            engine.deliver(0)
            assert given[0].tolist() == [total] * 2
            with pytest.raises(RuntimeError, match="between rounds"):
                engine.replan(Plan())
            engine.deliver(1)
            assert given[1].tolist() == [total] * 2
        assert engine.report()["rounds"] == 3
        assert [bucket.members for bucket in engine.buckets] == [(0,), (1,), (2,)]

    run_threads(2, work)


class Counting(hp.Group):
    """Notes the route of every further lane."""

    routes: list[tuple[str, bool]]

    def new_lane(self, route: Route = "auto", compress_exponents: bool = False) -> Lane:
        self.routes.append((route, compress_exponents))
        return super().new_lane(route, compress_exponents)


def test_lanes_of_a_route_serve_again_after_a_replan() -> None:
    def work(group: Any) -> None:
        watched = Counting(group._lane, group.topology)
        watched.routes = []
        engine = _engine(watched, [2, 2, 2], plan=Plan(8, 2))
        short = Plan(8, 1, compress_exponents=True)
        for plan in (Plan(8, 1), Plan(8, 3), Plan(8, 2, "flat"), short, Plan(8, 3), short, Plan()):
            engine.replan(plan)
            assert engine.plan == plan.resolved(1)
            assert [t.tolist() for t in _play(engine, {i: torch.ones(2) for i in range(3)}).values()] == [[2.0] * 2] * 3
        assert watched.routes == [("auto", False)] * 3 + [("flat", False)] * 2 + [("auto", True)]
        engine.close()

    run_threads(2, work)


def test_plans_that_differ_or_do_not_fit_are_refused_on_every_rank() -> None:
    def tracks(group: Any) -> None:
        Engine(group, plan=Plan(tracks=1 + group.rank))

    def check(group: Any) -> None:
        Engine(group, check_finite=group.rank == 1)

    def replan(group: Any) -> None:
        _engine(group, [2]).replan(Plan(wire=Wire(BF16) if group.rank else Wire()))

    def order(group: Any) -> None:
        _engine(group, [2, 2], plan=Plan(8)).replan(Plan(8), [0, 1] if group.rank else [1, 0])

    def wrong(group: Any) -> None:
        _engine(group, [2, 2], plan=Plan(8)).replan(Plan(8), [0, 2])

    cases = ((tracks, "tracks"), (check, "check_finite"), (replan, "wire"), (order, "launch_order"))
    for work, name in cases:
        for error in errors_of(2, work):
            assert type(error) is ValueError and f"same {name} on every rank" in str(error)
    for error in errors_of(2, wrong):
        assert type(error) is ValueError and "expected each of 2 buckets once, got [0, 2]" in str(error)


class Recorded(Lane):
    """A lane that notes which thread sent how much, and may wait before."""

    def __init__(self, lane: Lane, log: list[tuple[str, int]], gate: threading.Event | None = None) -> None:
        self.rank, self.size, self.ranks = lane.rank, lane.size, lane.ranks
        self._lane, self._log, self._gate = lane, log, gate

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        if self._gate is not None:
            assert self._gate.wait(20)
        self._log.append((threading.current_thread().name, tensor.numel()))
        self._lane.all_reduce(tensor, op)

    def _unused(self, *_: Any) -> Any:
        raise AssertionError

    all_gather = reduce_scatter = all_to_all = broadcast = barrier = split = _unused

    def close(self) -> None:
        self._lane.close()


class RecordedGroup(hp.Group):
    """Its n-th lane has the n-th log and gate."""

    gates: list[threading.Event | None]
    logs: list[list[tuple[str, int]]]

    def new_lane(self, route: Route = "auto", compress_exponents: bool = False) -> Lane:
        number = len(self.logs)
        self.logs.append([])
        gate = self.gates[number] if number < len(self.gates) else None
        return Recorded(super().new_lane(route, compress_exponents), self.logs[-1], gate)


def _recorded(group: Any, *gates: threading.Event | None) -> RecordedGroup:
    recorded = RecordedGroup(group._lane, group.topology)
    recorded.logs, recorded.gates = [], list(gates)
    return recorded


def test_buckets_take_the_tracks_in_turn_and_in_launch_order() -> None:
    def work(group: Any) -> None:
        recorded = _recorded(group)
        engine = _engine(recorded, [1, 2, 3, 4, 5], plan=Plan(1, 2))
        for index in (4, 2, 0, 1, 3) if group.rank else (0, 1, 2, 3, 4):
            engine.submit(index, torch.ones(index + 1))
        engine.flush()
        # One flag each.
        assert [[numel for _, numel in log] for log in recorded.logs] == [[2, 4, 6], [3, 5]]
        engine.replan(Plan(1, 2), [4, 3, 0, 2, 1])
        for log in recorded.logs:
            log.clear()
        assert _play(engine, {1: torch.ones(2), 4: torch.ones(5)})[4].tolist() == [2.0] * 5
        assert [[numel for _, numel in log] for log in recorded.logs] == [[6, 2, 3], [5, 4]]

    run_threads(2, work)


def test_one_track_goes_on_while_another_is_held_up() -> None:
    def work(group: Any) -> None:
        gate = threading.Event()
        recorded = _recorded(group, gate, None)
        engine = _engine(recorded, [1, 2, 3, 4], plan=Plan(1, 2))
        for index in range(4):
            engine.submit(index, torch.ones(index + 1))
        deadline = time.monotonic() + 20
        while len(recorded.logs[1]) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [numel for _, numel in recorded.logs[1]] == [3, 5] and recorded.logs[0] == []
        gate.set()
        engine.flush()
        assert [numel for _, numel in recorded.logs[0]] == [2, 4]

    run_threads(2, work)


def test_a_failure_on_one_track_ends_the_round_on_all() -> None:
    """No thread works on a bucket any more when flush() has raised."""

    def work(group: Any) -> Exception | None:
        engine = _engine(group, [2] * 6, plan=Plan(1, 3))
        _play(engine, {0: torch.ones(2)})
        group.barrier()  # all are out of the first round
        if group.rank == 1:
            lane = engine._rounds[4].track.lane
            assert isinstance(lane, ThreadLane)
            lane.abort()
        try:
            _play(engine, {index: torch.ones(2) for index in range(6)})
        except hp.CommunicationError as error:
            for current in engine._rounds:
                assert current._future is None
            with pytest.raises(RuntimeError, match="earlier operation of this engine failed: CommunicationError"):
                _play(engine, {0: torch.ones(2)})
            return error
        return None

    started = time.monotonic()
    assert all(isinstance(error, hp.CommunicationError) for error in run_threads(3, work, timeout=20))
    assert time.monotonic() - started < 10


def test_the_same_tensors_give_the_same_bits(tmp_path: Path) -> None:
    def work(group: Any) -> list[Tensor]:
        found = []
        for plan in (Plan(500, 3, wire=Wire(BF16, error_feedback=True)), Plan(wire=Wire(top_k=0.02))):
            engine = _engine(group, [1400, 30, 500], plan=plan)
            for number in range(3):
                generator = torch.Generator().manual_seed(100 * number + group.rank)
                given = {index: torch.randn(size, generator=generator) for index, size in enumerate([1400, 30, 500])}
                order = torch.randperm(3).tolist()
                found += list(dict(sorted(_play(engine, {index: given[index] for index in order}).items())).values())
        return found

    first, second = run_threads(3, work), run_threads(3, work)
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, first[0], strict=True))


def test_the_timeline_and_the_report_tell_what_happened() -> None:
    def work(group: Any) -> None:
        timeline = Timeline(rank=group.rank)
        engine = _engine(group, [3, 4, 5], plan=Plan(16, 2, wire=Wire(BF16)), timeline=timeline)
        assert engine.report() | {"buckets": []} == {
            "plan": Plan(16, 2, wire=Wire(BF16)).to_json(),
            "describe": "buckets of 16 B on 2 tracks, route auto, wire: bfloat16",
            "rounds": 0,
            "bytes": 2 * (12 + 3),
            "buckets": [],
            "tracks": [{"pack": 0.0, "send": 0.0}, {"pack": 0.0, "send": 0.0}],
            "busy": 0.0,
            "waited": 0.0,
            "hidden": 1.0,
        }
        for _ in range(2):
            _play(engine, {index: torch.ones(size) for index, size in enumerate([3, 4, 5])})
        spans = [(event.name, event.row, event.args["bucket"]) for event in timeline.recording().events]
        for number, row in enumerate(["lane 0", "lane 1", "lane 0"]):
            for name, where in (("pack", row), ("send", row), ("unpack", "computation")):
                assert spans.count((name, where, number)) == 2
        assert {name for name, _, _ in spans} <= {"pack", "send", "unpack", "wait"}
        report = engine.report()
        assert report["rounds"] == 2 and report["busy"] > 0 and 0 <= report["hidden"] <= 1
        assert report["hidden"] == pytest.approx(max(0.0, 1 - report["waited"] / report["busy"]))
        assert [bucket["track"] for bucket in report["buckets"]] == [0, 1, 0]
        assert [bucket["values"] for bucket in report["buckets"]] == [3, 4, 5]
        for bucket in report["buckets"]:
            assert 0 <= bucket["ready"] <= bucket["begun"] <= bucket["packed"] <= bucket["sent"] < 60
        assert all(track["pack"] > 0 and track["send"] > 0 for track in report["tracks"])

    run_threads(2, work)
