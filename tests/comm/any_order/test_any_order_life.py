"""The any-order engine's threads: what they cost while nothing happens, and how engines end."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
import hybridpar.comm.any_order.engine as module
import hybridpar.comm.any_order.outstanding as outstanding
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.lanes.lane import Lane
from hybridpar.topology import Topology
from tests.ranks import run_program, run_shared_threads, run_threads

THREADS = ("hybridpar-any-order", "hybridpar-stalls")


def _engine(group: Any, *names: str) -> AnyOrderEngine:
    """An engine with tensors of two elements."""
    engine = AnyOrderEngine(group)
    engine.register(names, [torch.empty(2)] * len(names))
    return engine


def _vain_negotiations(group: Any, patience: float) -> int:
    """Of 30 steps that are all alike, after 10 to get used to them: how many negotiations found nothing.

    Args:
        patience: seconds for which a rank that has submitted one tensor of the five stays away from the next one, but
            no longer than until a negotiation has ended.
    """
    engine = _engine(group, *map(str, range(5)))
    readiness, found = engine._traffic._readiness, list[bool]()
    agree = readiness.agree

    def counted(*arguments: Any, **options: Any) -> Any:
        agreement = agree(*arguments, **options)
        found.append(bool(agreement.indices))
        return agreement

    readiness.agree = counted  # type: ignore[method-assign]
    for step in range(40):
        if step == 10:
            found.clear()
        for index in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3])[group.rank]:
            before, deadline = len(found), time.monotonic() + patience
            engine.submit(index, torch.ones(2))
            while len(found) == before and time.monotonic() < deadline:
                time.sleep(0.0005)
        engine.wait_all()
        group.barrier()
    engine.close()
    return found.count(False)


def test_a_steady_pattern_comes_to_cost_one_negotiation_for_each_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PULSE_SECONDS", 100.0)
    # On a machine where other work comes between, some milliseconds of patience may be too little.
    monkeypatch.setattr(outstanding, "_LINGER_SECONDS", 5.0)
    # Almost none; but where sets of two steps grow together, what follows must be learnt again.
    assert max(run_threads(3, _vain_negotiations, 0.001)) < 60
    # The first two tensors of each rank have none that is another rank's, too: two in vain in each step, and others.
    monkeypatch.setattr("hybridpar.comm.any_order.readiness.Forecast.expected", frozenset())
    assert min(run_threads(3, _vain_negotiations, 30.0)) >= 60


def test_nothing_is_sent_while_nothing_is_submitted() -> None:
    def work(group: Any) -> int:
        engine = _engine(group, "a")
        engine.submit(0, torch.ones(2)).result(30)
        calls: list[int] = []
        agree = engine._traffic._readiness.agree
        engine._traffic._readiness.agree = lambda *a: (calls.append(1), agree(*a))[1]  # type: ignore[method-assign]
        time.sleep(1.5)
        engine.close()
        return len(calls)

    # One pulse a second.
    assert max(run_threads(2, work)) <= 3


def _alive() -> int:
    return sum(thread.name in THREADS for thread in threading.enumerate())


def _await_threads(count: int) -> None:
    deadline = time.monotonic() + 15
    while _alive() > count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert _alive() <= count


def test_threads_end_with_the_engine_and_an_abandoned_one_finishes_its_work() -> None:
    _await_threads(0)

    def closed(group: Any) -> None:
        engine = _engine(group, "a")
        future = engine.submit(0, torch.ones(2))
        engine.wait_all()
        engine.close()
        engine.close()
        assert future.result(0).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="a: expected an open engine, got one that was closed"):
            engine.submit(0, torch.ones(2))

    def abandoned(group: Any) -> Future[Tensor]:
        engine = _engine(group, "a")
        if group.rank == 0:
            time.sleep(0.3)  # the other's engine is gone by then, but not its submission
        return engine.submit(0, torch.ones(2))

    run_threads(2, closed)
    _await_threads(0)
    futures = run_threads(2, abandoned)
    assert all(future.result(30).tolist() == [2, 2] for future in futures)
    _await_threads(0)


def test_an_engine_may_be_collected_on_a_thread_that_holds_its_lock() -> None:
    """The garbage collector runs wherever it is due."""

    def abandoned(group: Any) -> bool:
        engine = _engine(group, "a")
        alive, lock = weakref.ref(engine), engine._outstanding._lock

        def collect() -> None:
            nonlocal engine
            with lock:
                del engine
                gc.collect()

        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        collector.join(10)
        return not collector.is_alive() and alive() is None

    assert run_threads(2, abandoned) == [True] * 2
    assert run_threads(1, abandoned) == [True]
    _await_threads(0)


def test_an_engine_given_up_long_before_the_others_give_up_theirs_leaves_no_thread_of_them_behind() -> None:
    """The pulse of those that still have theirs waits for the one that has none any more."""

    def work(group: Any) -> None:
        engine = _engine(group, "a")
        if group.rank == 1:
            time.sleep(3.5)
        del engine

    run_threads(2, work)
    _await_threads(0)


@pytest.mark.parametrize("stall_seconds", [10.0, 0.1])
def test_an_idle_engine_keeps_nothing_alive_of_what_has_arrived(stall_seconds: float) -> None:
    """Tensors are large, and callbacks may know whom the engine belongs to."""

    class Owner:
        def arrived(self, _: Future[Tensor]) -> None:
            return

    def work(group: Any) -> bool:
        engine = AnyOrderEngine(group, stall_seconds=stall_seconds)
        engine.register(["a"], [torch.empty(2)])
        if group.rank == 1:
            time.sleep(0.5)  # the other one's threads look at what waits
        owner, tensor = Owner(), torch.ones(2)
        alive = weakref.ref(owner), weakref.ref(tensor)
        future = engine.submit(0, tensor)
        future.add_done_callback(owner.arrived)
        future.result(30)
        del owner, tensor, future
        deadline = time.monotonic() + 3
        while any(each() is not None for each in alive) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        kept = any(each() is not None for each in alive)
        group.barrier()
        engine.close()
        return kept

    assert run_threads(2, work) == [False, False]


def test_closing_fails_what_has_not_arrived() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "early", "late")
        first = engine.submit(0, torch.ones(2))
        second = engine.submit(1, torch.ones(2)) if group.rank == 0 else None
        assert first.result(30).tolist() == [2, 2]
        if second is None:
            with pytest.raises(hp.CommunicationError, match="another rank left"):
                engine.submit(0, torch.ones(2)).result(30)
        else:
            engine.close()
            with pytest.raises(hp.CommunicationError, match=r"rank 0: all_reduce of late .* wait_all\(\) before close"):
                second.result(30)

    run_threads(2, work)
    _await_threads(0)


def test_an_idle_engine_ends_soon_after_another_rank_has_closed_its_own() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "a")
        engine.submit(0, torch.ones(2)).result(30)
        group.barrier()
        if group.rank == 1:
            engine.close()
        _await_threads(0)
        if group.rank != 1:
            with pytest.raises(hp.CommunicationError, match="another rank left the engine"):
                engine.submit(0, torch.ones(2)).result(30)

    run_threads(3, work, timeout=120)


def test_an_engine_closed_between_agreeing_and_sending_fails_the_others_at_once() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "a")
        if group.rank == 1:
            take = engine._outstanding.take
            engine._outstanding.take = lambda *a, **b: (engine._outstanding.close(), take(*a, **b))[1]  # type: ignore[method-assign]
        error = engine.submit(0, torch.ones(2)).exception(30)
        assert isinstance(error, hp.CommunicationError)
        assert ("the engine was closed" if group.rank == 1 else "another rank left") in str(error)

    run_threads(3, work)
    _await_threads(0)


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_closed_at_any_moment_gives_right_sums_or_errors_and_no_hang(seed: int) -> None:
    def work(lane: Lane) -> None:
        draw = random.Random(f"{seed} {lane.rank}")  # noqa: S311
        engine = _engine(hp.Group(lane, Topology(lane.rank, lane.size)), *"abcd")
        moment = time.monotonic() + draw.choice((0.0, 0.02, 0.1))
        numbers, futures = [0] * 4, []
        while time.monotonic() < moment:
            index = draw.randrange(4)
            numbers[index] += 1
            tensor = torch.full((2,), float(numbers[index] * (lane.rank + 1)))
            try:
                futures.append((6.0 * numbers[index], engine.submit(index, tensor)))
            except hp.CommunicationError:
                break
        engine.close()
        for wanted, future in futures:
            if future.exception(20) is None:
                assert future.result().tolist() == [wanted] * 2
            else:
                assert isinstance(future.exception(), hp.CommunicationError)

    run_shared_threads(3, work, timeout=30)
    _await_threads(0)


def test_a_forked_child_is_refused_and_can_end() -> None:
    engine = _engine(hp.Group.alone(), "a")
    child = os.fork()
    if child == 0:
        try:
            refused = 0
            for call in (lambda: engine.submit(0, torch.ones(2)), engine.wait_all, engine.close):
                try:
                    call()
                except RuntimeError as error:
                    refused += "in a forked child" in str(error)
            engine._finalizer()
            os._exit(0 if refused == 3 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    engine.submit(0, torch.ones(2)).result(30)
    engine.close()


PROGRAM = """
import time
import torch, hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
torch.set_num_threads(1)
shared = hp.init(timeout=60)
engines = [AnyOrderEngine(group) for group in (shared, hp.Group.from_torch(shared_memory=False))]
for engine in engines:
    engine.register(["a", "b"], [torch.empty(2), torch.empty(2)])
    assert engine.submit(0, torch.ones(2)).result().tolist() == [2, 2]
if shared.rank == 0:
    engines[0].submit(1, torch.ones(2))
else:
    time.sleep(2)  # so that the other one ends first
print("the end", flush=True)
"""


def test_a_process_ends_well_with_its_engines_open_and_says_what_it_did_not_wait_for() -> None:
    """Through shared memory, and over gloo."""
    codes, outputs = run_program(PROGRAM, 2)
    assert codes == [0, 0] and all("the end" in out for out, _ in outputs), outputs
    assert "1 submissions had not arrived when the process ended" in outputs[0][1]
    assert "had not arrived" not in outputs[1][1]
