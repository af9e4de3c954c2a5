"""Tensors that wait: who is named, when it is given up, what the others hear, and ranks that end or are killed."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hybridpar as hp
import hybridpar.comm.any_order.engine as module
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.stalls import Inquiry
from tests.comm.lanes.board import Board
from tests.ranks import run_program, run_threads


def _engine(group: Any, board: Board, *names: str, **settings: Any) -> AnyOrderEngine:
    engine = AnyOrderEngine(group, watch=board.of(group.rank), **settings)
    engine.register(names, [torch.empty(2)] * len(names))
    return engine


def _reports(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.message for r in caplog.records if r.name == "hybridpar.comm.any_order.stalls" and r.levelno == level]


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_report_says_who_waits_for_what_and_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybridpar.comm.any_order.stalls")
    board = Board()
    text = r"conv1.weight: submitted by ranks 0, 2; waited for ([\d.]+) s; not by rank 1"

    def seconds() -> list[float]:
        lines = _reports(caplog, logging.WARNING)
        return [float(found[1]) for line in lines if (found := re.fullmatch(text, line))]

    def work(group: Any) -> None:
        engine = _engine(group, board, "conv1.weight", "conv1.bias", "fc.weight", stall_seconds=0.4)
        engine.submit(0, torch.ones(2)).result(30)
        group.barrier()
        if group.rank == 1:
            engine.submit(2, torch.ones(2))
            _await(lambda: len(seconds()) >= 2)
        assert engine.submit(0, torch.ones(2)).result(30).tolist() == [3, 3]
        if group.rank != 1:
            engine.submit(2, torch.ones(2))
        engine.wait_all()
        group.barrier()
        engine.close()

    run_threads(3, work)
    # Once more after twice as long.
    first, second = seconds()
    assert first >= 0.4 and second >= 2 * first - 0.1
    # Rank 2 leaves the warning to rank 0. What rank 1 waits for, only rank 1 can warn of.
    assert any(re.fullmatch(text, line) for line in _reports(caplog, logging.INFO))
    other = r"fc.weight: submitted by rank 1; waited for [\d.]+ s; not by ranks 0, 2"
    assert any(re.fullmatch(other, line) for line in _reports(caplog, logging.WARNING))
    assert not any("conv1.bias" in record.message for record in caplog.records)


def test_ranks_that_do_not_answer_are_named_and_long_lists_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    board.silent = {1}

    def work(group: Any) -> None:
        engine = _engine(group, board, *(f"t{i}" for i in range(13)), stall_seconds=0.2)
        if group.rank == 1:
            _await(lambda: "3 more tensors wait" in _reports(caplog, logging.WARNING))
        for index in range(13):
            engine.submit(index, torch.ones(2))
        engine.wait_all()
        engine.close()

    run_threads(2, work)
    reports = _reports(caplog, logging.WARNING)
    last = reports.index("3 more tensors wait")
    for index, line in enumerate(reports[last - 10 : last]):
        assert re.fullmatch(rf"t{index}: submitted by rank 0; waited for [\d.]+ s; no answer from rank 1", line)


def test_a_rank_that_lives_may_take_longer_than_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PULSE_SECONDS", 0.1)

    def work(group: Any) -> None:
        engine = AnyOrderEngine(group, timeout=30)
        engine.register(["a"], [torch.empty(2)])
        if group.rank == 1:
            time.sleep(2.5)
        assert engine.submit(0, torch.ones(2)).result(30).tolist() == [2, 2]
        engine.close()

    run_threads(2, work, timeout=1.5)


def test_when_the_time_is_over_everything_fails_and_names_the_tensor_and_the_rank() -> None:
    board = Board()

    def work(group: Any) -> list[str]:
        engine = _engine(group, board, "stem", "tail", timeout=1.5)
        if group.rank == 1:
            engine.submit(1, torch.ones(2))
            _await(lambda: engine._outstanding.ended)
        else:
            futures = [engine.submit(index, torch.ones(2)) for index in (0, 0, 1)]
            assert futures[2].result(30).tolist() == [3, 3]
            for future in futures[:2]:
                with pytest.raises(hp.CommunicationError) as caught:
                    future.result(30)
                assert (caught.value.rank, caught.value.tensor) == (group.rank, "stem")
            with pytest.raises(hp.CommunicationError, match="stem"):
                engine.wait_all()
        with pytest.raises(hp.CommunicationError, match="all_reduce of tail failed") as caught:
            engine.submit(1, torch.ones(2))
        engine.close()
        return caught.value.reason

    for reason in run_threads(3, work):
        assert re.search(
            r"time-out of 1.5 s; stem: submitted by ranks 0, 2; waited for [\d.]+ s; not by rank 1", reason
        )


def test_a_rank_that_closed_is_not_waited_for() -> None:
    board = Board()

    def work(group: Any) -> None:
        engine = _engine(group, board, "stem", stall_seconds=0.2, timeout=50)
        if group.rank == 1:
            engine.close()
            return
        with pytest.raises(hp.CommunicationError, match=r"stem failed: .*rank 1 closed the engine"):
            engine.submit(0, torch.ones(2)).result(30)
        with pytest.raises(hp.CommunicationError):
            engine.submit(0, torch.ones(2))

    run_threads(3, work)


def test_a_rank_that_cannot_go_on_fails_the_others_at_once() -> None:
    def work(group: Any) -> None:
        engine = AnyOrderEngine(group)
        engine.register(["a", "b"], [torch.empty(2)] * 2)
        if group.rank == 1:
            time.sleep(0.3)  # the others have left their last call of the group
            raise MemoryError("out of memory")
        futures = [engine.submit(index, torch.ones(2)) for index in (1, 0, 1)]
        for index, future in zip("bab", futures, strict=True):
            with pytest.raises(
                hp.CommunicationError, match=f"rank {group.rank}: all_reduce of {index} failed: another"
            ):
                future.result(30)

    first, second, third = run_threads(3, work, return_exceptions=True)
    assert first is None and third is None and isinstance(second, MemoryError)


def test_what_goes_wrong_inside_reaches_every_rank() -> None:
    board = Board()

    def work(group: Any) -> str:
        engine = _engine(group, board, "a", "b")
        if group.rank == 0:
            engine._traffic._sender._buffer = lambda _: 1 / 0  # type: ignore[method-assign,return-value,assignment]
        engine.submit(0, torch.ones(2)).add_done_callback(lambda _: time.sleep(0.2))
        futures = [engine.submit(index, torch.ones(2)) for index in (0, 1)]
        with pytest.raises(hp.CommunicationError) as caught:
            futures[1].result(30)
        return caught.value.reason

    own, heard = run_threads(2, work)
    assert own == "ZeroDivisionError: division by zero"
    assert "another rank left" in heard and heard.endswith("; rank 0: ZeroDivisionError: division by zero")


PROGRAM = """
import os, signal, time, torch, hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.stalls import Inquiry
torch.set_num_threads(1)
shared = hp.init(timeout=20)
engines = [AnyOrderEngine(group, stall_seconds=0.5) for group in (shared, hp.Group.from_torch(shared_memory=False))]
for engine in engines:
    engine.register(["stem", "tail"], [torch.empty(2), torch.empty(2)])
    for number in range(5):
        tensors = [torch.full((2,), float(shared.rank + number)) for _ in range(2)]
        for index in (1, 0) if shared.rank else (0, 1):
            engine.submit(index, tensors[index])
        engine.wait_all()
        assert all(tensor.tolist() == [3.0 * number + 3] * 2 for tensor in tensors), tensors
