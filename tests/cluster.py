"""A cluster on one machine: hosts are network namespaces, joined by links whose speed is capped.

    with Cluster(hosts=2, links=[Link(mbit=1000), Link(mbit=250)]) as cluster:
        outputs = cluster.launch(2, [sys.executable, "train.py"], {"OMP_NUM_THREADS": "1"})

Every host has the interfaces net0, net1, ... (one for each link), plugged into a switch for each link. What a host
sends is capped at its own end, what it receives at the switch's end, so each direction of each host has the link's
rate. Hosts XX

# Note [a cluster leaves nothing behind]
Nothing made here has a name in the system. Each namespace, the switch's too, is kept by one process that ends when the
maker does (``tests/cluster_host.py``), taking all other processes of its host with it; the kernel then removes the
namespace, its interfaces and its queues. So there is nothing for a later run to clean up, even after ``kill -9``, and
clusters that run at the same time may all use the same addresses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# What a sender may have saved up: seconds at the link's rate, but never less than the largest packets (bytes). Timers
# of a busy machine are late by milliseconds; with less, the rate lost meanwhile would never be made up.
_BURST, _LEAST_BURST = 0.004, 1 << 16
# How long a packet may wait in the queue.
_QUEUE = "50ms"
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_FIRST_PORT = 20_000
# Seconds.
_LAUNCH_TIMEOUT, _GRACE = 120.0, 5.0
# Of the printed text, in error messages.
_LINES = 30


class ClusterError(RuntimeError):
    """What ran on a cluster failed."""


class NoClusterError(ClusterError):
    """This machine or user cannot make a cluster."""


@dataclass(frozen=True)
class Link:
    """A network that every host is plugged into.

    Attributes:
        mbit: megabits a second, headers included, that a host can send, and as many that it can receive.
    """

    mbit: float

    def __post_init__(self) -> None:
        if not self.mbit > 0:
            raise ValueError(f"expected a rate above 0 Mbit/s, got {self.mbit}")


class Cluster:
    """Hosts and links. A context manager: they exist inside the block.

    Args:
        hosts: how many.
        links: what joins them; the first one is what ranks meet over.

    Raises:
        NoClusterError: (on entering) this process may not make namespaces, or a program is missing.
    """

    def __init__(self, hosts: int = 2, links: Sequence[Link] = (Link(mbit=1000),)) -> None:
        if not 1 <= hosts <= 250 or not links:
            raise ValueError(f"expected 1 to 250 hosts and a link or more, got {hosts} hosts and {len(links)} links")
        self.hosts, self.links = hosts, list(links)
        self._names = [f"host{host}" for host in range(hosts)]
        self._keepers: dict[str, subprocess.Popen[str]] = {}
        self._launches = 0

    def __enter__(self) -> Cluster:
        _check_machine()
        addresses = self._hosts_file()
        try:
            for name in ("switch", *self._names):
                self._keepers[name] = _keeper(name, addresses)
            for name, keeper in self._keepers.items():
                _wait_until_ready(name, keeper)
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them."""
        for keeper in self._keepers.values():
            keeper.terminate()
        for keeper in self._keepers.values():
            keeper.communicate()
        self._keepers = {}

    def interface(self, link: int = 0) -> str:
        """Its name, the same on every host."""
        return f"net{link}"

    def address(self, host: int, link: int = 0) -> str:
        """The host's IPv4 address on that link."""
        return f"10.77.{link}.{host + 1}"

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on a host, with the id that it is seen under everywhere.

        Args:
            env: variables that it has besides this process's.
            popen: more for ``subprocess.Popen``.
        """
        return self._popen(self._names[host], argv, env=os.environ | dict(env or {}), **popen)

    def start(
        self, ranks_per_host: int | Sequence[int], argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Ranks:
        """Start ranks on all hosts, with the variables that torchrun sets; ranks of a host have neighbouring numbers.

        Args:
            ranks_per_host: the same for all, or one number for each host.
            argv: the program of every rank.
            env: variables that the ranks have besides this process's.
        """
        counts = [ranks_per_host] * self.hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
        if len(counts) != self.hosts or min(counts) < 0 or sum(counts) == 0:
            raise ValueError(f"expected a number of ranks for each of {self.hosts} hosts, got {ranks_per_host}")
        first = {
            "WORLD_SIZE": str(sum(counts)),
            # The rank 0 that serves as the meeting place is on the first host that has ranks.
            "MASTER_ADDR": self.address(next(host for host, count in enumerate(counts) if count)),
            # Nothing else runs on these hosts, so any port is free that an earlier launch has not used.
            "MASTER_PORT": str(_FIRST_PORT + self._launches),
            "GLOO_SOCKET_IFNAME": self.interface(0),
            "PYTHONUNBUFFERED": "1",
        }
        self._launches += 1
        ranks = Ranks()
        try:
            for host, count in enumerate(counts):
                for local_rank in range(count):
                    own = {
                        "RANK": str(len(ranks.processes)),
                        "LOCAL_RANK": str(local_rank),
                        "LOCAL_WORLD_SIZE": str(count),
                    }
                    ranks.add(self, host, argv, first | own | dict(env or {}))
        except BaseException:
            ranks.close()
            raise
        return ranks

    def launch(
        self,
        ranks_per_host: int | Sequence[int],
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float = _LAUNCH_TIMEOUT,
    ) -> list[str]:
        """The same, to the end: what each rank printed. None of them runs on afterwards.

        Raises:
            ClusterError: a rank failed, or they took longer than ``timeout`` seconds; with what the ranks printed.
        """
        with self.start(ranks_per_host, argv, env) as ranks:
            return ranks.wait(timeout)

    def set_rate(self, link: int, mbit: float, host: int | None = None) -> None:
        """Change a cap, also while something is being sent: of one host, or of all of them."""
        Link(mbit)
        for number in range(self.hosts) if host is None else [host]:
            self._cap(number, link, mbit)

    def sent(self, host: int, link: int = 0) -> int:
        """Bytes that the host has sent on that link until now, as its interface counts them."""
        shown = self._output(self._names[host], ["ip", "-s", "-j", "link", "show", "dev", self.interface(link)])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost"]
        for host, name in enumerate(self._names):
            for link in range(len(self.links)):
                own, address = name if link == 0 else f"{name}-{self.interface(link)}", self.address(host, link)
                # Servers that take IPv6 as well see the address in the second form.
                lines += [f"{address} {own}", f"::ffff:{address} {own}-mapped"]
        return "\n".join(lines) + "\n"

    def _connect(self) -> None:
        """Switches, cables, addresses, caps."""
        switch = []
        for link in range(len(self.links)):
            switch += [f"link add {self.interface(link)} type bridge", f"link set {self.interface(link)} up"]
            for host, name in enumerate(self._names):
                port, keeper = _port(host, link), self._keepers[name]
                switch += [
                    f"link add {port} type veth peer name {self.interface(link)} netns {keeper.pid}",
                    f"link set {port} master {self.interface(link)} addrgenmode none up",
                ]
        self._batch("switch", "ip", switch)
        for host, name in enumerate(self._names):
            lines = ["link set lo up"]
            for link in range(len(self.links)):
                interface = self.interface(link)
                # One address for each interface, so that what is bound to an interface has no choice.
                lines += [
                    f"link set {interface} addrgenmode none up",
                    f"address add {self.address(host, link)}/24 dev {interface}",
                ]
            self._batch(name, "ip", lines)
            for link, shape in enumerate(self.links):
                self._cap(host, link, shape.mbit)

    def _cap(self, host: int, link: int, mbit: float) -> None:
        rate = mbit * 1e6
        burst = max(rate / 8 * _BURST, _LEAST_BURST)
        for name, device in ((self._names[host], self.interface(link)), ("switch", _port(host, link))):
            shape = f"qdisc replace dev {device} root tbf rate {rate:.0f}bit burst {burst:.0f} latency {_QUEUE}"
            self._batch(name, "tc", [shape])

    def _batch(self, name: str, program: str, lines: Sequence[str]) -> None:
        self._output(name, [program, "-batch", "-"], "\n".join(lines) + "\n")

    def _output(self, name: str, argv: Sequence[str], text: str | None = None) -> str:
        """What a short program printed."""
        pipe = subprocess.PIPE
        with self._popen(name, argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            output, problem = process.communicate(text, timeout=60)
        if process.returncode:
            raise ClusterError(f"{' '.join(argv)} failed on {name}: {problem.strip()}\nits input was:\n{text}")
        return str(output)

    def _popen(self, name: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        if name not in self._keepers:
            raise ClusterError("expected an open cluster, got one outside its `with` block")
        # nsenter becomes the program: the process has one id throughout.
        enter = ["nsenter", f"--target={self._keepers[name].pid}", "--net", "--uts", "--mount", "--wd=.", "--"]
        return subprocess.Popen([*enter, *argv], **popen)


class Ranks:
    """Processes that were started together. A context manager: none of them outlives the block.

    Attributes:
        processes: in rank order.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[Any]] = []
        self._printed: list[IO[bytes]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, cluster: Cluster, host: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the next rank."""
        # A file and not a pipe: nobody has to read while the ranks run.
        self._printed.append(tempfile.TemporaryFile())  # noqa: SIM115  (closed with the ranks)
        output = {"stdin": subprocess.DEVNULL, "stdout": self._printed[-1], "stderr": subprocess.STDOUT}
        self.processes.append(cluster.run(host, argv, env, start_new_session=True, **output))

    def outputs(self) -> list[str]:
        """What each rank has printed until now, errors included."""
        # pread: the position in the file is the rank's.
        printed = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._printed]
        return [text.decode(errors="replace") for text in printed]

    def wait(self, timeout: float = _LAUNCH_TIMEOUT, *, grace: float = _GRACE) -> list[str]:
        """Until all have ended; what each rank printed.

        Args:
            timeout: seconds for all of them.
            grace: seconds that the others have once a rank has failed.

        Raises:
            ClusterError: a rank failed, or the time was over; with what the ranks printed.
        """
        end = time.monotonic() + timeout
        while None in (codes := [process.poll() for process in self.processes]) and time.monotonic() < end:
            if any(codes):
                end = min(end, time.monotonic() + grace)
            time.sleep(0.01)
        texts = self.outputs()
        if any(code != 0 for code in codes):
            raise ClusterError("\n".join(_story(rank, code, texts[rank]) for rank, code in enumerate(codes)))
        return texts

    def close(self) -> None:
        """Kill those that still run."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for file in self._printed:
            file.close()


def _story(rank: int, code: int | None, text: str) -> str:
    state = "still ran" if code is None else f"ended with {code}"
    return f"rank {rank} {state}:\n" + "\n".join(f"  {line}" for line in text.splitlines()[-_LINES:])


def _port(host: int, link: int) -> str:
    """The switch's end of a cable."""
    return f"host{host}net{link}"


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise NoClusterError(f"expected the rights of root to make network namespaces, got user {os.geteuid()}")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise NoClusterError(f"expected the program {program}, found none; install {package}")


def _keeper(name: str, addresses: str) -> subprocess.Popen[str]:
    """The process that is a host. See Note [a cluster leaves nothing behind]."""
    script = Path(__file__).with_name("cluster_host.py")
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", sys.executable, "-I", "-S", str(script), name, addresses],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
    )  # fmt: skip


def _wait_until_ready(name: str, keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdout is not None
    if keeper.stdout.readline().strip() != "ready":
        _, problem = keeper.communicate()
        raise NoClusterError(
            f"{name} could not be made: {problem.strip()}; network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
