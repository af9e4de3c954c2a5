"""Two hosts with two links each, 1000 and 250 Mbit/s: what using both side by side gives, and what when one slows down.

    python benchmarks/striped.py [--mbit 1000 250] [--ranks 1] [--rounds 3] [--json FILE]

Hosts are network namespaces of this machine (`tests/cluster.py`), which needs the rights of root. First, all-reduce of
one tensor, in turns in the same processes:

gloo        torch.distributed.all_reduce over the first link
gloo both   the same on a process group with both interfaces, in pieces, which gloo deals out to them in turn
ours        hp.Group over the first link
ours equal  over both links, an equal share of the tensor on each
ours agreed over both links, shares as the ranks measured and agreed them

Columns: seconds, median over all calls of all rounds; payload that each host sends in that time, in Mbit/s; which part
that is of what both links carry together, measured before every round by plain TCP transfers on both at once, in both
directions (the best measurement counts); megabytes that the first host sent on each link in a call, as the interfaces
counted them; how many times as long gloo takes.

Then a run of ours agreed, in the middle of which the first link slows down to `--slow` Mbit/s on all hosts, and
recovers. The ranks are told nothing. Calls are shown with their shares, in the order of time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from support.hosts import Cluster, Link, payload_rate, run_on_hosts, sent_bytes, unless_there_is_no_cluster
from support.report import table, write_json
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.routes import HierarchicalLane, StripedLane

MB, MIB = 1e6, 1 << 20
WARM_UP = 3
# One bucket of torch's DDP.
PIECE = 25 * MIB
WAYS = ("gloo", "gloo both", "ours", "ours equal", "ours agreed")


def interfaces(options: argparse.Namespace) -> list[str]:
    return [f"net{link}" for link in range(len(options.mbit))]


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = hp.init()
    found = run_through_a_slowdown(group, options) if options.progress else measure_ways(group, options)
    if group.rank == 0:
        write_json(options.result, found)
    group.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def measure_ways(group: hp.Group, options: argparse.Namespace) -> dict[str, Any]:
    """Of every call of every way, the seconds of the slowest rank and the bytes that this host sent on each link."""
    names = interfaces(options)
    both = hp.Group.from_torch(interfaces=names)
    equal = hp.Group.from_torch(interfaces=names)
    striped_lane(equal)._adapt = False
    calls: dict[str, Callable[[Tensor], object]] = {
        "gloo": dist.all_reduce,
        "gloo both": gloo_on(names),
        "ours": group.all_reduce,
        "ours equal": equal.all_reduce,
        "ours agreed": both.all_reduce,
    }
    found: dict[str, Any] = {name: {"seconds": [], "bytes": []} for name in WAYS}
    for repeat in range(WARM_UP + options.calls):
        for name, call in calls.items():
            seconds, sent = measure_call(group, call, options.size)
            if repeat >= WARM_UP:
                found[name]["seconds"].append(seconds)
                found[name]["bytes"].append([sent[interface] for interface in names])
    found["ours agreed"]["shares"] = striped_lane(both).shares
    return found


def gloo_on(names: Sequence[str]) -> Callable[[Tensor], None]:
    """torch's own way to use several interfaces: one communicator on each, collectives go to them in turn."""
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join(names)
    whole = dist.new_group(backend="gloo")

    def call(tensor: Tensor) -> None:
        works = [dist.all_reduce(piece, group=whole, async_op=True) for piece in tensor.split(PIECE // 4)]
        for work in works:
            work.wait()

    return call


def measure_call(group: hp.Group, call: Callable[[Tensor], object], size: int) -> tuple[float, dict[str, int]]:
    """Seconds of the slowest rank, and bytes that this host sent meanwhile, by interface. The sum is checked."""
    tensor = torch.full((size // 4,), group.rank + 1.0)
    group.barrier()
    before, start = sent_bytes(), time.perf_counter()
    call(tensor)
    seconds = group.all_reduce(torch.tensor([time.perf_counter() - start], dtype=torch.float64), "max")
    sent = {name: count - before[name] for name, count in sent_bytes().items()}
    assert tensor.eq(group.size * (group.size + 1) / 2).all()
    return seconds.item(), sent


def striped_lane(group: hp.Group) -> StripedLane:
    """The part of a group that crosses hosts on several links."""
    lane: Lane | None = group._lane
    if isinstance(lane, HierarchicalLane):
        lane = lane._cross
    assert isinstance(lane, StripedLane), f"expected several lanes between hosts, got {lane}"
    return lane


def run_through_a_slowdown(group: hp.Group, options: argparse.Namespace) -> dict[str, Any]:
    """Calls until the launcher says that it is enough. Of each, its seconds and the shares that it went with."""
    both = hp.Group.from_torch(interfaces=interfaces(options))
    calls = []
    for number in range(3 * options.slow_calls):
        shares = list(striped_lane(both).shares)
        seconds, _ = measure_call(group, both.all_reduce, options.slow_size)
        calls.append({"seconds": seconds, "shares": shares})
        if group.rank == 0:
            options.progress.write_text(str(number + 1))
    return {"calls": calls}


def carried(cluster: Cluster) -> list[float]:
    """Bytes of payload a second on each link, all of them busy in both directions."""
    links = range(len(cluster.links))
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda link: payload_rate(cluster, link, both_ways=True), links))


def arguments(options: argparse.Namespace) -> list[str]:
    numbers = {"--size": options.size, "--slow-size": options.slow_size, "--calls": options.calls}
    numbers["--slow-calls"] = options.slow_calls
    mbit = ["--mbit", *(f"{rate:g}" for rate in options.mbit)]
    return ["--rank", *mbit, *(str(part) for pair in numbers.items() for part in pair)]


def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Samples of all rounds, by way, and the bytes a second that each link carries."""
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in WAYS}
    rates = []
    for number in range(options.rounds):
        print(f"{options.hosts} x {options.ranks}, round {number + 1} of {options.rounds}", file=sys.stderr)
        rates.append(carried(cluster))
        result = run_on_hosts(
            cluster, Path(__file__), arguments(options), ranks_per_host=options.ranks, timeout=options.timeout
        )
        for name, samples in result.items():
            for what, values in samples.items():
                found[name].setdefault(what, []).extend(values if what != "shares" else [values])
    return {"rates": [max(column) for column in zip(*rates, strict=True)], "ways": found}


def slow_down(cluster: Cluster, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The calls of a run in which the first link is slow in the middle third, with the rate that it had in each."""
    print(f"{options.hosts} x {options.ranks}, the first link slows down", file=sys.stderr)
    changes = {options.slow_calls: options.slow, 2 * options.slow_calls: options.mbit[0]}
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        progress = Path(folder) / "calls"
        progress.write_text("0")
        run = pool.submit(
            run_on_hosts, cluster, Path(__file__), [*arguments(options), "--progress", str(progress)],
            ranks_per_host=options.ranks, timeout=options.timeout,
        )  # fmt: skip
        changed: dict[int, float] = {0: options.mbit[0]}
        for due, mbit in changes.items():
            while not run.done() and (number := int(progress.read_text() or 0)) < due:
                time.sleep(0.002)
            if run.done():
                break
            cluster.set_rate(0, mbit)
            changed[number] = mbit
        calls: list[dict[str, Any]] = run.result()["calls"]
    for number, call in enumerate(calls):
        call["mbit"] = changed[max(first for first in changed if first <= number)]
    return calls


def must_send(options: argparse.Namespace, size: int) -> float:
    """Bytes that each host sends in an all-reduce of ``size`` bytes."""
    return 2 * (options.hosts - 1) / options.hosts * size


def summary(options: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, object]]:
    ways, together = found["ways"], sum(found["rates"])
    gloo = statistics.median(ways["gloo"]["seconds"])
    rows = []
    for name in WAYS:
        seconds = statistics.median(ways[name]["seconds"])
        rate = must_send(options, options.size) / seconds
        row: dict[str, object] = {"way": name, "seconds": f"{seconds:.3f}", "Mbit/s": f"{rate * 8 / MB:.0f}"}
        row["of both links %"] = f"{100 * rate / together:.0f}"
        for interface, counts in zip(interfaces(options), zip(*ways[name]["bytes"], strict=True), strict=True):
            row[f"{interface} MB"] = f"{statistics.median(counts) / MB:.1f}"
        rows.append(row | {"gloo / this": f"{gloo / seconds:.2f}"})
    return rows


def slow_summary(options: argparse.Namespace, calls: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Calls that went with the same rate and the same shares, in one row."""
    payload = must_send(options, options.slow_size) * 8 / MB
    rows: list[dict[str, object]] = []
    first = 0
    for number in range(1, len(calls) + 1):
        same = number < len(calls) and all(calls[number][key] == calls[first][key] for key in ("mbit", "shares"))
        if same:
            continue
        seconds = statistics.median(call["seconds"] for call in calls[first:number])
        rates = [calls[first]["mbit"], *options.mbit[1:]]
        row: dict[str, object] = {"calls": f"{first + 1} to {number}"}
        row |= {f"{name} cap": f"{rate:g}" for name, rate in zip(interfaces(options), rates, strict=True)}
        row |= {
            f"{name} share": f"{share:.3f}"
            for name, share in zip(interfaces(options), calls[first]["shares"], strict=True)
        }
        row |= {"seconds": f"{seconds:.3f}", "Mbit/s": f"{payload / seconds:.0f}"}
        rows.append(row | {"of both caps %": f"{100 * payload / seconds / sum(rates):.0f}"})
        first = number
    return rows


def compare(options: argparse.Namespace) -> None:
    with Cluster(options.hosts, [Link(mbit=mbit) for mbit in options.mbit]) as cluster:
        found = measure(cluster, options)
        rates = ", ".join(f"{rate * 8 / MB:.0f}" for rate in found["rates"])
        print(f"{options.size // MIB} MB, {options.hosts} x {options.ranks} ranks; the links carry {rates} Mbit/s")
        print(table(summary(options, found), text_columns=1), flush=True)
        calls = slow_down(cluster, options)
    print(f"\n{options.slow_size // MIB} MB a call, ours agreed, while the first link slows down and recovers")
    print(table(slow_summary(options, calls), text_columns=1))
    if options.json:
        write_json(options.json, found | {"slow": calls})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 250.0], help="caps of the links")
    parser.add_argument("--size", type=int, default=64 * MIB, help="bytes of the tensor, a multiple of 4")
    parser.add_argument("--calls", type=int, default=5, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--slow", type=float, default=200.0, help="Mbit/s of the first link while it is slow")
    parser.add_argument("--slow-size", type=int, default=16 * MIB, help="bytes of the tensor in that run")
    parser.add_argument("--slow-calls", type=int, default=40, help="before, during and after the slow time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the tables")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
        return
    with unless_there_is_no_cluster():
        compare(options)


if __name__ == "__main__":
    main()
