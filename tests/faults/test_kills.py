"""A rank is killed at a random moment, on every route: every survivor says in time who is gone, and nothing is left.

``pytest tests/faults/test_kills.py --kills 20`` does it 20 times on each route. On some routes a rank is also stopped,
or ends by an exception of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hybridpar.comm.lanes.segments import FOLDER
from tests.cluster import Cluster, Link
from tests.faults.victims import TIMEOUT
from tests.ranks import free_port

# What asking after silent ranks takes on top, on a busy machine.
_GRACE = 4.0
# For ranks that must wait until the time is over.
_SHORT_TIMEOUT = 3.0
ONE_HOST = {
    "shared memory": {"route": "auto", "shared_memory": True},
    "flat": {"route": "flat", "shared_memory": False},
}
TWO_HOSTS = {
    "flat over a network": {"route": "flat", "interfaces": ["net0"]},
    "striped": {"route": "striped", "interfaces": ["net0", "net1"]},
    "hierarchical": {"route": "hierarchical", "interfaces": ["net0"]},
    "striped inside hierarchical": {"route": "hierarchical", "interfaces": ["net0", "net1"]},
    "compressed": {"route": "flat", "interfaces": ["net0"], "compress_exponents": True},
    "compressed inside hierarchical": {
        "route": "hierarchical",
        "interfaces": ["net0", "net1"],
        "compress_exponents": True,
    },
}


class Zygotes:
    """One for each host: processes that fork ranks. See ``tests/faults/zygote.py``."""

    def __init__(self, start: Callable[..., subprocess.Popen[Any]], hosts: int) -> None:
        argv = [sys.executable, "-m", "tests.faults.zygote"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [start(host, argv, **pipes) for host in range(hosts)]
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"

    def tell(self, host: int, order: dict[str, Any]) -> int:
        """Returns the number of the process that it is about."""
        process = self.processes[host]
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def _here(_: int, argv: list[str], **popen: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(argv, **popen)


@pytest.fixture(scope="module")
def one_host() -> Iterator[Zygotes]:
    with contextlib.closing(Zygotes(_here, 1)) as zygotes:
        yield zygotes


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Zygotes, Cluster]]:
    with (
        Cluster(hosts=2, links=[Link(mbit=1000), Link(mbit=500)]) as cluster,
        contextlib.closing(Zygotes(cluster.run, 2)) as zygotes,
    ):
        yield zygotes, cluster


@pytest.mark.parametrize("route", ONE_HOST.values(), ids=ONE_HOST.keys())
def test_on_one_host(route: dict[str, Any], one_host: Zygotes, tmp_path: Path, kills: int, trial_seed: int) -> None:
    for trial in range(kills):
        with _started(one_host, [4], route, "127.0.0.1", tmp_path, f"{trial_seed}/{trial}") as ranks:
            _check_a_kill(ranks)


@pytest.mark.hosts
@pytest.mark.parametrize("route", TWO_HOSTS.values(), ids=TWO_HOSTS.keys())
def test_on_two_hosts(
    route: dict[str, Any], two_hosts: tuple[Zygotes, Cluster], tmp_path: Path, kills: int, trial_seed: int
) -> None:
    zygotes, cluster = two_hosts
    for trial in range(kills):
        with _started(zygotes, [2, 2], route, cluster.address(0), tmp_path, f"{trial_seed}/{trial}") as ranks:
            _check_a_kill(ranks)


@pytest.mark.parametrize("check", ["stop", "mistake"])
@pytest.mark.parametrize("route", ONE_HOST.values(), ids=ONE_HOST.keys())
def test_other_faults_on_one_host(
    check: str, route: dict[str, Any], one_host: Zygotes, tmp_path: Path, trial_seed: int
) -> None:
    options = _options(check, trial_seed)
    with _started(one_host, [4], route, "127.0.0.1", tmp_path, f"{trial_seed}/0", **options) as ranks:
        _CHECKS[check](ranks)


@pytest.mark.hosts
@pytest.mark.parametrize("check", ["stop", "mistake"])
@pytest.mark.parametrize("name", ["striped inside hierarchical"])
def test_other_faults_on_two_hosts(
    check: str, name: str, two_hosts: tuple[Zygotes, Cluster], tmp_path: Path, trial_seed: int
) -> None:
    zygotes, cluster = two_hosts
    address, seed, options = cluster.address(0), f"{trial_seed}/0", _options(check, trial_seed)
    with _started(zygotes, [2, 2], TWO_HOSTS[name], address, tmp_path, seed, **options) as ranks:
        _CHECKS[check](ranks)


def _options(check: str, seed: int) -> dict[str, Any]:
    return {"timeout": _SHORT_TIMEOUT} if check == "stop" else {"mistaken": seed % 4}


@dataclass
class Trial:
    """Ranks that reduce.

    Attributes:
        places: host of each rank.
        victim: the rank that something happens to.
    """

    zygotes: Zygotes
    folder: Path
    seed: str
    places: Sequence[int]
    victim: int
    processes: set[str] = field(default_factory=set)

    def signal(self, name: str, rank: int) -> None:
        self.zygotes.tell(self.places[rank], {"signal": name, "to": rank})

    def status(self, rank: int) -> int:
        """As ``subprocess`` has it, once it has ended."""
        return self.zygotes.tell(self.places[rank], {"await": rank, "seconds": 20})

    def check_survivors(self, since: float) -> None:
        """All that raise since then name the victim, in time, and nobody who lives."""
        survivors = [rank for rank in range(len(self.places)) if rank != self.victim]
        _await([self.folder / f"{rank}.json" for rank in survivors], 3 * TIMEOUT + _GRACE, self.folder)
        for rank in survivors:
            seen = json.loads((self.folder / f"{rank}.json").read_text())
            context = f"seed {self.seed}, victim {self.victim}, rank {rank}: {seen}"
            reason = seen["text"].split(" failed: ", 1)[1]
            assert f"rank {self.victim} " in reason, context
            accused = re.findall(r"rank (\d+) \(process [^)]*\) has (?:ended|not answered)", reason)
            assert set(accused) <= {str(self.victim)}, context
            assert seen["raised"] - since < TIMEOUT + _GRACE, context
            assert seen["threads"] == [], context

    def check_memory(self) -> None:
        # A segment's name says which process made it.
        left = [path.name for path in FOLDER.iterdir() if self.processes & set(path.name.split("-"))]
        assert left == [], (self.seed, self.victim)


@contextlib.contextmanager
def _started(
    zygotes: Zygotes,
    counts: list[int],
    route: dict[str, Any],
    address: str,
    parent: Path,
    seed: str,
    *,
    mistaken: int | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Trial]:
    print(f"seed {seed}")
    draw = random.Random(seed)  # noqa: S311
    folder = parent / seed.replace("/", "-")
    folder.mkdir()
    work = {
        "tracks": 2, "interfaces": [], "shared_memory": True, "seed": draw.randrange(1 << 30), "mistaken": mistaken,
        "timeout": timeout,
    } | route  # fmt: skip
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    size, port = len(places), free_port()
    victim = draw.randrange(size) if mistaken is None else mistaken
    trial = Trial(zygotes, folder, seed, [host for host, _ in places], victim)
    try:
        for rank, (host, local) in enumerate(places):
            variables = {
                "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": counts[host],
                "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
                # torch's store looks up the name of every peer; a server that drops questions costs 5 s by default.
                "RES_OPTIONS": "timeout:1 attempts:1",
            }  # fmt: skip
            text = {name: str(value) for name, value in variables.items()}
            order = {"rank": rank, "variables": text, "folder": str(folder), "work": work}
            trial.processes.add(str(zygotes.tell(host, order)))
        _await([folder / f"{rank}.runs" for rank in range(size)], 60, folder)
        time.sleep(draw.uniform(0, 0.05))
        yield trial
    finally:
        (folder / "over").touch()


def _check_a_kill(trial: Trial) -> None:
    trial.signal("SIGKILL", trial.victim)
    killed = time.monotonic()
    trial.check_survivors(killed)
    trial.check_memory()


def _check_a_stop(trial: Trial) -> None:
    """A rank that stands still is named like one that is gone, but only when the time is over."""
    trial.signal("SIGSTOP", trial.victim)
    stopped = time.monotonic()
    try:
        trial.check_survivors(stopped)
    finally:
        trial.signal("SIGKILL", trial.victim)
    assert trial.status(trial.victim) == -9


def _check_a_mistake(trial: Trial) -> None:
    """Its process ends as any Python program does, although threads of it were waiting for the others."""
    _await([trial.folder / "mistake"], 20, trial.folder)
    mistaken = time.monotonic()
    assert trial.status(trial.victim) == 1
    assert time.monotonic() - mistaken < TIMEOUT
    trial.check_survivors(mistaken)
    trial.check_memory()


_CHECKS = {"stop": _check_a_stop, "mistake": _check_a_mistake}


def _await(files: list[Path], seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while missing := [file.name for file in files if not file.exists()]:
        failed = {path.name: path.read_text() for path in folder.glob("*.failed")}
        assert not failed, failed
        found = {path.name: path.read_text() for path in folder.glob("*.json")}
        assert time.monotonic() < end, f"after {seconds:g} s still missing: {missing}; found: {found}"
        time.sleep(0.005)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kills"))


@pytest.fixture
def trial_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kill-seed") or os.getpid())
