"""A process that has imported everything, and forks a rank for every line that it reads: ranks start in no time.

A line of input is a JSON object: ``{"rank": ..., "variables": {...}, "folder": ..., "work": {...}}`` starts a rank and
``{"signal": "SIGKILL", "to": rank}`` sends it one; the answer to both is the number of its process.
``{"await": rank, "seconds": ...}`` answers how it ended, as ``subprocess`` would, or kills it. No thread may run here,
for fork's sake.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch

from tests.faults import victims

torch.set_num_threads(1)


def main() -> None:
    children: dict[int, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "signal" in order:
            answer = children[order["to"]]
            os.kill(answer, signal.Signals[order["signal"]])
        elif "await" in order:
            answer = _status(children[order["await"]], order["seconds"])
        else:
            answer = children[order["rank"]] = _start(order)
        print(answer, flush=True)


def _start(order: dict[str, Any]) -> int:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # ranks of earlier lines that have ended
    process = os.fork()
    if process == 0:
        os.environ.update(order["variables"])
        victims.rank(order["rank"], order["folder"], order["work"])
    return process


def _status(process: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    main()
