"""A head cut by class against the same head on every rank, and against what others do: time and memory of a step.

    python benchmarks/hybrid.py [--classes 10000 100000 1000000] [--batch 32] [--steps 5] [--rounds 2] [--json FILE]

Cases, all with the same rows, inputs, labels and SGD with momentum, and but for two with the loss of ArcFace:

hybrid        hp.ShardedClassifier over all ranks, the backbone under hp.DataParallel
rows          the same, and the rows step in the backward pass (hp.RowSGD)
rows bf16     the same, with products in bfloat16
bf16 rows     the same, with rows and momentum in bfloat16
rate 0.1      as rows bf16, and a tenth of the classes takes part in a step (hp.UniformSampler)
bf16 rate 0.1 the same, with rows and momentum in bfloat16
data          the same head whole on every rank (hp.ReplicatedClassifier), with the backbone under hp.DataParallel
dense logits  the usual model-parallel head (peers/dense_logits.py): rows cut by class, all logits in memory, autograd
dense 0.1     the same, and a tenth of the classes takes part in a step; their gradient is that of all rows
softmax       as rows bf16, with a plain softmax in place of ArcFace
loss parallel PyTorch's own head cut by class, DTensor and loss_parallel (peers/loss_parallel.py), plain softmax
torch DDP     the head whole on every rank (peers/whole_head.py), under torch's DistributedDataParallel
floor         no training: the time of four bfloat16 products of all rows with all features at the rate that the ranks
              reach together on rows in the caches, and of reading and writing float32 rows and momentum once

The backbone is one D x D linear layer, so that the head dominates. Every case runs in fresh processes, and the cases
take turns for a number of rounds. Columns: seconds a step, from barrier to barrier with the optimizer, and the
processor time of rank 0 in it, medians over all steps after warm-up; peak resident memory of the rank that needed
most; what of that is not rows, gradient and momentum of the classes that a rank holds (there is no gradient where rows
step in the backward pass); what the same process had at most of that when it had made one step of one linear layer with
torch.optim, before there was a head: Python, PyTorch, and what is imported; the rest, which is the head's and its
communicators'; time and memory over those of hybrid. A case whose estimated memory the machine does not have is not
started. The losses of all cases must agree, but for those of a sample, or the benchmark fails: the same work.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.bare_torch import bare_step
from support.head_cases import CASES, PROCESS_BYTES, Case, Model, Work
from support.head_floor import FLOOR_BYTES, floor_seconds
from support.launch import MIB, CaseError, available_memory, peak_memory, run_ranks
from support.report import table, write_json
from torch import Tensor, nn

# Left to the rest of the machine when deciding what fits.
RESERVE_BYTES = 2 << 30
FLOOR = "floor"


def inputs_and_labels(work: Work, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    inputs = torch.randn(work.batch, work.embedding, generator=generator)
    return inputs, torch.randint(work.classes, (work.batch,), generator=generator)


def train(work: Work, model: Model) -> dict[str, list[float]]:
    """Seconds and seconds of processor time of each timed step, and the global loss of every step."""
    optimizer = torch.optim.SGD(model.parameters, lr=work.lr, momentum=work.momentum)
    seconds, processor, losses = [], [], []
    for step in range(work.warm_up + work.steps):
        inputs, labels = inputs_and_labels(work, step, dist.get_rank())
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = model.loss(inputs, labels)
        loss.backward()
        model.after_backward()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        everyone = loss.detach() / dist.get_world_size()
        dist.all_reduce(everyone)
        losses.append(float(everyone))
    return {"seconds": seconds[work.warm_up :], "processor seconds": processor[work.warm_up :], "losses": losses}


def run_floor(work: Work, result: Path) -> None:
    """What every rank does for the floor."""
    dist.init_process_group("gloo")
    slowest = torch.tensor(floor_seconds(work), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = [float(slowest)]
        memory = {"peak": peak_memory(), "bare": 0}
        write_json(result, {"seconds": found, "processor seconds": found, "losses": [], **memory})
    dist.barrier()
    os._exit(0)


def run_as_rank(case: Case, work: Work, result: Path) -> None:
    """What every rank of a case does."""
    dist.init_process_group("gloo")
    bare_step(work.embedding)
    bare = peak_memory()
    torch.manual_seed(0)
    model = case.build(work, nn.Linear(work.embedding, work.embedding, bias=False))
    trained = train(work, model)
    most = torch.tensor([peak_memory(), bare])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        write_json(result, {**trained, "peak": int(most[0]), "bare": int(most[1])})
    dist.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def measure(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each case: its samples, or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.cases:
        estimate = PROCESS_BYTES + FLOOR_BYTES if name == FLOOR else CASES[name].estimate(work, options.ranks)
        found[name] = {
            "case": name, "estimate": estimate, "problem": None, "peak": 0, "bare": 0,
            "seconds": [], "processor seconds": [], "losses": [],
        }  # fmt: skip
        free = available_memory() - RESERVE_BYTES
        if options.ranks * estimate > free:
            found[name]["problem"] = (
                f"does not fit: {options.ranks} ranks need {estimate // MIB:,} MiB each, {free // MIB:,} MiB are free"
            )
    for number in range(options.rounds):
        for name in options.cases:
            entry = found[name]
            if entry["problem"] is not None:
                continue
            print(f"{work.classes:,} classes, round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            try:
                got = run_ranks(
                    Path(__file__), rank_arguments(name, work),
                    ranks=options.ranks, timeout=options.timeout, environment=environment(options),
                )  # fmt: skip
            except CaseError as error:
                entry["problem"] = str(error)
                continue
            entry["seconds"] += got["seconds"]
            entry["processor seconds"] += got["processor seconds"]
            entry["losses"] = got["losses"]
            entry |= {name: max(entry[name], got[name]) for name in ("peak", "bare")}
    check_same_losses(list(found.values()))
    return list(found.values())


def check_same_losses(entries: Sequence[dict[str, Any]]) -> None:
    """Raises if two cases did different work: equal gradients show in the losses of the later steps."""
    first: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry["losses"] or CASES[entry["case"]].tolerance is None:
            continue
        case = CASES[entry["case"]]
        reference = first.setdefault(case.loss, entry)
        tolerance = max(case.tolerance or 0.0, CASES[reference["case"]].tolerance or 0.0)
        for step, (one, other) in enumerate(zip(reference["losses"], entry["losses"], strict=True)):
            if not math.isclose(one, other, rel_tol=tolerance):
                raise SystemExit(f"step {step}: loss {one} with {reference['case']}, {other} with {entry['case']}")


def summary(work: Work, entries: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, object]]:
    """Rows of the table."""
    medians = {entry["case"]: statistics.median(entry["seconds"]) for entry in entries if entry["problem"] is None}
    peaks = {entry["case"]: entry["peak"] / MIB for entry in entries}
    memory = ["peak MiB", "beyond rows MiB", "bare MiB", "head MiB"]
    columns = ["s / step", "CPU s / step", *memory, "time / hybrid", "memory / hybrid"]
    rows: list[dict[str, object]] = []
    for entry in entries:
        name = entry["case"]
        cells = [entry["problem"].split(":")[0], "", f"est. {entry['estimate'] / MIB:,.0f}"] if entry["problem"] else [
            f"{medians[name]:.4f}", f"{statistics.median(entry['processor seconds']):.4f}", f"{peaks[name]:,.0f}",
            *beyond(entry, work, ranks),
        ]  # fmt: skip
        if "hybrid" in medians and name in medians:
            cells += [f"{medians[name] / medians['hybrid']:.2f}", f"{peaks[name] / peaks['hybrid']:.2f}"]
        cells += [""] * (len(columns) - len(cells))
        rows.append({"classes": f"{work.classes:,}", "case": name, **dict(zip(columns, cells, strict=True))})
    return rows


def beyond(entry: dict[str, Any], work: Work, ranks: int) -> list[str]:
    """MiB beyond what a rank cannot do without, and of that the process's without a head, and the head's."""
    if entry["case"] == FLOOR:
        return ["", "", ""]
    all_of_it, bare = entry["peak"] - own_bytes(entry["case"], work, ranks), entry["bare"]
    return [f"{value / MIB:,.0f}" for value in (all_of_it, bare, all_of_it - bare)]


def own_bytes(case: str, work: Work, ranks: int) -> float:
    """What a rank cannot do without."""
    return CASES[case].own_rows * CASES[case].rows_bytes(work, ranks)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables of the ranks."""
    pages = {"THP_MEM_ALLOC_ENABLE": "1"} if options.huge_pages else {}
    return {"OMP_NUM_THREADS": str(options.threads), **pages}


