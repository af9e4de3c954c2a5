"""The communication thread: order, failures, and its end."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from hybridpar.comm.worker import Worker
from tests.ranks import run_program


def _alive(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def _await_end(name: str) -> None:
    deadline = time.monotonic() + 10
    while _alive(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(name)


def test_jobs_run_in_order_on_another_thread_without_gradients() -> None:
    worker = Worker("test-order")
    seen: list[int] = []
    futures = [worker.submit(seen.append, number) for number in range(100)]
    where = worker.submit(lambda: (threading.current_thread().name, torch.is_grad_enabled()))
    assert where.result(10) == ("test-order", False)
    assert seen == list(range(100)) and all(future.done() for future in futures)
    worker.close()


def test_after_a_failure_nothing_more_is_sent() -> None:
    worker = Worker("test-failure")
    sent: list[int] = []

    def fail() -> None:
        raise KeyError("peer")

    first, second = worker.submit(fail), worker.submit(sent.append, 1)
    with pytest.raises(KeyError, match="peer"):
        first.result(10)
    with pytest.raises(RuntimeError, match=r"earlier operation .* failed: KeyError: 'peer'"):
        second.result(10)
    assert sent == []
    worker.close()


def test_close_finishes_what_was_submitted_and_ends_the_thread() -> None:
    worker = Worker("test-close")
    gate = threading.Event()
    last = worker.submit(gate.wait, 10)
    worker.close()
    assert _alive("test-close") == 1
    gate.set()
    assert last.result(10) is True
    _await_end("test-close")
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(print)


def test_an_abandoned_worker_ends_even_after_a_failure() -> None:
    worker = Worker("test-abandoned")
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 / 0).result(10)
    del worker
    gc.collect()
    _await_end("test-abandoned")


ENDS_WITH_JOBS = """
import atexit, threading, time
from hybridpar.comm.worker import Worker

begun, ends = threading.Event(), threading.Event()
atexit.register(ends.set)

def job():
    begun.set()
    ends.wait()
    time.sleep(0.5)
    print("the job's end", flush=True)

def next_job():
    print("another job", flush=True)

worker = Worker("test-exit")
worker.submit(job)
worker.submit(next_job)
begun.wait()
raise KeyError("this rank fails")
"""


def test_the_process_ends_after_a_running_job_and_begins_no_other() -> None:
    codes, outputs = run_program(ENDS_WITH_JOBS, 1)
    assert codes == [1] and outputs[0][0] == "the job's end\n", outputs
