"""Push and pull of a step's gradients: our stores against MXNet's own parameter servers (ps-lite), all in one run.

    python benchmarks/kvstore.py [--hosts 1x2 1x4 2x1 2x2] [--sets resnet50 small] [--rounds 1] [--json FILE]

Sets of keys: the 161 parameters of ResNet-50, and 1,000 keys of 1,000 elements; float32. A step pushes each worker's
value of every key and pulls the sums, without an optimizer in the store. Ways to ask for it:

keys      push of each key, then pull of each key, a call for each, priorities as a Trainer gives them
lists     one push and one pull, each of all keys
pushpull  pushpull of each key, as MXNet 1.9's Trainer does (NDArrays only: the plain store waits for each)

Cases:

ps-lite      mx.kv.create("dist_sync") on a scheduler, a number of servers on each host, and the workers
ours mxnet   mx.kv.create("dist_sync_hybridpar"), the same NDArrays
ours numpy   hp.kvstore.create("dist_sync") on NumPy arrays
ours torch   the same on torch tensors

Every round has processes of its own, in which all cases take turns, step by step; each round begins with another case.
There are rounds with one server for each host and rounds with as many as workers; the faster of the two is the peer by
which all is divided. Workers and servers have one thread for operators each. Before a step counts the values that
every worker got in it are compared with the sums.

"1x2" is two workers on this machine. "2x1" is one worker on each of two hosts, network namespaces (`tests/cluster.py`,
needs root), whose links are capped; least s is then the least time in which any all-reduce of the set can be sent, at
the rate that a plain TCP transfer reached on the link. With one worker and one server on each of two hosts, ps-lite
sends no more than that itself: half of every large value stays on its host.

Columns: seconds from when all workers are ready until the last one has all sums, median of all steps of all rounds;
megabytes of parameters pushed and pulled a second by each worker; megabytes that the busiest host sent in a step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.gradients import MODELS, Shape
from support.hosts import Cluster, Link, payload_rate, run_on_hosts, sent_bytes, unless_there_is_no_cluster
from support.launch import run_ranks
from support.pslite import PsLite
from support.report import table, write_json

import hybridpar as hp

MB = 1e6
WARM_UP = 2
PEER = "ps-lite"
_SCHEDULER_PORT = 19_000

SETS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": MODELS["resnet50"],
    "small": lambda: [(1000,)] * 1000,
}


def by_keys(store: Any, keys: Sequence[int], values: Sequence[Any], outs: Sequence[Any]) -> None:
    for place, key in enumerate(keys):
        store.push(key, values[place], priority=-place)
    for place, key in enumerate(keys):
        store.pull(key, outs[place], priority=-place)


def in_lists(store: Any, keys: Sequence[int], values: Sequence[Any], outs: Sequence[Any]) -> None:
    store.push(keys, values)
    store.pull(keys, outs)


def pushpull(store: Any, keys: Sequence[int], values: Sequence[Any], outs: Sequence[Any]) -> None:
    for place, key in enumerate(keys):
        store.pushpull(key, values[place], outs[place], priority=-place)


WAYS = {"keys": by_keys, "lists": in_lists, "pushpull": pushpull}


@dataclass(frozen=True)
class Library:
    """Of arrays: how they are made, seen as NumPy's, and waited for."""

    zeros: Callable[[Shape], Any]
    numpy: Callable[[Any], np.ndarray]
    wait: Callable[[], None] = lambda: None


def numpy_library() -> Library:
    return Library(lambda shape: np.zeros(shape, np.float32), lambda array: array)


def torch_library() -> Library:
    return Library(torch.zeros, lambda array: array.numpy())


def hybridpar_mxnet() -> Any:
    """Comes before mxnet: it mends what that does not find in newer releases of NumPy."""
    return importlib.import_module("hybridpar.mxnet")


def mxnet_library() -> Library:
    hybridpar_mxnet()
    import mxnet as mx

    return Library(mx.nd.zeros, lambda array: array.asnumpy(), mx.nd.waitall)


def mxnet_store(name: str) -> Any:
    import mxnet as mx

    return mx.kv.create(name)


