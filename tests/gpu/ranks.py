"""Ranks that share one GPU: spawned processes whose CUDA tensors travel over gloo, as NCCL takes one rank a device."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

import hybridpar as hp
from hybridpar.comm.group import connect
from hybridpar.topology import Topology
from tests.ranks import free_port

TIMEOUT = 60.0


def group_on_one_device(rank: int, size: int, port: int, *, nccl: bool = False) -> hp.Group:
    """The group of rank ``rank``; all of them call."""
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    topology = Topology(rank, size, rank, size, socket.gethostname(), "test")
    return connect(store, rank, range(size), topology=topology, timeout=TIMEOUT, nccl=nccl)


def _process(rank: int, size: int, port: int, function: Callable[[hp.Group], Any], queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        queue.put((rank, function(group_on_one_device(rank, size, port)), None))
    except BaseException as error:
        queue.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_on_one_device(size: int, function: Callable[[hp.Group], Any], timeout: float = 120.0) -> list[Any]:
    """``function(group)`` on ``size`` processes; results in rank order. It is importable, and results are picklable."""
    context = multiprocessing.get_context("spawn")
    port, queue = free_port(), context.Queue()
    processes = [
        context.Process(target=_process, args=(r, size, port, function, queue), daemon=True) for r in range(size)
    ]
    for process in processes:
        process.start()
    try:
        answers = [queue.get(timeout=timeout) for _ in processes]
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    failed = [f"rank {rank}: {error}" for rank, _, error in answers if error]
    assert not failed, "\n".join(failed)
    return [result for _, result, _ in sorted(answers, key=lambda answer: answer[0])]
