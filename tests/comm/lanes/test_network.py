"""Lanes and routes between two hosts, over real networks."""

from __future__ import annotations

import re
import sys

import pytest

from tests.cluster import Cluster, Link

pytestmark = pytest.mark.hosts


def test_every_route_fulfils_the_contract_on_uneven_hosts_with_two_links() -> None:
    with Cluster(hosts=2, links=[Link(mbit=2000), Link(mbit=1000)]) as cluster:
        argv = [sys.executable, "-m", "tests.comm.lanes.network_checks", "net0", "net1"]
        outputs = cluster.launch([3, 2], argv, {"OMP_NUM_THREADS": "1"})
        assert all("all checks passed" in text for text in outputs)
        # Both links carried their part.
        assert min(cluster.sent(host, link) for host in range(2) for link in range(2)) > 1_000_000


# The second host has one wrong name; every rank says what it heard, and when.
_START = """
import os, sys, time
import hybridpar as hp
names = sys.argv[1 + int(os.environ["RANK"]) // 2].split(",")
started = time.monotonic()
try:
    hp.init(interfaces=names, timeout=30)
except ValueError as error:
    print(f"after {time.monotonic() - started:.1f} s: {error}", flush=True)
time.sleep(1)  # whoever meets rank 0's store last must still find it
"""


@pytest.mark.parametrize("wrong", ["net7,net0", "net0,net7"], ids=["first", "second"])
def test_an_interface_that_does_not_exist_on_one_host_is_named_on_every_rank(wrong: str) -> None:
    argv = [sys.executable, "-c", _START, "net0,net1", wrong]
    with Cluster(hosts=2, links=[Link(mbit=1000), Link(mbit=1000)]) as cluster:
        outputs = cluster.launch([2, 1], argv, {"OMP_NUM_THREADS": "1"})
    for text in outputs:
        found = re.search(r"after ([\d.]+) s: rank 2: .* a network interface of this host, got 'net7'", text)
        assert found, outputs
        # Most of it is waiting for the others' imports.
        assert float(found[1]) < 15, outputs
