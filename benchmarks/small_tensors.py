"""Many small gradients: what reducing 1,000 tensors of 1,000 elements adds to a step, under ours and under torch's DDP.

    python benchmarks/small_tensors.py [--tensors 1000] [--elements 1000] [--turns 5] [--rounds 3] [--json FILE]

The model is a sum of dot products, one for each parameter, so that a step is mostly bookkeeping: zero_grad, forward,
backward. 2 ranks of one host, one thread each. Cases:

alone          the model itself; nothing is reduced
ddp            torch's DistributedDataParallel on gloo
ddp views      the same with gradient_as_bucket_view=True
ddp hybridpar  DistributedDataParallel on our process group, which goes through shared memory
ours gloo      hp.DataParallel on a group without shared memory, so on the transport of ddp
ours           hp.DataParallel as it comes, through shared memory

All cases live in the same processes and take turns, a few steps each; every round has processes of its own. Columns:
milliseconds a step, from the moment when all ranks are ready until the last one has its gradients; processor
milliseconds that one rank spends meanwhile, on all its threads; both again without what alone takes; how many times as
long ddp takes, and how many times as much it adds. Medians over all steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support.launch import run_ranks
from support.report import table, write_json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp

WARM_UP = 3


class Dots(nn.Module):
    """Input [elements] to the sum of its dot products with all parameters; each gradient is the input.

    Args:
        tensors, elements: number of the parameters, and length of each.
    """

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.dot(weight, inputs) for weight in self.weights.parameters()]).sum()


def ours(module: nn.Module, shared_memory: bool = True) -> hp.DataParallel:
    group = hp.Group.from_torch(shared_memory=shared_memory)
    return hp.DataParallel(module, group=group, reduction="mean")


CASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda module: module,
    "ddp": DistributedDataParallel,
    "ddp views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "ddp hybridpar": lambda module: DistributedDataParallel(
        module, process_group=dist.new_group(backend="hybridpar")
    ),
    "ours gloo": lambda module: ours(module, shared_memory=False),
    "ours": ours,
}  # fmt: skip


def run_as_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = hp.init()
    models = {name: CASES[name](Dots(options.tensors, options.elements)) for name in options.cases}
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.turns):
        for name, model in models.items():
            measured = take_steps(model, group, options)
            if name != "alone":
                check(model, (1.0 + group.size) / 2)
            for what, values in measured.items():
                found.setdefault(name, {}).setdefault(what, []).extend(values)
    if group.rank == 0:
        write_json(options.result, found)
    group.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def take_steps(model: nn.Module, group: hp.Group, options: argparse.Namespace) -> dict[str, list[float]]:
    """Of each step that counts, seconds of the slowest rank, and the mean of the ranks' processor seconds."""
    inputs = torch.full((options.elements,), 1.0 + group.rank)
    seconds, processor = [], []
    for _ in range(WARM_UP + options.steps):
        group.barrier()
        start, used = time.perf_counter(), time.process_time()
        model.zero_grad()
        model(inputs).backward()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    slowest = group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
    together = group.all_reduce(torch.tensor(processor, dtype=torch.float64))
    return {
        "seconds": slowest[WARM_UP:].tolist(),
        "processor seconds": (together[WARM_UP:] / group.size).tolist(),
    }


def check(model: nn.Module, mean: float) -> None:
    """The reduction did its work."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.eq(mean).all()


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Samples of all rounds, by case."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        print(f"{options.ranks} ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
        result: dict[str, dict[str, list[float]]] = run_ranks(
            Path(__file__),
            [
                "--rank", "--tensors", str(options.tensors), "--elements", str(options.elements),
                "--steps", str(options.steps), "--turns", str(options.turns), "--cases", *options.cases,
            ],
            ranks=options.ranks, timeout=options.timeout, environment={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for name, samples in result.items():
            for what, values in samples.items():
                found.setdefault(name, {}).setdefault(what, []).extend(values)
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    medians = {
        name: {what: 1e3 * statistics.median(s) for what, s in samples.items()} for name, samples in found.items()
    }
    alone, peer = medians.get("alone"), medians.get("ddp")
    rows = []
    for name, median in medians.items():
        row: dict[str, object] = {"case": name}
        row |= {"ms / step": f"{median['seconds']:.2f}", "CPU ms / step": f"{median['processor seconds']:.2f}"}
        added = {what: value - alone[what] for what, value in median.items()} if alone and name != "alone" else {}
        row |= {
            "added ms": f"{added['seconds']:.2f}" if added else "",
            "added CPU ms": f"{added['processor seconds']:.2f}" if added else "",
            "ddp / this": f"{peer['seconds'] / median['seconds']:.2f}" if peer else "",
            "ddp added / this": (
                f"{(peer['seconds'] - alone['seconds']) / added['seconds']:.2f}" if peer and alone and added else ""
            ),
        }
        rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=1000, help="of each tensor")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each case in each turn")
    parser.add_argument("--turns", type=int, default=5, help="of each case in each round")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
        return
    found = measure(options)
    print(f"{options.tensors:,} tensors of {options.elements:,} elements, {options.ranks} ranks")
    print(table(summary(found), text_columns=1))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
