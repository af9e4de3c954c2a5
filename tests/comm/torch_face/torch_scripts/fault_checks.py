"""What survivors see when a rank of "hybridpar" dies in the midst of a call, and what is left after the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hybridpar as hp
from tests.comm.torch_face.torch_scripts.launch import start


def _blocking(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def _in_flight(value: torch.Tensor) -> None:
    works = [dist.all_reduce(value[:: index + 1].contiguous(), async_op=True) for index in range(4)]
    works[-1].get_future().then(lambda future: future.value()[0].sum()).wait()
    for work in works:
        work.wait()


def _dealing(value: torch.Tensor) -> None:
    whole = value[: 6 * dist.get_world_size()]
    dist.all_to_all_single(torch.empty_like(whole), whole)


CALLS: dict[str, Callable[[torch.Tensor], None]] = {
    "blocking": _blocking,
    "in flight": _in_flight,
    "all-to-all": _dealing,
}


def work_until_someone_dies(kind: str, victim: int, delay: float) -> dict[str, object]:
    """What a survivor saw: texts of errors, and the seconds that things took."""
    value = torch.ones(300_000)
    CALLS[kind](value)
    died = time.time() + delay
    if dist.get_rank() == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    seen: dict[str, object] = {}
    try:
        while True:
            CALLS[kind](value)
            value.fill_(1)
    except RuntimeError as error:
        seen["first"] = f"{type(error).__name__}: {error}"
        seen["after"] = time.time() - died
    try:
        CALLS[kind](value)
    except RuntimeError as error:
        seen["next"] = f"{type(error).__name__}: {error}"
    before = time.time()
    dist.destroy_process_group()
    seen["destroy"] = time.time() - before
    return seen


def tell_of_a_rank_that_does_not_come() -> list[str]:
    """Errors of a barrier and of a work that have time-outs of their own."""
    texts = []
    if dist.get_rank() == 0:
        short = timedelta(seconds=0.3)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        limited = torch._C._distributed_c10d.BarrierOptions()
        limited.timeout = short
        for call in (lambda: work.wait(short), lambda: dist.group.WORLD.barrier(limited).wait()):
            try:
                call()
            except hp.CommunicationError as error:
                texts.append(str(error))
        try:
            dist.barrier()
        except hp.CommunicationError as error:
            texts.append(str(error))
    else:
        time.sleep(1.5)
    return texts


def wait_until_the_group_is_aborted() -> list[str]:
    """Errors of calls to which the other rank does not come, when another thread of this one aborts the group."""
    texts: list[str] = []
    if dist.get_rank() == 0:
        dealing = dist.group.WORLD.alltoall([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)])
        threading.Timer(0.3, dist.distributed_c10d._abort_process_group).start()
        for call in (lambda: dist.all_reduce(torch.ones(3)), dealing.wait):
            try:
                call()
            except hp.CommunicationError as error:
                texts.append(str(error))
    else:
        time.sleep(1)
    return texts


def end_and_begin_again(ports: list[int]) -> dict[str, object]:
    """What was summed in each of several lives, and the threads, open files and segments after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    totals, left = [], []
    for port in ports:
        part = dist.new_group(list(range(size)))
        work = dist.all_reduce(torch.ones(1000), group=part, async_op=True)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        dist.all_gather_object([None] * size, rank)
        dist.destroy_process_group()
        assert work.is_completed(), "what was begun before the end is finished"
        try:
            part.allreduce([total])
        except hp.CommunicationError as error:
            assert "destroyed" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a call after the end must fail")
        del part, work
        totals.append(int(total))
        left.append(_left_behind(left[-1] if left else None))
        start(rank, size, port)
    return {"totals": totals, "left": left}


def _left_behind(before: tuple[int, int, list[str]] | None) -> tuple[int, int, list[str]]:
    """Threads, files and segments of this process, once they are no more than ``before``, or after some seconds."""
    deadline = time.time() + (5 if before is not None else 0.5)
    while True:
        segments = [path.name for path in Path("/dev/shm").glob(f"hybridpar-*-{os.getpid()}-*")]
        now = len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir())), segments
        if now == before or time.time() > deadline:
            return now
        time.sleep(0.05)
