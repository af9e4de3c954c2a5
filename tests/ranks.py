"""Run a function on N ranks: threads of this process, or spawned processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from hybridpar.comm.group import Group, abort_thread_group, thread_groups
from hybridpar.comm.lanes.shm_lane import ShmLane
from hybridpar.comm.start import init


def run_threads(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """``function(group, *arguments)`` on ``size`` threads; results in rank order. The first rank's error is raised."""
    groups = thread_groups(size, timeout=timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def work(group: Group) -> None:
        torch.set_num_threads(1)
        try:
            results[group.rank] = function(group, *arguments)
        except BaseException as error:
            errors[group.rank] = error
            abort_thread_group(group)

    threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if return_exceptions:
        return [error if error is not None else result for error, result in zip(errors, results, strict=True)]
    for error in sorted((e for e in errors if e is not None), key=_is_consequence):
        raise error
    return results


def run_shared_threads(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    chunk_bytes: int = 256 << 10,
    return_exceptions: bool = False,
) -> list[Any]:
    """``function(lane, *arguments)`` on ``size`` threads that meet in shared memory, as ``run_threads`` otherwise."""

    def work(group: Group) -> Any:
        lane = ShmLane(group._lane, timeout, chunk_bytes)
        try:
            return function(lane, *arguments)
        except BaseException:
            lane.abort()
            raise
        finally:
            lane.close()

    return run_threads(size, work, timeout=timeout, return_exceptions=return_exceptions)


def _is_consequence(error: BaseException) -> bool:
    return "another rank left" in str(error)


def _process(
    rank: int, size: int, port: int, function: Callable[..., Any], arguments: Any, shared_memory: bool, queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        # multiprocessing does not run atexit functions: close here.
        group = init(timeout=60, shared_memory=shared_memory)
        queue.put((rank, function(group, *arguments), None))
        torch.distributed.destroy_process_group()
    except BaseException as error:
        queue.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_processes(
    size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0, shared_memory: bool = True
) -> list[Any]:
    """The same on spawned processes that meet over gloo. ``function`` is importable; results are picklable."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    queue = context.Queue()
    processes = [
        context.Process(
            target=_process, args=(rank, size, port, function, arguments, shared_memory, queue), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        answers = {}
        for _ in processes:
            rank, result, error = queue.get(timeout=timeout)
            answers[rank] = (result, error)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    failed = {rank: error for rank, (_, error) in answers.items() if error}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in sorted(failed.items()))
    return [answers[rank][0] for rank in range(size)]


def run_program(text: str, size: int, timeout: float = 90.0) -> tuple[list[int], list[tuple[str, str]]]:
    """A program on ``size`` ranks that are told of each other as by torchrun, each to its own end.

    Returns:
        Exit statuses, and what each rank printed and complained of.
    """
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | meeting | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", text], env=environment | {"RANK": str(rank)}, **pipes)
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=timeout) for process in processes]
    return [process.returncode for process in processes], outputs


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
