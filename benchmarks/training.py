"""The same training script under torch's DistributedDataParallel and under ours: steps a second, and what is hidden.

    python benchmarks/training.py [--places host hosts] [--steps 10] [--rounds 3] [--pictures FOLDER] [--json FILE]

The script is `peers/train_script.py`: convolutions and linear layers, 13.8 million parameters, SGD. It runs on 2 ranks
of one host, and on 2 ranks of each of 2 hosts, whose links are capped at 1 Gbit/s. Hosts are network namespaces of this
machine (`tests/cluster.py`), which needs the rights of root. Cases, of which each is the script with the lines changed
that are printed first:

ddp            as it is: torch's DistributedDataParallel on gloo
ddp hybridpar  DistributedDataParallel on our process group
ours           hp.DataParallel with its default plan
ours tuned     with the plan that the tuner finds, in a run of its own before
ours steps     hp.DataParallel that takes the optimizer's steps bucket by bucket, during the next forward pass too
ddp bf16       DistributedDataParallel with torch's own bf16_compress_hook (hosts only)
ours bf16      hp.DataParallel with a bfloat16 wire (hosts only)
ours bf16 compressed
               the same with compressed exponents (hosts only)

Every case runs in fresh processes of one thread a rank, and the cases take turns for a number of rounds. Columns:
seconds a step with all that the script does, the median over all steps after warm-up; steps a second; processor time of
one rank in a step; the part of communication that is hidden under computation, over all ranks, as a timeline of a
further short run shows it; the loss over all ranks, mean of the last 5 steps; how many times as long the peers take.

In each case the weights after the last step must be the same bits on all ranks, and in every round; where gradients
travel whole, the losses of all steps must be those of ddp to rounding. The benchmark fails otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from support.changed_script import changed, difference, load
from support.hosts import Cluster, Link, run_on_hosts, unless_there_is_no_cluster
from support.launch import run_ranks
from support.recorded_ddp import CommunicationHook, RecordedDdp, record_step
from support.report import table, write_json
from support.typical_steps import typical
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp
from hybridpar.comm.timeline.plot import draw

SCRIPT = Path(__file__).parent / "peers" / "train_script.py"
PEERS = ("ddp", "ddp bf16")
# Of the loss of any step, relative or, below 1, absolute: float32 over different orders of summation.
LOSS_TOLERANCE = 1e-3
# Steps.
_RECORD_WARM_UP, _RECORDED, _DRAWN = 8, 8, 2

IMPORT = "from torch.nn.parallel import DistributedDataParallel"
WRAP = "    model = DistributedDataParallel(network())"
# Under its own name DDP admits the hook with NCCL only.
IMPORT_HOOK = "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook"
HOOK = "    model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"


def ours(more: str = "") -> dict[str, str]:
    """The lines that change for hp.DataParallel."""
    return {
        IMPORT: "import hybridpar",
        WRAP: f'    model = hybridpar.DataParallel(network(), group=hybridpar.init(), reduction="mean"{more})',
    }


@dataclass(frozen=True)
class Case:
    """The script with some lines changed.

    Attributes:
        title: in pictures.
        changes: line -> what stands in its place, see ``support.changed_script``.
        rounds_gradients: whether gradients travel in half precision.
        tunes: whether it looks for a plan first.
        steps_itself: whether the model takes the optimizer's steps.
        hook: DDP's communication hook, where it has one.
    """

    title: str
    changes: Mapping[str, str] = field(default_factory=dict)
    rounds_gradients: bool = False
    tunes: bool = False
    steps_itself: bool = False
    hook: CommunicationHook | None = None

    def text(self) -> str:
        return changed(SCRIPT, self.changes)


CASES = {
    "ddp": Case("torch DDP on gloo"),
    "ddp hybridpar": Case(
        "torch DDP on our process group",
        {
            IMPORT: f"import hybridpar\n{IMPORT}",
            '    dist.init_process_group("gloo")': '    dist.init_process_group("hybridpar")',
        },
    ),
    "ours": Case("hp.DataParallel", ours()),
    "ours tuned": Case("hp.DataParallel, tuned", ours(", tune=True"), tunes=True),
    "ours steps": Case(
        "hp.DataParallel, stepping by bucket",
        {
            **ours(", optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)"),
            OPTIMIZER: "    optimizer = model.optimizer",
            "    optimizer.step()": "",
        },
        steps_itself=True,
    ),
    "ddp bf16": Case(
        "torch DDP on gloo, bf16_compress_hook",
        {
            IMPORT: f"{IMPORT}\n{IMPORT_HOOK}",
            WRAP: f"{WRAP}\n{HOOK}",
        },
        rounds_gradients=True,
        hook=default_hooks.bf16_compress_hook,
    ),
    "ours bf16": Case(
        "hp.DataParallel, bfloat16 on the wire",
        ours(", plan=hybridpar.Plan(wire=hybridpar.Wire(torch.bfloat16))"),
        rounds_gradients=True,
    ),
    "ours bf16 compressed": Case(
        "hp.DataParallel, bfloat16 on the wire, exponents compressed",
        ours(", plan=hybridpar.Plan(wire=hybridpar.Wire(torch.bfloat16), compress_exponents=True)"),
        rounds_gradients=True,
    ),
}
PLACES = {"host": [name for name, case in CASES.items() if not case.rounds_gradients], "hosts": list(CASES)}


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    case = CASES[options.rank_of]
    timeline = hp.Timeline(rank=int(os.environ["RANK"])) if options.trace else hp.NoTimeline()
    script = script_of(case, timeline)
    model, optimizer = script.build()
    if options.trace:
        watch(case, model, optimizer, timeline)
    if options.find_plan:
        found = find_plan(script, model, optimizer, options)
    else:
        found = train(script, model, optimizer, options, timeline)
    if options.trace:
        found["hidden"] = save(timeline, options.trace)
    if dist.get_rank() == 0:
        write_json(options.result, found)
    dist.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def script_of(case: Case, timeline: hp.Timeline) -> ModuleType:
    text = case.text()
    if isinstance(timeline, hp.NoTimeline):
        return load(SCRIPT, text)
    # RecordedDdp registers the hook.
    text = text.replace(f"\n{HOOK}\n", "\n").replace('reduction="mean"', 'reduction="mean", timeline=timeline')
    return load(SCRIPT, text, timeline=timeline)


def watch(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, timeline: hp.Timeline) -> None:
    """Record what ``model`` does not record itself."""
    if isinstance(model, DistributedDataParallel):
        RecordedDdp(model, optimizer, timeline, default_hooks.allreduce_hook if case.hook is None else case.hook)
    if not case.steps_itself:
        record_step(optimizer, timeline)


def train(
    script: ModuleType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    timeline: hp.Timeline,
) -> dict[str, Any]:
    """Seconds and processor seconds of each step that counts, the loss of every step, and a hash of the weights."""
    readings, losses = [], []
    for step in range(options.warm_up + options.steps):
        if step == options.warm_up:
            finish(model)
            dist.barrier()
            timeline.clear()
            readings.append((time.perf_counter(), time.process_time()))
        losses.append(script.train_step(model, optimizer, *script.batch_of(step, options.batch)))
        if step >= options.warm_up:
            readings.append((time.perf_counter(), time.process_time()))
    finish(model)
    seconds, processor = ([b - a for a, b in pairwise(column)] for column in zip(*readings, strict=True))
    means = torch.stack(losses).double()
    dist.all_reduce(means)
    return {
        "seconds": seconds,
        "processor seconds": processor,
        "losses": (means / dist.get_world_size()).tolist(),
        "weights": weights_of(model),
        "report": model.report() if isinstance(model, hp.DataParallel) else None,
    }


def find_plan(
    script: ModuleType, model: hp.DataParallel, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> dict[str, Any]:
    """Train until the tuner has decided."""
    step = 0
    while model.report()["tuner"]["state"] == "tuning":
        script.train_step(model, optimizer, *script.batch_of(step, options.batch))
        step += 1
    return {"tuner": model.report()["tuner"]}


def finish(model: nn.Module) -> None:
    """Take the steps that a model still owes."""
    if isinstance(model, hp.DataParallel):
        model.synchronize()


def weights_of(model: nn.Module) -> str:
    """A hash of all parameters, which all ranks must share."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    if len(set(everyone)) > 1:
        raise AssertionError(f"the ranks have different weights: {everyone}")
    return str(everyone[0])