def rank_arguments(case: str, work: Work) -> list[str]:
    return [
        "--rank-of", case, "--classes", str(work.classes), "--embedding", str(work.embedding),
        "--batch", str(work.batch), "--steps", str(work.steps), "--warm-up", str(work.warm_up), "--lr", str(work.lr),
    ]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--cases", nargs="+", choices=[*CASES, FLOOR], default=[*CASES, FLOOR], metavar="CASE")
    parser.add_argument("--embedding", type=int, default=512, help="D, width of features and rows")
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case in each round")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="how often the cases take turns")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--huge-pages", action="store_true", help="let torch ask for huge pages, in every case")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one case may take in one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank-of", choices=[*CASES, FLOOR], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    works = [
        Work(classes, options.embedding, options.batch, options.steps, options.warm_up, options.lr)
        for classes in options.classes
    ]
    if options.rank_of == FLOOR:
        run_floor(works[0], options.result)
        return
    if options.rank_of:
        run_as_rank(CASES[options.rank_of], works[0], options.result)
        return
    rows: list[dict[str, object]] = []
    everything = []
    for work in works:
        entries = measure(work, options)
        rows += summary(work, entries, options.ranks)
        everything.append({**asdict(work), "ranks": options.ranks, "threads": options.threads, "cases": entries})
        for entry in entries:
            if entry["problem"] is not None:
                print(f"{work.classes:,} classes, {entry['case']}: {entry['problem']}", flush=True)
        if options.json:
            write_json(options.json, everything)
    print(
        f"\n{options.ranks} ranks of {options.threads} thread(s), D = {options.embedding}, "
        f"batch {options.ranks} x {options.batch}, float32, backbone: one {options.embedding} x {options.embedding} "
        f"linear layer{', huge pages' if options.huge_pages else ''}\n"
    )
    print(table(rows, text_columns=2))


if __name__ == "__main__":
    main()