shared.barrier()
if shared.rank == 1:
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGKILL)
started = time.monotonic()
for engine, future in [(engine, engine.submit(0, torch.ones(2))) for engine in engines]:
    try:
        future.result()
    except hp.CommunicationError as error:
        soon = time.monotonic() - started < 15
        print(f"<{error.rank} {error.tensor} {soon} {'rank 1 (process' in error.reason}>", flush=True)
    try:
        engine.submit(1, torch.ones(2))
    except hp.CommunicationError as error:
        print(f"<{error.rank} {error.tensor} at once>", flush=True)
    engine.close()
os._exit(0)
"""


def test_a_killed_rank_is_named_and_so_is_the_tensor_that_waited() -> None:
    """Through shared memory, and over gloo."""
    codes, outputs = run_program(PROGRAM, 3)
    assert codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        assert outputs[rank][0].count(f"<{rank} stem True True>") == 2, outputs[rank]
        assert outputs[rank][0].count(f"<{rank} tail at once>") == 2, outputs[rank]
    text = r"stem: submitted by ranks 0, 2; waited for [\d.]+ s; not by rank 1"
    assert len(re.findall(text, outputs[0][1])) >= 2, outputs[0]


def test_nothing_is_known_of_the_others_while_the_interpreter_is_going_down() -> None:
    """Whoever waits for a sum must be told that it will not come, whatever can still be found out."""

    class ClosedPool:
        def set_status(self, key: str, status: object) -> None: ...

        def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    inquiry = Inquiry(ClosedPool(), "engine", [0, 1, 2], 1)
    assert inquiry.ask() == {0: None, 2: None}
    assert inquiry.reasons() == ""
