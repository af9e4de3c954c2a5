"""Runs a program on workers of MXNet's own ps-lite: a scheduler, a server and the workers, on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.ranks import free_port

# mxnet 1.9.1 asks NumPy for a name that it no longer has.
PREAMBLE = "import numpy as np\nnp.bool = bool\nimport mxnet as mx\n"


def run_pslite(text: str, workers: int, timeout: float = 60.0) -> list[str]:
    """What each worker printed, in the order of their ranks there.

    Args:
        text: the workers' program, after PREAMBLE. It prints ``rank <number>`` first.
    """
    meeting = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(role: str, program: str) -> subprocess.Popen[str]:
        environment = os.environ | meeting | {"DMLC_ROLE": role}
        return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], env=environment, **pipes)

    serving = [start(role, PREAMBLE) for role in ("scheduler", "server")]
    working = [start("worker", PREAMBLE + text) for _ in range(workers)]
    try:
        ended = [(process, *process.communicate(timeout=timeout)) for process in working]
        for process, _, error in ended:
            assert process.returncode == 0, error
        for process in serving:
            process.communicate(timeout=timeout)
    finally:
        for process in serving + working:
            process.kill()
            process.wait()
    printed = [output for _, output, _ in ended]
    return sorted(printed, key=lambda output: int(output.split(maxsplit=2)[1]))
