"""The cluster of namespaces: what it promises to the tests and benchmarks that run on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError, Link, NoClusterError
from tests.transfer import payload_rate

ROOT = Path(__file__).parents[1]
# Of a full Ethernet frame with IPv4, TCP and time stamps, the part that is payload.
PAYLOAD = 1448 / 1514
PYTHON = [sys.executable, "-I", "-S", "-c"]

_MEETING = """
import json, torch, torch.distributed as dist
import hybridpar as hp
from hybridpar.topology import detect, host_identity
torch.set_num_threads(1)
group = hp.init(timeout=60, shared_memory=False)
ours = group.all_reduce(torch.arange(5.0) + group.rank)
stock = torch.arange(5.0) + group.rank
dist.all_reduce(stock)
print(json.dumps([ours.tolist(), stock.tolist(), host_identity(), group.host, group.local_rank]))
"""

_MAKER = """
import signal, sys, time
from tests.cluster import Cluster, Link
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests were started with it ignored
with Cluster(2, [Link(mbit=100)]) as cluster:
    ranks = cluster.start(2, ["sh", "-c", "sleep 1000 & exec sleep 1000"])
    print(*(process.pid for process in ranks.processes), flush=True)
    time.sleep(1000)
"""

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=2, links=[Link(mbit=100), Link(mbit=25)]) as cluster:
        yield cluster


def mbit(rate: float) -> float:
    return rate * 8 / 1e6


def roughly(rate: float, cap: float) -> bool:
    """What the cap lets through. Loose, since a busy machine reads late what has arrived in time."""
    return 0.6 * cap < mbit(rate) / PAYLOAD < 1.25 * cap


@pytest.mark.parametrize(("link", "cap"), [(0, 100), (1, 25)])
def test_a_link_carries_what_its_cap_says_in_each_direction(cluster: Cluster, link: int, cap: float) -> None:
    assert roughly(payload_rate(cluster, link, seconds=0.6, both_ways=True), cap)


def test_links_do_not_share_their_rate(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda link: payload_rate(cluster, link, seconds=0.6), (0, 1))
    assert roughly(first, 100) and roughly(second, 25)


def test_bytes_are_counted_where_they_are_sent(cluster: Cluster) -> None:
    def counts() -> list[int]:
        return [cluster.sent(host, link) for host in (0, 1) for link in (0, 1)]

    before = counts()
    payload_rate(cluster, 1, seconds=0.2)
    sent = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    payload = 25e6 / 8 * 0.2
    assert payload < sent[1] < 1.1 * payload
    assert sent[0] == sent[2] == 0
    assert 0 < sent[3] < 0.1 * payload  # acknowledgements


def test_a_rate_can_change_while_bytes_are_on_their_way() -> None:
    with Cluster(hosts=2, links=[Link(mbit=8)]) as cluster, ThreadPoolExecutor() as pool:
        transfer = pool.submit(payload_rate, cluster, seconds=30)
        time.sleep(0.5)
        assert not transfer.done()
        cluster.set_rate(0, 400)
        transfer.result(timeout=15)  # 30 MB, of which a few hundred kilobytes had been sent


def test_one_host_can_be_slower_than_the_others() -> None:
    with Cluster(hosts=3, links=[Link(mbit=100)]) as cluster:
        cluster.set_rate(0, 20, host=1)
        assert roughly(payload_rate(cluster, seconds=0.1), 20)
        cluster.set_rate(0, 100)
        assert roughly(payload_rate(cluster, seconds=0.6), 100)


def test_clusters_side_by_side_use_the_same_addresses() -> None:
    with Cluster(2, [Link(mbit=100)]) as one, Cluster(2, [Link(mbit=20)]) as other, ThreadPoolExecutor() as pool:
        assert one.address(1) == other.address(1)
        rates = list(pool.map(lambda cluster: payload_rate(cluster, seconds=0.5), (one, other)))
    assert roughly(rates[0], 100) and roughly(rates[1], 20)


def test_several_ranks_of_each_host_meet() -> None:
    with Cluster(hosts=2) as cluster:
        printed = cluster.launch([2, 1], [sys.executable, "-c", _MEETING], {"PYTHONPATH": str(ROOT)})
    ours, stock, identities, hosts, local_ranks = zip(*map(json.loads, printed), strict=True)
    assert ours == stock == ([3.0, 6.0, 9.0, 12.0, 15.0],) * 3
    assert hosts == ("host0", "host0", "host1") and local_ranks == (0, 1, 0)
    assert identities[0] == identities[1] != identities[2]


def test_ranks_know_their_place(cluster: Cluster) -> None:
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME EXTRA"
    program = f"import os; print(*(os.environ[name] for name in {names.split()}))"
    printed = cluster.launch([2, 1], [*PYTHON, program], {"EXTRA": "more"})
    assert printed == [f"{place} 3 10.77.0.1 net0 more\n" for place in ("0 0 2", "1 1 2", "2 0 1")]


def test_ranks_meet_on_the_first_host_that_has_any(cluster: Cluster) -> None:
    printed = cluster.launch([0, 1], [*PYTHON, "import os; print(os.environ['MASTER_ADDR'])"])
    assert printed == ["10.77.0.2\n"]


def test_a_failed_rank_is_named_and_the_others_do_not_outlive_it(cluster: Cluster) -> None:
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no such thing'); time.sleep(99)"
    with cluster.start(1, [*PYTHON, program]) as ranks:
        with pytest.raises(ClusterError, match=r"rank 0 still ran:\n.*\nrank 1 ended with 1:\n  no such thing"):
            ranks.wait(grace=0.1)
        assert ranks.processes[0].poll() is None
    assert ranks.processes[0].poll() == -signal.SIGKILL


def test_ranks_that_hang_are_ended(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="rank 0 still ran:\n  here\nrank 1 still ran"):
        cluster.launch(1, [*PYTHON, "import time; print('here', flush=True); time.sleep(99)"], timeout=0.5)


def test_hosts_know_each_other_by_name(cluster: Cluster) -> None:
    program = "import socket as s; print(s.gethostname(), s.gethostbyname('host1'), s.gethostbyaddr('10.77.1.1')[0])"
    assert cluster.launch(1, [*PYTHON, program]) == [f"host{rank} 10.77.0.2 host0-net1\n" for rank in (0, 1)]


def test_programs_start_in_the_folder_of_their_maker(cluster: Cluster, tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with cluster.run(0, ["pwd"], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0].strip() == str(folder or Path.cwd())


def test_a_process_of_a_host_is_known_by_its_own_id(cluster: Cluster) -> None:
    with cluster.run(1, [*PYTHON, "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True) as process:
        assert int(process.communicate()[0]) == process.pid


def test_nothing_is_left_at_the_end() -> None:
    interfaces = subprocess.run(["ip", "-o", "link"], capture_output=True, check=True).stdout
    with Cluster(hosts=2) as cluster:
        process = cluster.run(0, ["sleep", "1000"])
        wait_until(lambda: namespace_of(process.pid) != namespace_of(os.getpid()))
        inside = namespace_of(process.pid)
    assert process.wait(0) == -signal.SIGKILL
    assert inside not in all_namespaces()
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, check=True).stdout == interfaces


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_maker_is_killed(how: signal.Signals) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with maker:
        assert maker.stdout is not None
        ranks = list(map(int, maker.stdout.readline().split()))
        outside = namespace_of(os.getpid())
        wait_until(lambda: all(namespace_of(rank) != outside for rank in ranks))
        inside = {namespace_of(rank) for rank in ranks}
        assert len(inside) == 2
        maker.send_signal(how)
    # Other processes of these hosts are gone too: the child of each shell.
    wait_until(lambda: not inside & all_namespaces())
    wait_until(lambda: not any(Path("/proc", str(rank)).exists() for rank in ranks))


def test_a_host_refuses_to_share_its_network_with_the_process_that_starts_it() -> None:
    script = Path(__file__).with_name("cluster_host.py")
    # In namespaces that hold nothing but this shell, in case that it does not refuse.
    isolated = ["unshare", "--net", "--uts", "--mount", "sh", "-c", '"$@"; exit $?', "sh"]
    command = [*isolated, sys.executable, str(script), "host0", ""]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "a network namespace of its own" in done.stderr and not done.stdout


def test_without_the_rights_of_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoClusterError, match=r"rights of root.*got user 1000"), Cluster():
        pass


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_program_is_named(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in {"ip", "tc", "unshare", "nsenter"} - {missing}:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoClusterError, match=f"program {missing}, found none; install iproute2"), Cluster():
        pass


def test_a_machine_that_forbids_namespaces_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(NoClusterError, match=r"could not be made: unshare: Operation not permitted; .*CAP_"), Cluster():
        pass


@pytest.mark.parametrize("arguments", [{"hosts": 0}, {"hosts": 251}, {"links": []}])
def test_impossible_clusters_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 250 hosts and a link or more"):
        Cluster(**arguments)  # type: ignore[arg-type]


def test_a_rate_is_positive(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="above 0"):
        cluster.set_rate(0, 0)


def test_outside_its_block_a_cluster_runs_nothing() -> None:
    with pytest.raises(ClusterError, match="outside its `with` block"):
        Cluster().run(0, ["true"])


def namespace_of(process: int) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


def all_namespaces() -> set[Path]:
    """Network namespaces that a process is in."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.add(namespace_of(int(folder.name)))
            except OSError:  # it has ended
                continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
