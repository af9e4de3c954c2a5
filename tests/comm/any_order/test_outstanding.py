"""What is outstanding: when a rank negotiates, whose time counts, and that every future is told, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

import hybridpar as hp
import hybridpar.comm.any_order.outstanding as module
from hybridpar.comm.any_order.outstanding import Outstanding
from hybridpar.comm.any_order.readiness import Terms
from hybridpar.comm.any_order.submission import Submission, resolve

NOTHING: frozenset[int] = frozenset()
LONG = 30.0


def _three(pulse_seconds: float = LONG) -> Outstanding:
    outstanding = Outstanding(7, pulse_seconds)
    assert outstanding.register(["a", "b"]) == range(2) and outstanding.register(["c"]) == range(2, 3)
    for _ in range(2):
        assert outstanding.await_turn(NOTHING) == {}
        outstanding.found_nothing(grown=True)
    assert outstanding.await_turn(NOTHING) == {}  # as tensors may have waited for the registration
    return outstanding


def _put(outstanding: Outstanding, *indices: int) -> list[Future[torch.Tensor]]:
    return [_put_one(outstanding, index, torch.ones(2)) for index in indices]


def _put_one(
    outstanding: Outstanding, index: int, tensor: torch.Tensor, terms: Terms | None = None, scale: float = 1.0
) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    outstanding.put_many([index], [tensor], [terms or Terms()], scale, told=resolve, notes=[future])
    return future


def _futures(outstanding: Outstanding) -> list[Future[torch.Tensor]]:
    return [submission.note for submission in outstanding.submissions()]


def _seconds(function: Callable[[], object]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


def _later(function: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.1, function)
    timer.daemon = True
    timer.start()
    return timer


def test_without_work_a_rank_sleeps_until_there_is_some_or_for_a_pulse() -> None:
    outstanding = _three()
    _later(lambda: _put(outstanding, 1))
    assert 0.05 < _seconds(lambda: outstanding.await_turn(NOTHING)) < LONG / 2
    outstanding.found_nothing(grown=False)
    pulsing = _three(0.2)
    assert 0.2 <= _seconds(lambda: pulsing.await_turn(NOTHING)) < LONG / 2
    idle = _three()
    assert idle.status() == {"waiting": []}
    _later(idle.close)
    assert idle.await_turn(NOTHING) is None and idle.status() == {}


def test_the_first_of_each_queue_is_what_can_be_sent() -> None:
    outstanding = _three()
    first, second = torch.zeros(2), torch.ones(2)
    _put(outstanding, 2)
    _put_one(outstanding, 0, first)
    _put_one(outstanding, 0, second, Terms("max", 3), 0.5)
    assert outstanding.await_turn(NOTHING) == {2: Terms(), 0: Terms()}
    taken = outstanding.take([0, 2], grown=False)
    assert [one.index for one in taken] == [0, 2] and taken[0].tensor is first
    outstanding.arrived(taken)
    assert outstanding.await_turn(NOTHING) == {0: Terms("max", 3)}
    (last,) = outstanding.take([0], grown=False)
    assert last.tensor is second and last.scale == 0.5


def test_after_nothing_was_found_a_rank_waits_for_news_or_for_a_share_of_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    outstanding = _three()
    _put(outstanding, 0)
    pauses = []
    for _ in range(4):
        assert outstanding.await_turn(NOTHING) == {0: Terms()}
        outstanding.found_nothing(grown=False)
        pauses.append(outstanding._pause())
        now[0] += 0.1
    assert pauses == pytest.approx([0.0001, 0.01, 0.02, 0.03])
    now[0] += 100
    assert outstanding._pause() == 0.05
    monkeypatch.setattr(module, "_LONGEST_PAUSE", LONG)
    _later(lambda: _put(outstanding, 1))
    assert outstanding.await_turn(NOTHING) == {0: Terms(), 1: Terms()}
    # Something was found: what is left may be ready elsewhere by now.
    outstanding.arrived(outstanding.take([1], grown=False))
    assert outstanding._pause() == 0
    # Time without work is no wait.
    outstanding.arrived(outstanding.take([0], grown=False))
    outstanding.found_nothing(grown=False)
    assert outstanding._pause() == LONG
    now[0] += 100
    _put(outstanding, 0)
    assert outstanding._pause() == 0


def test_a_set_that_is_expected_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outstanding = _three()
    expected = frozenset({0, 1})
    monkeypatch.setattr(module, "_LINGER_SECONDS", LONG)
    _put(outstanding, 2)
    _later(lambda: _put(outstanding, 1, 0))
    assert outstanding.await_turn(expected) == {2: Terms(), 1: Terms(), 0: Terms()}
    outstanding.arrived(outstanding.take([0, 1, 2], grown=False))
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.1)
    _put(outstanding, 0)
    assert 0.1 <= _seconds(lambda: outstanding.await_turn(expected)) < LONG / 2
    outstanding.found_nothing(grown=False)
    monkeypatch.setattr(module, "_LINGER_SECONDS", LONG)
    assert _seconds(lambda: outstanding.await_turn(expected)) < LONG / 2, "it has lingered for this set"


def test_lingering_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER_SECONDS", LONG)
    outstanding = _three()
    _put(outstanding, 0)
    _later(outstanding.close)
    assert outstanding.await_turn(frozenset({1})) is None


def test_the_clock_stands_still_while_sums_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    outstanding = _three()
    _put(outstanding, 0, 1)

    def stalled(limit: float) -> list[tuple[Submission, float]]:
        found = outstanding.await_stall(lambda _: limit)
        assert found is not None
        return found

    now[0] += 2
    _put(outstanding, 2)
    assert [(one.index, age) for one, age in stalled(2)] == [(0, 2), (1, 2), (2, 0)]
    taken = outstanding.take([1], grown=False)
    now[0] += 100
    assert [(one.index, age) for one, age in stalled(2)] == [(0, 2), (2, 0)]
    outstanding.arrived(taken)
    outstanding.travelled()
    now[0] += 3
    assert [(one.index, age) for one, age in stalled(2)] == [(0, 5), (2, 3)]
    head = stalled(2)[0][0]
    assert outstanding.waits(head) and outstanding.status() == {"waiting": [0, 2]}
    outstanding.take([0], grown=False)
    assert not outstanding.waits(head)


def test_the_watching_thread_sleeps_until_something_waits_and_ends() -> None:
    outstanding = _three()
    _later(lambda: _put(outstanding, 0))
    found = outstanding.await_stall(lambda _: 0.1)
    assert found is not None and found[0][1] >= 0.1
    idle, failing = _three(), _three()
    _later(outstanding.close)
    _later(idle.end)
    _later(lambda: failing.fail("gone", gave_up=True))
    assert [one.await_stall(lambda _: LONG) for one in (outstanding, idle, failing)] == [None] * 3


def test_a_failure_reaches_every_future_and_all_that_is_submitted_later() -> None:
    outstanding = _three()
    futures = _put(outstanding, 0, 0, 1, 2)
    arrived, flying = outstanding.take([0, 1], grown=False)
    outstanding.arrived([arrived])
    assert outstanding.fail("rank 3 is gone", gave_up=False) and not outstanding.fail("late", gave_up=True)
    assert futures[0].result() is arrived.tensor
    for future, name in zip(futures[1:], "abc", strict=True):
        error = future.exception()
        assert isinstance(error, hp.CommunicationError)
        assert (error.rank, error.operation, error.tensor, error.reason) == (7, "all_reduce", name, "rank 3 is gone")
    outstanding.arrived([flying])  # too late, and harmless
    with pytest.raises(hp.CommunicationError, match="rank 7: all_reduce of b failed: rank 3 is gone"):
        _put(outstanding, 1)
    assert outstanding.status() == {"failed": "rank 3 is gone", "gave_up": False}
    assert _futures(outstanding) == [] and outstanding.await_turn(NOTHING) is None
    assert outstanding.first_lost() is not None and outstanding.first_lost() is None


def test_draining_lets_arrive_what_was_submitted_and_no_more() -> None:
    outstanding = _three()
    (future,) = _put(outstanding, 0)
    outstanding.drain()
    with pytest.raises(RuntimeError, match="a: expected an open engine, got one that was closed"):
        _put(outstanding, 0)
    assert outstanding.await_turn(NOTHING) == {0: Terms()}
    outstanding.arrived(outstanding.take([0], grown=False))
    assert future.result().tolist() == [1, 1] and outstanding.await_turn(NOTHING) is None


def test_draining_ends_a_rank_that_has_nothing_to_send_with_its_pulse() -> None:
    outstanding = _three(0.2)
    _later(outstanding.drain)
    assert _seconds(lambda: outstanding.await_turn(NOTHING)) < LONG / 2 and outstanding.await_turn(NOTHING) is None


def test_whoever_waits_for_all_waits_until_the_last_future_was_told() -> None:
    outstanding = _three()
    first, second = _put(outstanding, 0, 1)
    third, fourth = _put(outstanding, 2, 0)
    seen: list[list[Future[torch.Tensor]]] = []
    for future in (first, third):
        future.add_done_callback(lambda _: seen.append(_futures(outstanding)))
    outstanding.arrived(outstanding.take([0, 1], grown=False))
    assert {first, second, third, fourth} == set(seen[0]) and set(_futures(outstanding)) == {third, fourth}
    outstanding.fail("gone", gave_up=True)
    assert fourth in seen[1] and _futures(outstanding) == []
