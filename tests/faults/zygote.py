"""A process that has imported everything, and forks a rank for every line that it reads: ranks start in no time.

A line of input is a JSON object: ``{"rank": ..., "variables": {...}, "folder": ..., "work": {...}}`` starts a rank,
``{"kill": rank}`` kills one with SIGKILL. The answer to each is the number of its process. No thread may run here, for
fork's sake.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import torch

from tests.faults import victims

torch.set_num_threads(1)


def main() -> None:
    children: dict[int, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "kill" in order:
            process = children.pop(order["kill"])
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        else:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # ranks of earlier lines that have ended
            process = os.fork()
            if process == 0:
                os.environ.update(order["variables"])
                victims.rank(order["rank"], order["folder"], order["work"])
            children[order["rank"]] = process
        print(process, flush=True)


if __name__ == "__main__":
    main()
