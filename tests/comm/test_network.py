"""Lanes and routes between two hosts, over real networks."""

from __future__ import annotations

import sys

import pytest

from tests.cluster import Cluster, ClusterError, Link

pytestmark = pytest.mark.hosts


def test_every_route_fulfils_the_contract_on_uneven_hosts_with_two_links() -> None:
    with Cluster(hosts=2, links=[Link(mbit=2000), Link(mbit=1000)]) as cluster:
        argv = [sys.executable, "-m", "tests.comm.network_checks", "net0", "net1"]
        outputs = cluster.launch([3, 2], argv, {"OMP_NUM_THREADS": "1"})
        assert all("all checks passed" in text for text in outputs)
        # Both links carried their part.
        assert min(cluster.sent(host, link) for host in range(2) for link in range(2)) > 1_000_000


def test_an_interface_that_does_not_exist_is_named() -> None:
    argv = [sys.executable, "-c", "import hybridpar as hp; hp.init(interfaces=['net7'], timeout=10)"]
    refused = pytest.raises(ClusterError, match="a network interface of this host, got 'net7'")
    with Cluster(hosts=2) as cluster, refused:
        cluster.launch(1, argv, {"OMP_NUM_THREADS": "1"})
