"""A head cut by class against the same head on every rank, and against what others do: time and memory of a step.

    python benchmarks/hybrid.py [--classes 10000 100000 1000000] [--batch 32] [--steps 5] [--rounds 2] [--json FILE]

Cases, all with the same rows, inputs, labels, ArcFace loss and SGD with momentum:

hybrid        hp.ShardedClassifier over all ranks, the backbone under hp.DataParallel
rows          the same, and the rows step in the backward pass (hp.RowSGD)
rows bf16     the same, with products in bfloat16
rate 0.1      the same, and a tenth of the classes takes part in a step (hp.UniformSampler)
data          the same head whole on every rank (hp.ReplicatedClassifier), with the backbone under hp.DataParallel
dense logits  the usual model-parallel head (peers/dense_logits.py): rows cut by class, all logits in memory, autograd
torch DDP     the head whole on every rank (peers/whole_head.py), under torch's DistributedDataParallel

The backbone is one D x D linear layer, so that the head dominates. Every case runs in fresh processes, and the cases
take turns for a number of rounds. Columns: seconds a step, from barrier to barrier with the optimizer, and the
processor time of rank 0 in it, medians over all steps after warm-up; peak resident memory of the rank that needed
most; what of that is not rows, gradient and momentum of the classes that a rank holds (there is no gradient where rows
step in the backward pass); time and memory over those of hybrid. A case whose estimated memory the machine does not
have is not started. The losses of all cases must agree, but for those of a sample, or the benchmark fails: the same
work.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers.dense_logits import DenseLogitsHead
from peers.whole_head import BackboneAndWholeHead
from support.launch import MIB, CaseError, available_memory, peak_memory, run_ranks
from support.report import table, write_json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp
from hybridpar.kernels import draw_normal_rows

# Resident memory of a rank that trains a very small head: interpreter, torch, gloo, autograd.
PROCESS_BYTES = 340 * MIB
# Left to the rest of the machine when deciding what fits.
RESERVE_BYTES = 2 << 30
# Relative; float32 over different orders of summation.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        batch: samples of each rank.
        steps: that are timed, after ``warm_up`` others.
    """

    classes: int
    embedding: int
    batch: int
    steps: int
    warm_up: int
    lr: float
    momentum: float = 0.9
    std: float = 0.01


@dataclass(frozen=True)
class Model:
    """One rank's part: inputs and labels to loss; what is trained; what follows backward, before the optimizer."""

    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    after_backward: Callable[[], None] = lambda: None


