"""The gradients of one step between hosts: ResNet-50 and BERT-base on several ranks each, links capped at 1 Gbit/s.

    python benchmarks/two_hosts.py [--models resnet50 bert-base] [--ranks 2 4] [--rounds 3] [--json FILE]

Hosts are network namespaces of this machine (`tests/cluster.py`), which needs the rights of root. The module has the
parameters of the model it is named after, normally distributed gradients, and a backward pass that takes no time.
Cases:

ddp        torch's DistributedDataParallel on gloo, float32: all ranks in one ring
ddp bf16   the same with torch's own bf16_compress_hook
ours       hp.DataParallel on the same module, float32
ours bf16  the same, gradients travel in bfloat16
ours compressed, ours bf16 compressed
           the same two with compress_exponents: fewer bytes cross, and every bit of the format arrives
ours top-k hp.DataParallel, of each gradient the largest 1 % of its values travel, the rest waits for the next step

All cases run in turns in the same processes, `--rounds` rounds of fresh processes, each beginning with another case.
Columns: seconds from the start of backward, when all ranks are ready, until the last rank has every gradient, median
over all steps of all rounds; megabytes that the busiest host sent in a step, as its interface counted them; the least
that any all-reduce of plain numbers must send from each host, 2 (hosts - 1) / hosts of the gradients in that format;
the share of the link that was used, once counting all that was sent, once counting only that least; how many times as
long the peers take. What a link carries is measured before every round, with a plain TCP transfer in both directions;
the best measurement counts.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers.ddp_step import ddp, ddp_bf16
from support.gradients import MODELS
from support.hosts import Cluster, Link, payload_rate, run_on_hosts, sent_bytes, unless_there_is_no_cluster
from support.ready_gradients import ReadyGradients
from support.report import table, write_json
from torch import nn

import hybridpar as hp

MB = 1e6
# By which everything is divided.
PEERS = ("ddp", "ddp bf16")


@dataclass(frozen=True)
class Case:
    """One way to reduce the gradients.

    Attributes:
        peer: what wraps the module, or None for ours.
        options: of ours, for hp.DataParallel.
        element_bytes: of a gradient's element on the wire; None where that depends on the values.
        tolerance: of the averages, in standard deviations; None where they are no averages of all values.
        warm_up: steps that are not counted.
    """

    peer: Callable[[nn.Module], nn.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    element_bytes: int | None = 4
    tolerance: float | None = 1e-5
    warm_up: int = 2

    def wrap(self, module: nn.Module, group: hp.Group) -> nn.Module:
        if self.peer is not None:
            return self.peer(module)
        return hp.DataParallel(module, group=group, reduction="mean", **self.options)


CASES = {
    "ddp": Case(ddp),
    "ddp bf16": Case(ddp_bf16, element_bytes=2, tolerance=2**-5),
    "ours": Case(),
    "ours bf16": Case(options={"plan": hp.Plan(wire=hp.Wire(dtype=torch.bfloat16))}, element_bytes=2, tolerance=2**-5),
    "ours compressed": Case(options={"plan": hp.Plan(compress_exponents=True)}),
    "ours bf16 compressed": Case(
        options={"plan": hp.Plan(wire=hp.Wire(dtype=torch.bfloat16), compress_exponents=True)},
        element_bytes=2,
        tolerance=2**-5,
    ),
    "ours top-k": Case(options={"plan": hp.Plan(wire=hp.Wire(top_k=0.01))}, element_bytes=None, tolerance=None),
}


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = hp.init()
    found = {}
    (model,) = options.models
    # Each round begins with another case.
    first = options.round % len(options.cases)
    for name in options.cases[first:] + options.cases[:first]:
        module = ReadyGradients(MODELS[model](), group.rank, group.size)
        wrapped = CASES[name].wrap(module, group)
        found[name] = measure_case(CASES[name], wrapped, module, group, options.steps)
        if isinstance(wrapped, hp.DataParallel):
            wrapped.close()
        del wrapped, module
        gc.collect()  # torch's wrapper is in a cycle, and holds all gradients twice
    if group.rank == 0:
        write_json(options.result, found)
    group.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def measure_case(
    case: Case, wrapped: nn.Module, module: ReadyGradients, group: hp.Group, steps: int
) -> dict[str, list[float]]:
    """Of each step, the seconds of the slowest rank and the bytes that the busiest host sent."""
    seconds, sent = [], []
    for step in range(case.warm_up + steps):
        module.prepare()
        loss = wrapped()
        group.barrier()
        sent_before, start = sum(sent_bytes().values()), time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - start)
        group.barrier()
        sent.append(float(sum(sent_bytes().values()) - sent_before))
        if case.tolerance is not None and not (error := module.error()) <= case.tolerance:
            raise AssertionError(f"step {step}: a gradient is {error:g} deviations away from the mean over the ranks")
    worst = group.all_reduce(torch.tensor([seconds, sent], dtype=torch.float64), "max")[:, case.warm_up :]
    return {"seconds": worst[0].tolist(), "bytes": worst[1].tolist()}


def measure(options: argparse.Namespace, model: str, ranks: int) -> dict[str, Any]:
    """Samples of all rounds, by case, and the bytes a second that the link carries."""
    cases: dict[str, dict[str, list[float]]] = {}
    rates = []
    with Cluster(options.hosts, [Link(mbit=options.mbit)]) as cluster:
        for number in range(options.rounds):
            print(f"{model}, {options.hosts} x {ranks}, round {number + 1} of {options.rounds}", file=sys.stderr)
            rates.append(payload_rate(cluster, both_ways=True))
            found = run_on_hosts(
                cluster, Path(__file__),
                ["--rank", "--models", model, "--steps", str(options.steps), "--round", str(number),
                 "--cases", *options.cases],
                ranks_per_host=ranks, timeout=options.timeout,
            )  # fmt: skip
            for name, samples in found.items():
                for what, values in samples.items():
                    cases.setdefault(name, {}).setdefault(what, []).extend(values)
    return {"rate": max(rates), "cases": {name: cases[name] for name in options.cases}}


def least_bytes(case: Case, model: str, hosts: int) -> float:
    """What each host must send at least, whatever the route. NaN where the format does not say."""
    elements = sum(map(math.prod, MODELS[model]()))
    return 2 * (hosts - 1) / hosts * elements * (case.element_bytes or math.nan)


def summary(options: argparse.Namespace, model: str, ranks: int, found: dict[str, Any]) -> list[dict[str, object]]:
    medians = {
        name: {what: statistics.median(values) for what, values in samples.items()}
        for name, samples in found["cases"].items()
    }
    rows = []
    for name, median in medians.items():
        seconds, sent, rate = median["seconds"], median["bytes"], found["rate"]
        least = least_bytes(CASES[name], model, options.hosts)
        row: dict[str, object] = {"model": model, "hosts x ranks": f"{options.hosts} x {ranks}", "case": name}
        row |= {
            "seconds": f"{seconds:.3f}",
            "MB sent": f"{sent / MB:.1f}",
            "least MB": _text(least / MB, ".1f"),
            "least s": _text(least / rate, ".3f"),
            "link used %": f"{100 * sent / (seconds * rate):.0f}",
            "for least %": _text(100 * least / (seconds * rate), ".0f"),
        }
        for peer in PEERS:
            row[f"{peer} / this"] = f"{medians[peer]['seconds'] / seconds:.2f}" if peer in medians else ""
        rows.append(row)
    return rows


def _text(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def compare(options: argparse.Namespace) -> None:
    everything = {}
    for model in options.models:
        for ranks in options.ranks:
            found = measure(options, model, ranks)
            everything[f"{model} {options.hosts}x{ranks}"] = found
            print(f"the link carries {found['rate'] * 8 / MB:.0f} Mbit/s of payload, capped at {options.mbit:g} Mbit/s")
            print(table(summary(options, model, ranks, found), text_columns=3), flush=True)
            print()
            if options.json:
                write_json(options.json, everything)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of each host")
    parser.add_argument("--mbit", type=float, default=1000.0, help="cap of every host's link, in each direction")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=3, help="of each case and round")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
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