# Of each case: the arrays, and the store, which is made on all ranks together.
CASES: dict[str, tuple[Callable[[], Library], Callable[[hp.Group], Any]]] = {
    PEER: (mxnet_library, lambda group: mxnet_store("dist_sync")),
    "ours mxnet": (mxnet_library, lambda group: mxnet_store("dist_sync_hybridpar")),
    "ours numpy": (numpy_library, lambda group: hp.kvstore.create("dist_sync", group)),
    "ours torch": (torch_library, lambda group: hp.kvstore.create("dist_sync", group)),
}


class Worker:
    """One case's share of a set on this rank: the keys, what is pushed and where the sums are to be."""

    def __init__(self, store: Any, library: Library, first_key: int, shapes: Sequence[Shape], group: hp.Group) -> None:
        self._store, self._library, self._group = store, library, group
        self._keys = list(range(first_key, first_key + len(shapes)))
        self._values = [library.zeros(shape) for shape in shapes]
        self._outs = [library.zeros(shape) for shape in shapes]
        self._step = 0
        library.wait()
        store.init(self._keys, self._values)

    def take_step(self, way: str) -> tuple[float, float]:
        """Seconds until the sums are here, and bytes that this host has sent when they are everywhere."""
        group = self._group
        self._step += 1
        for key, value in zip(self._keys, self._values, strict=True):
            value[:] = self._number(key, group.rank)
        self._library.wait()
        group.barrier()
        sent_before, start = sum(sent_bytes().values()), time.perf_counter()
        WAYS[way](self._store, self._keys, self._values, self._outs)
        self._library.wait()
        seconds = time.perf_counter() - start
        group.barrier()
        sent = float(sum(sent_bytes().values()) - sent_before)
        self._check(way)
        return seconds, sent

    def _number(self, key: int, rank: int) -> float:
        """What a rank pushes: another one for each rank, for each of several keys, and in each of several steps."""
        return 1.0 + rank + self._step % 7 + key % 5

    def _check(self, way: str) -> None:
        for key, out in zip(self._keys, self._outs, strict=True):
            expected = sum(self._number(key, rank) for rank in range(self._group.size))
            if not (self._library.numpy(out) == expected).all():
                raise AssertionError(f"{way}, key {key}, step {self._step}: expected {expected} everywhere")


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = hp.init()
    # Each round begins with another case.
    first = options.round % len(options.cases)
    names = options.cases[first:] + options.cases[:first]
    libraries = {name: CASES[name][0]() for name in names}
    stores = {name: CASES[name][1](group) for name in names}
    found: dict[str, dict[str, list[float]]] = {}
    first_key = 0
    for chosen in options.sets:
        shapes = SETS[chosen]()
        workers = {name: Worker(stores[name], libraries[name], first_key, shapes, group) for name in names}
        first_key += len(shapes)
        for way in options.ways:
            found |= take_turns(chosen, way, workers, group, options.steps)
    if group.rank == 0:
        write_json(options.result, found)
    group.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def take_turns(
    chosen: str, way: str, workers: dict[str, Worker], group: hp.Group, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Of each case and step, the seconds of the slowest rank and the bytes of the busiest host."""
    # The plain store's pull waits, so that it would send one key after the other: nobody would use it like that.
    names = [name for name in workers if way != "pushpull" or name in (PEER, "ours mxnet")]
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(WARM_UP + steps):
        for name in names:
            measured[name].append(workers[name].take_step(way))
    found = {}
    for name in names:
        worst = group.all_reduce(torch.tensor(measured[name], dtype=torch.float64), "max")[WARM_UP:]
        found[f"{chosen} {way} {name}"] = {"seconds": worst[:, 0].tolist(), "bytes": worst[:, 1].tolist()}
    return found


def measure(options: argparse.Namespace, hosts: int, each: int) -> dict[str, Any]:
    """Samples of all rounds by set, way, case and, for the peer, servers of each host; bytes a second of the link."""
    arguments = [
        "--rank", "--steps", str(options.steps), "--sets", *options.sets, "--ways", *options.ways,
        "--cases", *options.cases,
    ]  # fmt: skip
    samples: dict[str, dict[str, list[float]]] = {}
    rates: list[float] = []
    for number in range(options.rounds):
        for servers in sorted({1, each}) if options.servers is None else options.servers:
            print(f"{hosts} x {each}, {servers} servers a host, round {number + 1}", file=sys.stderr)
            own = [*arguments, "--round", str(number)]
            if hosts == 1:
                found = run_on_this_host(own, each, servers, options.timeout)
            else:
                found, rate = run_on_capped_hosts(own, hosts, each, servers, options)
                rates.append(rate)
            for name, measured in found.items():
                name += f" {servers}" * name.endswith(PEER)
                for what, values in measured.items():
                    samples.setdefault(name, {}).setdefault(what, []).extend(values)
    return {"rate": max(rates, default=math.nan), "samples": samples}


def run_on_this_host(arguments: Sequence[str], ranks: int, servers: int, timeout: float) -> Any:
    with PsLite.on_this_host(ranks, servers) as peer:
        return run_ranks(Path(__file__), arguments, ranks=ranks, timeout=timeout, environment=peer.worker)


def run_on_capped_hosts(
    arguments: Sequence[str], hosts: int, each: int, servers: int, options: argparse.Namespace
) -> tuple[Any, float]:
    with Cluster(hosts, [Link(mbit=options.mbit)]) as cluster:
        rate = payload_rate(cluster, both_ways=True)
        where = {
            "DMLC_PS_ROOT_URI": cluster.address(0),
            "DMLC_PS_ROOT_PORT": str(_SCHEDULER_PORT),
            "DMLC_INTERFACE": cluster.interface(),
        }
        with PsLite(hosts * each, (hosts, servers), where, cluster.run) as peer:
            found = run_on_hosts(
                cluster, Path(__file__), arguments, ranks_per_host=each, timeout=options.timeout,
                environment=peer.worker,
            )  # fmt: skip
        return found, rate


def summary(options: argparse.Namespace, hosts: int, each: int, found: dict[str, Any]) -> list[dict[str, object]]:
    rows = []
    for chosen in options.sets:
        size = 4 * sum(map(math.prod, SETS[chosen]()))
        least = 2 * (hosts - 1) / hosts * size / found["rate"]
        for way in options.ways:
            cases = {
                name.removeprefix(f"{chosen} {way} "): {what: statistics.median(v) for what, v in samples.items()}
                for name, samples in found["samples"].items()
                if name.startswith(f"{chosen} {way} ")
            }
            peers = [median["seconds"] for case, median in cases.items() if case.startswith(PEER)]
            for case, median in cases.items():
                seconds = median["seconds"]
                row: dict[str, object] = {"hosts": f"{hosts}x{each}", "set": chosen, "way": way, "case": case}
                row |= {"seconds": f"{seconds:.4f}", "MB / s": f"{2 * size / MB / seconds:.0f}"}
                if hosts > 1:
                    row |= {"MB sent": f"{median['bytes'] / MB:.1f}", "least s": f"{least:.4f}"}
                rows.append(row | {f"{PEER} / this": f"{min(peers) / seconds:.2f}" if peers else ""})
    return rows


def compare(options: argparse.Namespace) -> None:
    everything = {}
    for text, (hosts, each) in options.hosts.items():
        with unless_there_is_no_cluster():
            everything[text] = found = measure(options, hosts, each)
            if hosts > 1:
                rate = found["rate"] * 8 / MB
                print(f"the link carries {rate:.0f} Mbit/s of payload, capped at {options.mbit:g} Mbit/s")
            print("the number behind ps-lite is that of the servers of each host")
            print(table(summary(options, hosts, each, found), text_columns=4), flush=True)
            print()
        if options.json:
            write_json(options.json, everything)


def _hosts(text: str) -> tuple[str, tuple[int, int]]:
    hosts, _, each = text.partition("x")
    if not (hosts.isdecimal() and each.isdecimal() and int(hosts) * int(each) > 0):
        raise argparse.ArgumentTypeError(f"expected hosts x workers of each, for example 2x1, got {text!r}")
    return text, (int(hosts), int(each))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--hosts", nargs="+", type=_hosts, default=list(map(_hosts, ("1x2", "1x4", "2x1", "2x2"))), metavar="HxW",
        help="hosts x workers of each",
    )  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument(
        "--servers", nargs="+", type=int, help="of each host; one, and as many as workers, if not given"
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="cap of every host's link, in each direction")
    parser.add_argument("--steps", type=int, default=5, help="of each case, set and way in each round")
    parser.add_argument("--rounds", type=int, default=2, help="of fresh processes, for each number of servers")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.hosts = dict(options.hosts)
    return options


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
    elif importlib.util.find_spec("mxnet") is None:
        print("not run: expected mxnet 1.9.1, found none; it has wheels for Python 3.11", file=sys.stderr)
    else:
        compare(options)


if __name__ == "__main__":
    main()
