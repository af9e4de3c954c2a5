"""The calls of a process group: their order, on ranks that are threads, and what follows a failure."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridpar as hp
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.torch_face import collectives as collectives
from hybridpar.comm.torch_face.work import Calls
from tests.ranks import run_threads

_UNSET = timedelta(milliseconds=-1)
BLOCKING = SimpleNamespace(asyncOp=False, timeout=_UNSET)
ASYNCHRONOUS = SimpleNamespace(asyncOp=True, timeout=_UNSET)


def _sum_of(calls: Calls, options: Any, tensor: torch.Tensor, *before: Any) -> dist.Work:
    """An all-reduce that first does what ``before`` says."""

    def function(lane: Lane) -> None:
        for act in before:
            act()
        lane.all_reduce(tensor, "sum")

    return calls.run("all_reduce", options, [tensor], function)


def _with_callback(group: hp.Group) -> list[str]:
    """A callback that sends, and a blocking call that is made while it runs: later or sooner on different ranks."""
    calls, order = Calls(group, 30.0), []

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        time.sleep(0.1)
        order.append("callback")
        return _sum_of(calls, ASYNCHRONOUS, future.value()[0], lambda: order.append("second")).result()[0]

    work = _sum_of(calls, ASYNCHRONOUS, torch.ones(3), lambda: order.append("first"), lambda: time.sleep(0.05))
    chained = work.get_future().then(again)
    time.sleep(0.1 * group.rank)  # rank 0 comes while the first call runs, rank 1 while the callback does, rank 2 after
    blocking = torch.ones(5)
    _sum_of(calls, BLOCKING, blocking, lambda: order.append("third")).wait()
    assert chained.wait().tolist() == [group.size**2] * 3
    assert blocking.tolist() == [group.size] * 5
    calls.close()
    return order


def test_what_a_callback_sends_has_its_place_in_the_order() -> None:
    assert run_threads(3, _with_callback) == [["first", "callback", "second", "third"]] * 3


def _threads_that_run(group: hp.Group) -> list[bool]:
    calls, own = Calls(group, 30.0), []
    note = lambda: own.append(threading.current_thread().name.startswith("hybridpar-process-group"))  # noqa: E731
    _sum_of(calls, BLOCKING, torch.ones(1), note)
    work = _sum_of(calls, ASYNCHRONOUS, torch.ones(1), note, lambda: time.sleep(0.1))
    _sum_of(calls, BLOCKING, torch.ones(1), note).wait()
    work.wait()
    _sum_of(calls, SimpleNamespace(asyncOp=False, timeout=timedelta(seconds=9)), torch.ones(1), note).wait()
    calls.close()
    return own


def test_a_blocking_call_runs_on_its_own_thread_where_nothing_is_before_it() -> None:
    assert run_threads(2, _threads_that_run) == [[False, True, True, True]] * 2


def _after_a_failure(group: hp.Group) -> list[str]:
    calls, said, both_made = Calls(group, 30.0), [], threading.Event()

    def refuse() -> None:
        both_made.wait(10)
        if group.rank == 1:
            raise MemoryError("no room")

    first = _sum_of(calls, ASYNCHRONOUS, torch.ones(2), refuse)
    behind = _sum_of(calls, ASYNCHRONOUS, torch.ones(2))
    both_made.set()
    for attempt in (
        first.wait,
        first.get_future().wait,
        behind.wait,
        behind.result,
        lambda: _sum_of(calls, BLOCKING, torch.ones(2)),
        lambda: _sum_of(calls, ASYNCHRONOUS, torch.ones(2)),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            attempt()
        said.append(str(raised.value))
    assert first.is_completed()
    assert not first.is_success()
    assert isinstance(first.exception(), MemoryError if group.rank == 1 else hp.CommunicationError)
    calls.close()
    return said


def test_after_a_failure_all_calls_fail_and_say_why() -> None:
    other, failed = run_threads(2, _after_a_failure)
    assert failed[0] == "no room"
    assert "MemoryError: no room" in failed[1], "the future's error is one for C++ too"
    for text in failed[2:]:
        assert text.startswith(
            "rank 1: all_reduce of float32[2] failed: not sent, because an earlier all_reduce failed"
        )
        assert "no room" in text
    assert "rank 0: all_reduce of float32[2] failed: another rank left" in other[0]
    assert all("rank 0: all_reduce of float32[2] failed" in text for text in other)


def test_a_callback_that_waits_for_a_later_call_raises() -> None:
    calls, tensor = Calls(hp.Group.alone(), 30.0), torch.ones(1)
    started, behind = threading.Event(), []

    def wait_for_the_next(future: torch.futures.Future[Any]) -> None:
        started.wait(10)
        behind[0].wait()

    chained = _sum_of(calls, ASYNCHRONOUS, tensor, lambda: time.sleep(0.05)).get_future().then(wait_for_the_next)
    behind.append(_sum_of(calls, ASYNCHRONOUS, tensor))
    started.set()
    with pytest.raises(RuntimeError, match="a callback waited for a call that cannot begin before it returns"):
        chained.wait()
    assert behind[0].wait()
    calls.close()


def test_closing_finishes_what_was_begun() -> None:
    calls, tensor = Calls(hp.Group.alone(), 30.0), torch.zeros(2)
    works = [_sum_of(calls, ASYNCHRONOUS, tensor, lambda: time.sleep(0.02), lambda: tensor.add_(1)) for _ in range(5)]
    calls.close()
    assert all(work.is_success() for work in works)
    assert tensor.tolist() == [5.0, 5.0]
    with pytest.raises(hp.CommunicationError, match="the process group was destroyed"):
        _sum_of(calls, BLOCKING, tensor)


def test_a_forked_child_is_refused() -> None:
    calls = Calls(hp.Group.alone(), 30.0)
    child = os.fork()
    if child == 0:
        try:
            calls.run("barrier", BLOCKING, [], collectives.barrier)
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    calls.close()
