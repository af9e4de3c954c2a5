"""Run checks on ranks whose default process group is "hybridpar"."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hybridpar  # noqa: F401  (makes the backend known)
from hybridpar.comm.torch_face.process_group import ProcessGroupOptions
from tests.ranks import free_port

Check = Callable[[dist.ProcessGroup], None]


def verdicts(size: int, checks: Sequence[Check], timeout: float = 120.0) -> dict[str, str]:
    """What each check said on the ranks, by its name: nothing where it held on all of them.

    Checks get a gloo group of all ranks, for results to compare with. After one has failed, later ones may too: the
    ranks are out of step.
    """
    answers = run(size, _all_checks, tuple(checks), timeout=timeout)
    assert all(isinstance(said, dict) for said in answers.values()), answers
    return {check.__name__: _joined(answers, check.__name__) for check in checks}


def run(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 120.0,
    survivors: int | None = None,
    options: ProcessGroupOptions | None = None,
) -> dict[int, Any]:
    """``function(*arguments)`` on ranks that have initialised torch.distributed with "hybridpar".

    Args:
        survivors: how many ranks are expected to answer; None means all.
        options: ``pg_options`` of the default group.
    """
    # Forks of a server that has imported everything and has no ranks: six times as fast as new interpreters.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybridpar", __name__])
    queue, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, options, function, arguments, queue), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        return dict(sorted(queue.get(timeout=timeout) for _ in range(size if survivors is None else survivors)))
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def start(rank: int, size: int, port: int, options: ProcessGroupOptions | None = None) -> None:
    """What a user's script does."""
    dist.init_process_group(
        "hybridpar",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        pg_options=options,
    )


def _joined(answers: dict[int, dict[str, str]], name: str) -> str:
    return "\n".join(f"rank {rank}: {said[name]}" for rank, said in answers.items() if said[name])


def _rank(
    rank: int,
    size: int,
    port: int,
    options: ProcessGroupOptions | None,
    function: Callable[..., Any],
    arguments: Any,
    queue: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    try:
        start(rank, size, port, options)
        result = function(*arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        result = traceback.format_exc()
    queue.put((rank, result))


def _all_checks(checks: Sequence[Check]) -> dict[str, str]:
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    said = {}
    for check in checks:
        torch.manual_seed(dist.get_rank())
        try:
            check(gloo)
            said[check.__name__] = ""
        except BaseException:
            said[check.__name__] = traceback.format_exc()
    return said
