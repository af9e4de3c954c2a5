"""Ranks that reduce until one of them is killed, and write down what they saw."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan

TIMEOUT = 5.0
_KEPT: list[object] = []


class MistakeError(KeyError):
    """What the code of a user might raise."""


def rank(number: int, folder: str, work: dict[str, Any]) -> None:
    """The whole life of a rank. Returns never, and raises a ``MistakeError`` only."""
    place = Path(folder)
    code = 0
    try:
        seen, group = _reduce_until_an_error(number, place, **work)
        (place / f"{number}.tmp").write_text(json.dumps(seen))
        (place / f"{number}.tmp").rename(place / f"{number}.json")
        # A rank that ended now, or dropped its group, would be one more that the others find gone.
        _await(place / "over", 60)
        del group
    except MistakeError:
        raise  # ends the process as it would end a user's
    except BaseException:
        (place / f"{number}.failed").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _reduce_until_an_error(
    number: int,
    place: Path,
    *,
    route: str,
    tracks: int,
    interfaces: list[str],
    shared_memory: bool,
    seed: int,
    mistaken: int | None,
    compress_exponents: bool = False,
    timeout: float,
) -> tuple[dict[str, Any], hp.Group]:
    group = hp.init(timeout=timeout, interfaces=interfaces, shared_memory=shared_memory)
    plan = Plan(64 << 10, tracks, route, compress_exponents=compress_exponents)  # type: ignore[arg-type]
    engine = Engine(group, plan=plan)
    draw = random.Random(seed)  # noqa: S311
    tensors = [torch.ones(draw.choice([1, 100, 5_000, 20_000, 100_000])) for _ in range(12)]
    engine.register([f"tensor {index}" for index in range(len(tensors))], tensors)
    rounds = 0
    try:
        while True:
            for index, tensor in enumerate(tensors):
                engine.submit(index, tensor.fill_(1))
            engine.flush()
            assert all(float(tensor[-1]) == group.size for tensor in tensors)
            rounds += 1
            if rounds == 3:
                (place / f"{number}.runs").touch()
                if mistaken == number:
                    _make_a_mistake(engine, tensors, place / "mistake")
                if mistaken is not None:
                    _await(place / "mistake", 20)
                    time.sleep(0.5)  # the other's process ends in the middle of its wait
    except hp.CommunicationError as error:
        raised, text = time.monotonic(), str(error)
    engine.close()
    group.close()
    return {"raised": raised, "text": text, "rounds": rounds, "threads": _threads_that_stay()}, group


class _SlowEnd:
    """Keeps the interpreter busy while it goes. A thread that comes out of C++ then ends the process with SIGABRT."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(0.5)


def _make_a_mistake(engine: Engine, tensors: list[torch.Tensor], told: Path) -> None:
    """While other threads of this rank wait for ranks that do not come before they are told."""
    for index, tensor in enumerate(tensors):
        engine.submit(index, tensor.fill_(1))
    time.sleep(0.3)
    _KEPT.append(_SlowEnd())
    told.touch()
    raise MistakeError("this rank's own code fails")


def _await(file: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.002)


def _threads_that_stay() -> list[str]:
    """Names of the package's threads that do not end by themselves; the watch answers until the process ends."""
    end = time.monotonic() + TIMEOUT + 2
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hybridpar")]
        left = [name for name in names if name != "hybridpar-watch"]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.01)