class BackboneAndHead(nn.Module):
    """Inputs and labels to loss."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


def hybrid(work: Work, backbone: nn.Module, **options: Any) -> Model:
    group = hp.init()
    replicated = hp.DataParallel(backbone, group=group)
    head = hp.ShardedClassifier(work.embedding, work.classes, initial_std=work.std, group=group, **options)
    rows = [head.weight] if head.row_optimizer is None else []
    return Model(lambda inputs, labels: head(replicated(inputs), labels), [*backbone.parameters(), *rows])


def rows_step(work: Work, backbone: nn.Module, **options: Any) -> Model:
    return hybrid(work, backbone, optimizer=hp.RowSGD(work.lr, momentum=work.momentum), **options)


def rows_step_bf16(work: Work, backbone: nn.Module) -> Model:
    return rows_step(work, backbone, compute_dtype=torch.bfloat16)


def rows_step_sampled(work: Work, backbone: nn.Module) -> Model:
    return rows_step(work, backbone, compute_dtype=torch.bfloat16, sampler=hp.UniformSampler(rate=0.1))


def data(work: Work, backbone: nn.Module) -> Model:
    group = hp.init()
    head = hp.ShardedClassifier(work.embedding, work.classes, initial_std=work.std, group=hp.Group.alone())
    both = BackboneAndHead(backbone, hp.ReplicatedClassifier(head, group))
    return Model(hp.DataParallel(both, group=group), list(both.parameters()))


def dense_logits(work: Work, backbone: nn.Module) -> Model:
    per_rank = math.ceil(work.classes / dist.get_world_size())
    first = per_rank * dist.get_rank()
    head = DenseLogitsHead(initial_rows(work, first, min(first + per_rank, work.classes)), first)

    def sum_gradients() -> None:
        for parameter in backbone.parameters():
            dist.all_reduce(parameter.grad)

    return Model(
        lambda inputs, labels: head(backbone(inputs), labels), [*backbone.parameters(), head.weight], sum_gradients
    )


def torch_ddp(work: Work, backbone: nn.Module) -> Model:
    model = DistributedDataParallel(BackboneAndWholeHead(backbone, initial_rows(work, 0, work.classes)))
    return Model(model, list(model.parameters()))


def initial_rows(work: Work, first: int, end: int) -> Tensor:
    """The rows that hp.ShardedClassifier starts with."""
    rows = torch.empty(end - first, work.embedding)
    return draw_normal_rows(rows, torch.arange(first, end), seed=0, std=work.std)


@dataclass(frozen=True)
class Case:
    """One way to train the head.

    Attributes:
        cut: whether a rank holds its share of the classes, or all of them.
        row_copies: matrices as large as a rank's rows that are in memory together at the worst moment.
        logits_copies: the same for matrices of a rank's logits.
        own_rows: matrices that the head cannot do without: rows, momentum, and where there is one the gradient.
        tolerance: by how much its losses may differ from the first case's, relative; None where they are others.
    """

    build: Callable[[Work, nn.Module], Model]
    cut: bool
    row_copies: int
    logits_copies: int
    own_rows: int = 3
    tolerance: float | None = LOSS_TOLERANCE

    def rows_bytes(self, work: Work, ranks: int) -> int:
        """Of the rows that one rank holds."""
        return 4 * work.embedding * math.ceil(work.classes / (ranks if self.cut else 1))

    def estimate(self, work: Work, ranks: int) -> int:
        """Bytes that one rank will need at most."""
        rows = math.ceil(work.classes / (ranks if self.cut else 1))
        logits = 4 * rows * work.batch * (ranks if self.cut else 1)
        return PROCESS_BYTES + self.row_copies * self.rows_bytes(work, ranks) + self.logits_copies * logits


CASES = {
    # Rows, gradient, momentum.
    "hybrid": Case(hybrid, cut=True, row_copies=3, logits_copies=0),
    # Rows and momentum, and the products that are kept.
    "rows": Case(rows_step, cut=True, row_copies=2, logits_copies=1, own_rows=2),
    # Products are rounded to 8 bits, and so are, at every step, the sums of them that make the features' gradient.
    "rows bf16": Case(rows_step_bf16, cut=True, row_copies=2, logits_copies=1, own_rows=2, tolerance=1e-2),
    "rate 0.1": Case(rows_step_sampled, cut=True, row_copies=2, logits_copies=1, own_rows=2, tolerance=None),
    # And the bucket in which the gradient travels. It lies in shared memory: each rank's resident memory counts pages
    # of the other ranks' buckets too, the machine holds them once.
    "data": Case(data, cut=False, row_copies=4, logits_copies=0),
    # And unit rows, their gradient, and two temporaries of the normalisation's backward pass.
    "dense logits": Case(dense_logits, cut=True, row_copies=7, logits_copies=4),
    # And the bucket, which DistributedDataParallel builds anew after the first step.
    "torch DDP": Case(torch_ddp, cut=False, row_copies=9, logits_copies=4),
}


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


def run_as_rank(case: Case, work: Work, result: Path) -> None:
    """What every rank of a case does."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = case.build(work, nn.Linear(work.embedding, work.embedding, bias=False))
    trained = train(work, model)
    peak = torch.tensor(peak_memory())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        write_json(result, {**trained, "peak": int(peak)})
    dist.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def measure(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each case: its samples, or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.cases:
        estimate = CASES[name].estimate(work, options.ranks)
        found[name] = {
            "case": name, "estimate": estimate, "problem": None, "peak": 0,
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
            entry["losses"], entry["peak"] = got["losses"], max(entry["peak"], got["peak"])
    check_same_losses(list(found.values()))
    return list(found.values())


def check_same_losses(entries: Sequence[dict[str, Any]]) -> None:
    """Raises if two cases did different work: equal gradients show in the losses of the later steps."""
    done = [entry for entry in entries if entry["losses"]]
    for entry in done[1:]:
        tolerance = CASES[entry["case"]].tolerance
        if tolerance is None:
            continue
        for step, (one, other) in enumerate(zip(done[0]["losses"], entry["losses"], strict=True)):
            if not math.isclose(one, other, rel_tol=tolerance):
                raise SystemExit(f"step {step}: loss {one} with {done[0]['case']}, {other} with {entry['case']}")


def summary(work: Work, entries: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, object]]:
    """Rows of the table."""
    medians = {entry["case"]: statistics.median(entry["seconds"]) for entry in entries if entry["problem"] is None}
    peaks = {entry["case"]: entry["peak"] / MIB for entry in entries}
    columns = ["s / step", "CPU s / step", "peak MiB", "beyond rows MiB", "time / hybrid", "memory / hybrid"]
    rows: list[dict[str, object]] = []
    for entry in entries:
        name = entry["case"]
        cells = [entry["problem"].split(":")[0], "", f"est. {entry['estimate'] / MIB:,.0f}"] if entry["problem"] else [
            f"{medians[name]:.4f}", f"{statistics.median(entry['processor seconds']):.4f}", f"{peaks[name]:,.0f}",
            f"{peaks[name] - CASES[name].own_rows * CASES[name].rows_bytes(work, ranks) / MIB:,.0f}",
        ]  # fmt: skip
        if "hybrid" in medians and name in medians:
            cells += [f"{medians[name] / medians['hybrid']:.2f}", f"{peaks[name] / peaks['hybrid']:.2f}"]
        cells += [""] * (len(columns) - len(cells))
        rows.append({"classes": f"{work.classes:,}", "case": name, **dict(zip(columns, cells, strict=True))})
    return rows


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
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
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
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    works = [
        Work(classes, options.embedding, options.batch, options.steps, options.warm_up, options.lr)
        for classes in options.classes
    ]
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
