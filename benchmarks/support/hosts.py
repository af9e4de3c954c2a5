"""A benchmark's case on several hosts: the cluster of namespaces that the tests use, and what its links carry."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.cluster import Cluster, ClusterError, Link, NoClusterError, Ranks  # noqa: E402  (the line above finds it)
from tests.transfer import payload_rate  # noqa: E402

__all__ = [
    "Cluster",
    "ClusterError",
    "Link",
    "NoClusterError",
    "Ranks",
    "payload_rate",
    "run_on_hosts",
    "sent_bytes",
    "start_on_hosts",
    "unless_there_is_no_cluster",
]


def run_on_hosts(
    cluster: Cluster,
    script: Path,
    arguments: Sequence[str],
    *,
    ranks_per_host: int | Sequence[int],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run ``script`` with ``arguments`` and ``--result FILE`` as new ranks; the JSON that rank 0 left in FILE.

    Args:
        timeout: seconds after which the ranks are stopped.
        environment: variables that the ranks have besides this process's; they compute on one thread each.

    Raises:
        ClusterError: a rank failed, with the end of what the ranks printed, or the time was over.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        with start_on_hosts(
            cluster, script, [*arguments, "--result", str(result)], ranks_per_host, environment
        ) as ranks:
            ranks.wait(timeout)
        return json.loads(result.read_text())


def start_on_hosts(
    cluster: Cluster,
    script: Path,
    arguments: Sequence[str],
    ranks_per_host: int | Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Start ``script`` with ``arguments`` as new ranks, of one thread each."""
    own = {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    return cluster.start(ranks_per_host, [sys.executable, str(script), *arguments], own)


@contextmanager
def unless_there_is_no_cluster() -> Iterator[None]:
    """Where the machine cannot make one, say so and go on: `make bench` has other benchmarks, too."""
    try:
        yield
    except NoClusterError as error:
        print(f"not run: {error}", file=sys.stderr)


def sent_bytes() -> dict[str, int]:
    """Bytes that this process's host has sent until now, by interface, loopback left out. Headers hardly count: the
    interfaces count large packets before they are cut."""
    lines = [line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(counts.split()[8]) for name, _, counts in lines if name.strip() != "lo"}
