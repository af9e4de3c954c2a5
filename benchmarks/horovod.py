"""A Horovod script's gradients: what reducing them adds to a step, under ours and under torch's DDP.

    python benchmarks/horovod.py [--sets resnet50 small] [--turns 5] [--rounds 3] [--json FILE]

The model is a sum of dot products, one for each parameter, so that a step is backward, reduction and little else:
forward and the optimizer's own work are left out. Its parameters have the shapes of ResNet-50, or are 1,000 vectors of
1,000 elements. 2 ranks of one host, one thread each. Cases:

alone       the model itself; nothing is reduced
ddp         torch's DistributedDataParallel on gloo: what a Horovod script would otherwise become
hvd gloo    hvd.DistributedOptimizer without shared memory, so on the transport of ddp
hvd         hvd.DistributedOptimizer as it comes, through shared memory

All cases live in the same processes and take turns; every round has processes of its own. Columns: milliseconds a step,
from the moment when all ranks are ready until the last one has its gradients; the same without what alone takes; how
many times as long ddp takes, and how many times as much it adds. Medians over all steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from support.gradients import resnet50
from support.launch import run_ranks
from support.report import table, write_json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar.horovod as hvd

WARM_UP = 4  # names settle in the first two steps
CASES = ("alone", "ddp", "hvd gloo", "hvd")
SETS: dict[str, Callable[[], Sequence[tuple[int, ...]]]] = {
    "resnet50": resnet50,
    "small": lambda: [(1000,)] * 1000,
}
Samples = dict[str, dict[str, list[float]]]


class Dots(nn.Module):
    """A scalar that has the input, one number, as the gradient of every parameter's element."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights.parameters()]).sum() * factor


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    hvd.init(shared_memory=options.shared_memory)
    found: Samples = {}
    for name in options.sets:
        steps = {case: prepared(case, Dots(SETS[name]())) for case in options.cases}
        for _ in range(options.turns):
            for case, step in steps.items():
                found.setdefault(name, {}).setdefault(case, []).extend(take_steps(step, options.steps))
    if hvd.rank() == 0:
        write_json(options.result, found)
    hvd.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def prepared(case: str, model: Dots) -> Callable[[], None]:
    """One step: gradients as the optimizer would take them."""
    factor = torch.tensor(1.0 + hvd.rank())
    mean = (1.0 + hvd.size()) / 2
    if case == "alone":
        mean = 1.0 + hvd.rank()
    run: nn.Module = DistributedDataParallel(model) if case == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case.startswith("hvd"):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    loss = [run(factor)]

    def step() -> None:
        loss[0].backward()
        if case.startswith("hvd"):
            optimizer.synchronize()

    def begin() -> None:
        optimizer.zero_grad()
        loss[0] = run(factor)

    def check() -> None:
        assert all(one.grad is not None and one.grad.eq(mean).all() for one in model.parameters())

    step.begin, step.check = begin, check  # type: ignore[attr-defined]
    return step


def take_steps(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of the slowest rank, of each step that counts."""
    seconds = []
    for _ in range(WARM_UP + count):
        step.begin()  # type: ignore[attr-defined]
        hvd.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    step.check()  # type: ignore[attr-defined]
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest[WARM_UP:].tolist()


def measure(options: argparse.Namespace) -> Samples:
    """Samples of all rounds, by set and case."""
    found: Samples = {}
    common = ["--rank", "--steps", str(options.steps), "--turns", str(options.turns), "--sets", *options.sets]
    # Shared memory is chosen for a whole process, so one case has processes of its own, and its own peers beside it.
    runs = [([case for case in CASES if case != "hvd gloo"], True), (["alone", "ddp", "hvd gloo"], False)]
    for number in range(options.rounds):
        print(f"{options.ranks} ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
        for cases, shared_memory in runs:
            extra = [] if shared_memory else ["--no-shared-memory"]
            result: Samples = run_ranks(
                Path(__file__), [*common, "--cases", *cases, *extra],
                ranks=options.ranks, timeout=options.timeout, environment={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            for name, samples in result.items():
                for case, values in samples.items():
                    found.setdefault(name, {}).setdefault(case, []).extend(values)
    return found


def summary(found: Samples) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, samples in found.items():
        medians = {case: 1e3 * statistics.median(samples[case]) for case in CASES}
        for case, median in medians.items():
            added = median - medians["alone"]
            peer_added = medians["ddp"] - medians["alone"]
            rows.append(
                {
                    "gradients": name,
                    "case": case,
                    "ms / step": f"{median:.2f}",
                    "added ms": f"{added:.2f}" if case != "alone" else "",
                    "ddp / this": f"{medians['ddp'] / median:.2f}",
                    "ddp added / this": f"{peer_added / added:.2f}" if case != "alone" and added > 0 else "",
                }
            )
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), metavar="SET")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each case in each turn")
    parser.add_argument("--turns", type=int, default=5, help="of each case in each round")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--no-shared-memory", dest="shared_memory", action="store_false", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
        return
    found = measure(options)
    print(table(summary(found), text_columns=2))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
