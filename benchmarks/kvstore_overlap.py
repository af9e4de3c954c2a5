"""Do pushes of MXNet's store travel while MXNet computes? Its operators and the store's sums on one time scale.

    python benchmarks/kvstore_overlap.py [--layers 12] [--width 1024] [--batch 256] [--steps 8] [--rounds 3]
        [--picture docs/images/kvstore_overlap.png] [--json FILE]

A chain of dense layers on 2 ranks of one host, one thread of operators each; a Trainer with momentum, whose optimizer
runs in the store. Cases:

waits     the script waits for its gradients before it calls the Trainer, as it must with a store that blocks
bulks     the script as it is: the Trainer's pushes wait in MXNet's engine for their gradients. MXNet runs up to 15
          operators of a backward pass as one, and all their gradients are there at the end of it
single    the same with MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD=1: every gradient is there as soon as it is computed
ps-lite   MXNet's own dist_sync with one server, operators in bulks: only its time, since nothing tells when it sends

Every round has processes of its own. Columns: milliseconds a step, the median over all steps of all rounds; hidden, the
share of the time in which values are copied or travel that computes as well; in backward, the share of the time in
which they travel that runs the backward pass as well, so that gradients of other layers are still to come; how many
times as long ps-lite takes. The picture shows two steps of the last round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.launch import run_ranks
from support.pslite import PsLite
from support.report import table, write_json

import hybridpar as hp
from hybridpar.comm.timeline.plot import draw
from hybridpar.comm.timeline.trace import COMPUTATION, Event, Recording, chrome_trace, summarize

RANKS, WARM_UP, SHOWN = 2, 3, 2
PEER = "ps-lite"
CASES = {
    "waits": "the script waits for its gradients first",
    "bulks": "pushes in MXNet's engine, operators in bulks",
    "single": "pushes in MXNet's engine, operators one by one",
    PEER: "",
}
QUIET = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1", "PYTHONWARNINGS": "ignore"}


def main() -> None:
    options = _options()
    if options.result is not None:
        _rank(options)
        return
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    shares: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    traces: dict[str, Any] = {}
    for number in range(options.rounds):
        order = list(CASES)[number % len(CASES) :] + list(CASES)[: number % len(CASES)]
        for case in order:
            found = _run(options, case)
            seconds[case] += found["seconds"]
            if case != PEER:
                shares[case].append((found["hidden"], found["in backward"]))
                traces[case] = found["trace"]
    peer = statistics.median(seconds[PEER])
    rows: list[dict[str, object]] = []
    for case in CASES:
        own = statistics.median(seconds[case])
        hidden, within = (
            [f"{statistics.median(values):.0%}" for values in zip(*shares[case], strict=True)]
            if shares[case]
            else ["-", "-"]
        )
        rows.append(
            {
                "case": case,
                "ms": f"{own * 1e3:.1f}",
                "hidden": hidden,
                "in backward": within,
                "ps-lite/ours": f"{peer / own:.2f}",
            }
        )
    print(table(rows, 1))
    panels = [(CASES[case], traces[case]) for case in CASES if case in traces]
    draw(options.picture, panels, steps=range(1, 1 + SHOWN))
    print(f"wrote {options.picture}")
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("layers", "width", "batch", "steps", "rounds")}
        write_json(options.json, {"settings": settings, "seconds": seconds, "hidden": shares, "rows": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round, after the first three")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/kvstore_overlap.png"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= SHOWN:
        parser.error(f"expected more than {SHOWN} steps, got {options.steps}")
    return options


def _run(options: argparse.Namespace, case: str) -> Any:
    arguments = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "batch", "steps")]
    bulks = {"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD": "1"} if case == "single" else {}
    arguments.append(f"--case={case}")
    if case != PEER:
        return run_ranks(Path(__file__), arguments, ranks=RANKS, timeout=300, environment=QUIET | bulks)
    with PsLite.on_this_host(RANKS, 1) as servers:
        return run_ranks(Path(__file__), arguments, ranks=RANKS, timeout=300, environment=QUIET | servers.worker)


def _rank(options: argparse.Namespace) -> None:
    """One rank of one case."""
    import hybridpar.mxnet as face

    # isort: split
    import mxnet as mx

    group = hp.init()
    timeline = hp.Timeline(rank=group.rank)
    ours = options.case != PEER
    kv = face.create(group=group, timeline=timeline) if ours else mx.kv.create("dist_sync")
    net = mx.gluon.nn.Sequential()
    for _ in range(options.layers):
        net.add(mx.gluon.nn.Dense(options.width, in_units=options.width, activation="relu", use_bias=False))
    net.initialize(mx.init.Xavier())
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kvstore=kv, update_on_kvstore=True
    )
    images = mx.nd.random.uniform(shape=(options.batch, options.width))

    def step() -> None:
        with mx.autograd.record():
            loss = (net(images) ** 2).mean()
        loss.backward()
        timeline.instant("trainer", row=COMPUTATION)
        if options.case == "waits":
            mx.nd.waitall()
        trainer.step(1)
        mx.nd.waitall()

    for _ in range(WARM_UP):
        step()
    seconds = []
    timeline.clear()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        mx.profiler.set_config(profile_imperative=True, filename=str(profile))
        if ours:
            mx.profiler.set_state("run")
        for _ in range(options.steps):
            group.barrier()
            timeline.instant("step", row=COMPUTATION)
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        operators = []
        if ours:
            mx.profiler.set_state("stop")
            mx.profiler.dump()
            operators = list(_operators(json.loads(profile.read_text())["traceEvents"]))
    events = [*timeline.recording().events, *operators]
    slowest = [max(times) for times in zip(*group.all_gather_json(seconds), strict=True)]
    everyone = group.all_gather_json(events)
    if group.rank == 0:
        _write(options.result, slowest, [[Event(*event) for event in events] for events in everyone])


def _operators(entries: list[dict[str, Any]]) -> Iterator[Event]:
    """MXNet's profile, which is in microseconds since 1970, as events of the row ``computation``."""
    shift = time.time_ns() - time.monotonic_ns()
    begun: dict[tuple[int, str], float] = {}
    for entry in entries:
        name = _kind(entry["name"])
        if name is None or entry["ph"] not in "BE":
            continue
        place = (entry["tid"], entry["name"])
        if entry["ph"] == "B":
            begun[place] = entry["ts"]
        else:
            begin, end = (round(stamp * 1e3) - shift for stamp in (begun.pop(place), entry["ts"]))
            yield Event(name, COMPUTATION, begin, end, {"operator": entry["name"]})


def _kind(operator: str) -> str | None:
    """What an operator is for; None for what computes nothing."""
    if operator.startswith(("hybridpar", "DeleteVariable", "process_name")):
        return None
    if operator.startswith("Copy"):
        return "pack"
    if "update" in operator:
        return "optimizer"
    return "backward" if operator.startswith(("_backward", "ImperativeBulk")) else "forward"


def _write(path: Path, seconds: list[float], everyone: list[list[Event]]) -> None:
    recordings = [Recording(rank, "", events) for rank, events in enumerate(everyone)]
    backward = [[event for event in events if event.name in ("backward", "send")] for events in everyone]
    found = {"seconds": seconds, "hidden": _hidden(everyone), "in backward": _hidden(backward)}
    path.write_text(json.dumps(found | {"trace": chrome_trace(recordings)}))


def _hidden(everyone: list[list[Event]]) -> float:
    """Share of the ranks' communication that is hidden."""
    summaries = [summarize(rank, events) for rank, events in enumerate(everyone)]
    travel = sum(summary.communication for summary in summaries)
    return sum(summary.hidden for summary in summaries) / travel if travel else 0.0


if __name__ == "__main__":
    main()
