"""The process that is a host of ``tests/cluster.py``: its namespaces exist for as long as anything runs in them.

Started inside fresh namespaces, it names the hosts, and then does nothing until its standard input ends. The kernel
sees to that when the process that made the cluster ends, however it ends. Then it kills everything else on its host,
and ends too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

_QUIET_SCANS, _PAUSE = 3, 0.01


def main(name: str, addresses: str) -> None:
    if namespace_of("self") == namespace_of(str(os.getppid())):
        # It would end every process of the machine.
        sys.exit("expected to be started in a network namespace of its own, as tests/cluster.py does")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    socket.sethostname(name)
    know_hosts(addresses)
    print("ready", flush=True)
    try:
        sys.stdin.buffer.read()
    finally:
        end_everything()


def know_hosts(addresses: str) -> None:
    """Give this host an /etc/hosts of its own, which is gone with its mount namespace."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(addresses)
        file.flush()
        Path(file.name).chmod(0o644)
        if os.spawnlp(os.P_WAIT, "mount", "mount", "--bind", file.name, "/etc/hosts") != 0:
            sys.exit("/etc/hosts cannot be replaced")


def end_everything() -> None:
    """Kill the other processes of this network namespace, until several scans in a row find none."""
    quiet = 0
    while quiet < _QUIET_SCANS:
        found = others()
        quiet = 0 if found else quiet + 1
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE)


def others() -> list[int]:
    own = namespace_of("self")
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                namespace = namespace_of(folder.name)
            except OSError:  # it has ended
                continue
            if namespace == own:
                found.append(int(folder.name))
    return found


def namespace_of(process: str) -> Path:
    return Path("/proc", process, "ns/net").readlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
