"""MXNet's own parameter servers: a scheduler and servers, and the variables by which workers find them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

# mxnet 1.9.1 asks NumPy for a name that newer releases do not have. Importing it is all that a server does.
_SERVE = "import numpy; numpy.bool = bool; import mxnet"

Start = Callable[[int, Sequence[str], Mapping[str, str]], "subprocess.Popen[Any]"]


class PsLite:
    """The scheduler, on the first host, and servers on every host. A context manager: none of them outlives the block.

    Args:
        workers: how many there will be in all.
        servers: on how many hosts, and how many on each.
        where: variables that tell every process the scheduler's address, and its own.
        start: starts a program on a host, with variables besides this process's.
    """

    def __init__(
        self, workers: int, servers: tuple[int, int], where: Mapping[str, str], start: Start = lambda *a: _start(*a)
    ) -> None:
        hosts, each = servers
        # Neither MXNet's operators nor its servers get more threads than a rank has.
        self._common = dict(where) | {
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(hosts * each),
            "OMP_NUM_THREADS": "1",
        }
        self._roles = [("scheduler", 0)] + [("server", host) for host in range(hosts) for _ in range(each)]
        self._start = start
        self._processes: list[subprocess.Popen[Any]] = []

    @classmethod
    def on_this_host(cls, workers: int, servers: int) -> Self:
        """All on the loopback interface."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        where = {
            "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1",
        }  # fmt: skip
        return cls(workers, (1, servers), where)

    @property
    def worker(self) -> dict[str, str]:
        """Variables of a worker."""
        return self._common | {"DMLC_ROLE": "worker"}

    def __enter__(self) -> Self:
        try:
            for role, host in self._roles:
                program = [sys.executable, "-W", "ignore", "-c", _SERVE]
                self._processes.append(self._start(host, program, self._common | {"DMLC_ROLE": role}))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _start(_host: int, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[Any]:
    return subprocess.Popen(argv, env=os.environ | dict(env))