def save(timeline: hp.Timeline, path: Path) -> float:
    """Collective: write the timeline of all ranks; the part of their communication that was hidden."""
    summary = timeline.summary()
    seconds = torch.tensor([summary.hidden, summary.communication], dtype=torch.float64)
    dist.all_reduce(seconds)
    timeline.save(path, hp.init())
    return float(seconds[0] / seconds[1])


class Place:
    """Where the ranks of all cases run."""

    def __init__(self, options: argparse.Namespace, cluster: Cluster | None, folder: Path) -> None:
        self._options, self._cluster, self._folder = options, cluster, folder

    def run(self, case: str, steps: int, warm_up: int, more: Sequence[str] = ()) -> Any:
        """One case on fresh processes."""
        arguments = ["--rank-of", case, "--steps", str(steps), "--warm-up", str(warm_up), *more]
        arguments += ["--batch", str(self._options.batch)]
        environment = {"OMP_NUM_THREADS": "1", "HYBRIDPAR_TUNE_FILE": str(self._folder / "plans.json")}
        ranks, timeout = self._options.ranks, self._options.timeout
        if self._cluster is None:
            return run_ranks(Path(__file__), arguments, ranks=ranks, timeout=timeout, environment=environment)
        return run_on_hosts(
            self._cluster, Path(__file__), arguments,
            ranks_per_host=ranks, timeout=timeout, environment=environment,
        )  # fmt: skip

    def trace(self, case: str) -> Path:
        """Of a recorded run of a case."""
        return self._folder / f"{case.replace(' ', '_')}.json"


