"""Run checks on ranks that have called hvd.init()."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hybridpar.horovod as hvd
from tests.ranks import free_port

Check = Callable[[], None]


def verdicts(size: int, checks: Sequence[Check], timeout: float = 120.0) -> dict[str, str]:
    """What each check said on the ranks, by its name: nothing where it held on all of them.

    torch.distributed is initialised with gloo, for results to compare with. After a check has failed later ones may,
    too: the ranks are out of step.
    """
    # Forks of a server that has imported everything and has no ranks: six times as fast as new interpreters.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybridpar.horovod", __name__])
    queue, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, tuple(checks), queue), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(sorted(queue.get(timeout=timeout) for _ in processes))
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    assert all(isinstance(said, dict) for said in answers.values()), answers
    names = [check.__name__ for check in checks]
    return {name: "\n".join(f"rank {r}: {said[name]}" for r, said in answers.items() if said[name]) for name in names}


def _rank(rank: int, size: int, port: int, checks: Sequence[Check], queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said: Any = {}
    try:
        hvd.init(timeout=30)
        for check in checks:
            torch.manual_seed(rank)
            try:
                check()
                said[check.__name__] = ""
            except BaseException:
                said[check.__name__] = traceback.format_exc()
        hvd.shutdown()
        torch.distributed.destroy_process_group()
    except BaseException:
        said = traceback.format_exc()
    queue.put((rank, said))