@contextmanager
def place_called(name: str, options: argparse.Namespace) -> Iterator[Place]:
    with TemporaryDirectory() as folder:
        if name == "host":
            yield Place(options, None, Path(folder))
            return
        with Cluster(options.hosts, [Link(mbit=options.mbit)]) as cluster:
            yield Place(options, cluster, Path(folder))


def measure(name: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Samples of all rounds, by case."""
    found: dict[str, dict[str, Any]] = {}
    cases = [case for case in PLACES[name] if case in options.cases]
    with place_called(name, options) as place:
        for case in cases:
            found[case] = {"seconds": [], "processor seconds": [], "weights": []}
            if CASES[case].tunes:
                print(f"{name}: {case} looks for a plan", file=sys.stderr)
                found[case] |= place.run(case, 0, 0, ["--find-plan"])
        for number in range(options.rounds):
            first = number % len(cases)
            for case in cases[first:] + cases[:first]:
                print(f"{name}, round {number + 1} of {options.rounds}: {case}", file=sys.stderr)
                got = place.run(case, options.steps, options.warm_up)
                for what in ("seconds", "processor seconds"):
                    found[case][what] += got[what]
                found[case]["weights"].append(got["weights"])
                found[case]["losses"], found[case]["report"] = got["losses"], got["report"]
        check(found)
        for case in cases:
            print(f"{name}: {case} is recorded", file=sys.stderr)
            got = place.run(case, _RECORDED, _RECORD_WARM_UP, ["--trace", str(place.trace(case))])
            found[case]["hidden"] = got["hidden"]
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            texts = {case: place.trace(case).read_text() for case in cases}
            for case, text in texts.items():
                (options.pictures / f"{name}_{place.trace(case).name}").write_text(text)
            panels = [(CASES[case].title, typical(json.loads(text), _DRAWN)) for case, text in texts.items()]
            draw(options.pictures / f"training_{name}.png", panels, ranks=[0])
    return found


def check(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises if a case gave other weights in another round, or did other work than ddp."""
    for case, entry in found.items():
        if len(set(entry["weights"])) > 1:
            raise SystemExit(f"{case}: the weights differ from round to round: {entry['weights']}")
        if "ddp" not in found or CASES[case].rounds_gradients:
            continue
        for step, (one, other) in enumerate(zip(found["ddp"]["losses"], entry["losses"], strict=True)):
            if not math.isclose(one, other, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
                raise SystemExit(f"step {step}: loss {one} with ddp, {other} with {case}")


def summary(name: str, found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    medians = {case: statistics.median(entry["seconds"]) for case, entry in found.items()}
    rows = []
    for case, entry in found.items():
        row: dict[str, object] = {"place": name, "case": case}
        row |= {
            "s / step": f"{medians[case]:.3f}",
            "steps / s": f"{1 / medians[case]:.2f}",
            "CPU s / step": f"{statistics.median(entry['processor seconds']):.3f}",
            "hidden %": f"{100 * entry['hidden']:.0f}",
            "loss": f"{statistics.mean(entry['losses'][-5:]):.6f}",
        }
        for peer in PEERS:
            row[f"{peer} / this"] = f"{medians[peer] / medians[case]:.2f}" if peer in medians else ""
        rows.append(row)
    return rows


def compare(options: argparse.Namespace) -> None:
    for case in [case for case in options.cases if any(case in PLACES[name] for name in options.places)]:
        if lines := difference(SCRIPT, CASES[case].text()):
            print(f"{case}:\n{lines}")
    everything = {}
    for name in options.places:
        everything[name] = measure(name, options)
        print()
        print(table(summary(name, everything[name]), text_columns=2), flush=True)
        for case, entry in everything[name].items():
            if "tuner" in entry:
                print(f"{case}: {entry['tuner']['plan']}: {entry['tuner']['why']}")
        if options.json:
            write_json(options.json, everything)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--places", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, default=1000.0, help="cap of every host's link, in each direction")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each case in each round")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them")
    parser.add_argument("--rounds", type=int, default=3, help="how often the cases take turns")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one case may take in one round")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write timelines there, and draw them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--find-plan", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.rank_of:
        run_as_rank(options)
        return
    with unless_there_is_no_cluster():
        compare(options)


if __name__ == "__main__":
    main()
