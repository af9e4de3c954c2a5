"""BERT with a vocabulary cut across the ranks, against whole on every rank: time and memory of a step.

    python benchmarks/bert.py [--vocabulary 30000 250000 1000000] [--layers 12] [--sequences 4] [--json FILE]
    python benchmarks/bert.py --hosts 2x2 [--vocabulary 30522] [--sequences 1]

The model and the step are those of recipes/bert; all cases start from the same weights, and see the same tokens, of
which 15 % are predicted, in each step. Cases:

hybrid               the encoder replicated (hp.DataParallel), the output layer cut by token (hp.ShardedClassifier)
hybrid rows          the same, and the output layer's rows step in the backward pass, so that they have no gradient
hybrid, fixed table  the same, and the input table is not trained: what it costs is the difference
hybrid bf16 wire     as hybrid, and gradients travel in bfloat16
hybrid compressed, hybrid bf16 compressed
                     as hybrid and as hybrid bf16 wire, and exponents are compressed between hosts
hybrid bf16 rows     as hybrid rows, gradients travel in bfloat16, and the rows are bfloat16
data                 the output layer whole on every rank (hp.ReplicatedClassifier), too
torch DDP            Hugging Face's BertForMaskedLM under torch's DistributedDataParallel on gloo (peers/bert_ddp.py)
torch DDP tied       the same, and the output layer is the input table, as transformers has it by default
torch DDP bf16       as torch DDP, with torch's bf16_compress_hook

In all of them the input table is whole on every rank, and its gradient travels. With `--hosts 2x2` the ranks are two on
each of two hosts, which are network namespaces of this machine with links of 1 Gbit/s (needs the rights of root).

Every case runs in fresh processes, and the cases take turns for a number of rounds. Columns: seconds a step, from
barrier to barrier with the norm of the gradients and the optimizer, and the processor time of rank 0 in it, medians
over all steps after warm-up; peak resident memory of the rank that needed most, where pages that ranks share count once
among them; time and memory over those of hybrid; between hosts, megabytes that the busiest host sent in a step. A case
whose estimated memory the machine does not have is not started. The losses of all cases must agree, or the benchmark
fails: the same work. Those of a fixed or tied table differ after the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.bert_cases import CASES, Case, Work
from support.hosts import Cluster, ClusterError, Link, run_on_hosts, sent_bytes, unless_there_is_no_cluster
from support.launch import MIB, CaseError, available_memory, peak_memory, run_ranks
from support.report import table, write_json

# Left to the rest of the machine when deciding what fits.
RESERVE_BYTES = 3 << 30
# Relative. bfloat16 products are rounded to 8 bits; AdamW divides small gradients by their own size.
TOLERANCE = {("float32", "sgd"): 1e-5, ("float32", "adamw"): 1e-3}
ROUNDED_TOLERANCE = 1e-2
MB = 1e6

ON_ONE_HOST = ("hybrid", "hybrid rows", "hybrid, fixed table", "data", "torch DDP", "torch DDP tied")
BETWEEN_HOSTS = (
    "hybrid", "hybrid compressed", "hybrid bf16 wire", "hybrid bf16 compressed",
    "torch DDP", "torch DDP bf16", "torch DDP tied",
)  # fmt: skip


def run_as_rank(case: Case, work: Work, result: Path) -> None:
    """What every rank of a case does."""
    dist.init_process_group("gloo")
    step = case.build(work)
    seconds, processor, sent, losses = [], [], [], []
    for _ in range(work.warm_up + work.steps):
        dist.barrier()
        before, used, start = sum(sent_bytes().values()), time.process_time(), time.perf_counter()
        loss = step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        sent.append(float(sum(sent_bytes().values()) - before))
        losses.append(loss / dist.get_world_size())
    everyone = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(everyone)
    most = torch.tensor([peak_memory() - counted_elsewhere(), *sent], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        timed = slice(work.warm_up, None)
        samples = {"seconds": seconds[timed], "processor seconds": processor[timed], "bytes": most[1:].tolist()[timed]}
        write_json(result, {**samples, "losses": everyone.tolist(), "peak": int(most[0])})
    dist.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def counted_elsewhere() -> int:
    """Bytes of this process's resident memory that it shares with other ranks and that are theirs, when each page is
    divided among those who have it."""
    resident = _kilobytes("/proc/self/status", "RssShmem:")
    return (resident - _kilobytes("/proc/self/smaps_rollup", "Pss_Shmem:")) * 1024


def _kilobytes(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(name))


class Runner:
    """Starts the ranks of a case, on this machine or on a cluster of hosts.

    Attributes:
        ranks: over all hosts.
    """

    def __init__(self, options: argparse.Namespace, cluster: Cluster | None) -> None:
        self._options, self._cluster = options, cluster
        hosts, self._ranks_per_host = options.hosts or (1, options.ranks)
        self.ranks = hosts * self._ranks_per_host

    def run(self, name: str, work: Work) -> Any:
        """What rank 0 wrote. Raises CaseError."""
        arguments = ["--rank-of", name]
        for field, value in asdict(work).items():
            arguments += [f"--{field.replace('_', '-')}", str(value)]
        script, timeout = Path(__file__), self._options.timeout
        pages = {"THP_MEM_ALLOC_ENABLE": "1"} if self._options.huge_pages else {}
        environment = {"OMP_NUM_THREADS": str(self._options.threads), **pages}
        if self._cluster is None:
            return run_ranks(script, arguments, ranks=self.ranks, timeout=timeout, environment=environment)
        try:
            return run_on_hosts(
                self._cluster, script, arguments, ranks_per_host=self._ranks_per_host, timeout=timeout,
                environment=environment,
            )  # fmt: skip
        except ClusterError as error:
            raise CaseError(str(error)) from error


def measure(work: Work, options: argparse.Namespace, runner: Runner) -> list[dict[str, Any]]:
    """One entry for each case: its samples, or why there are none."""
    samples = ("seconds", "processor seconds", "bytes")
    found: dict[str, dict[str, Any]] = {
        name: {"case": name, "estimate": CASES[name].estimate(work, runner.ranks), "problem": None, "peak": 0}
        | {what: [] for what in (*samples, "losses")}
        for name in options.cases
    }
    for number in range(options.rounds):
        for name, entry in found.items():
            if entry["problem"] is not None:
                continue
            free = available_memory() - RESERVE_BYTES
            if runner.ranks * entry["estimate"] > free:
                entry["problem"] = (
                    f"does not fit: {runner.ranks} ranks need {entry['estimate'] // MIB:,} MiB each, "
                    f"{free // MIB:,} MiB are free"
                )
                continue
            print(f"vocabulary {work.vocabulary:,}, round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            try:
                got = runner.run(name, work)
            except CaseError as error:
                entry["problem"] = str(error)
                continue
            for what in samples:
                entry[what] += got[what]
            entry["losses"], entry["peak"] = got["losses"], max(entry["peak"], got["peak"])
    check_same_losses(work, [entry for entry in found.values() if entry["losses"]])
    return list(found.values())


def check_same_losses(work: Work, entries: Sequence[dict[str, Any]]) -> None:
    """Raises if two cases did different work: equal gradients show in the losses of the later steps."""
    tolerance = TOLERANCE.get((work.precision, work.optimizer), ROUNDED_TOLERANCE)
    # Compared with one that says something of every step, and is not rounded, if there is one.
    reference = min(
        entries, key=lambda e: (CASES[e["case"]].same_losses is not None, not CASES[e["case"]].exact), default=None
    )
    for entry in entries:
        assert reference is not None
        cases = [CASES[reference["case"]], CASES[entry["case"]]]
        allowed = tolerance if all(case.exact for case in cases) else ROUNDED_TOLERANCE
        same = min(len(entry["losses"]), *(case.same_losses or sys.maxsize for case in cases))
        for step, (one, other) in enumerate(zip(reference["losses"][:same], entry["losses"][:same], strict=True)):
            if not math.isclose(one, other, rel_tol=allowed):
                raise SystemExit(f"step {step}: loss {one} with {reference['case']}, {other} with {entry['case']}")


def summary(work: Work, entries: Sequence[dict[str, Any]], between_hosts: bool) -> list[dict[str, object]]:
    """Rows of the table."""
    measured = {entry["case"]: entry for entry in entries if entry["seconds"]}
    medians = {name: statistics.median(entry["seconds"]) for name, entry in measured.items()}
    peaks = {name: entry["peak"] for name, entry in measured.items()}
    rows: list[dict[str, object]] = []
    for entry in entries:
        name = entry["case"]
        row: dict[str, object] = {"vocabulary": f"{work.vocabulary:,}", "case": name}
        if name not in measured:
            cells = [entry["problem"].split(":")[0], "", f"est. {entry['estimate'] / MIB:,.0f}", "", ""]
        else:
            processor = statistics.median(entry["processor seconds"])
            cells = [f"{medians[name]:.3f}", f"{processor:.3f}", f"{entry['peak'] / MIB:,.0f}"]
            cells += [_over(name, "hybrid", values) for values in (medians, peaks)]
        columns = ["s / step", "CPU s / step", "peak MiB", "time / hybrid", "memory / hybrid"]
        row |= dict(zip(columns, cells, strict=True))
        if between_hosts:
            row["MB sent"] = f"{statistics.median(entry['bytes']) / MB:.1f}" if name in measured else ""
            for peer in (peer for peer in medians if peer.startswith("torch")):
                row[f"{peer} / this"] = _over(peer, name, medians)
        rows.append(row)
    return rows


def _over(one: str, other: str, values: dict[str, float]) -> str:
    return f"{values[one] / values[other]:.2f}" if one in values and other in values else ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", type=_hosts, metavar="HOSTSxRANKS", help="hosts, and ranks of each, such as 2x2")
    parser.add_argument("--vocabulary", type=int, nargs="+", help="V; 30000 250000 1000000, between hosts 30522")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", help="which of the above")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="D, a multiple of 64")
    parser.add_argument("--sequences", type=int, help="of each rank; 4, between hosts 1")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="sgd is plain, without momentum")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast")
    parser.add_argument("--lr", type=float, help="0.1 for sgd, 0.0001 for adamw")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each case in each round")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1, help="how often the cases take turns")
    parser.add_argument("--ranks", type=int, default=2, help="on one host")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--huge-pages", action="store_true", help="let torch ask for huge pages, in every case")
    parser.add_argument("--mbit", type=float, default=1000.0, help="cap of every host's link, in each direction")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one case may take in one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vocabulary = options.vocabulary or ([30_522] if options.hosts else [30_000, 250_000, 1_000_000])
    options.cases = options.cases or list(BETWEEN_HOSTS if options.hosts else ON_ONE_HOST)
    options.sequences = options.sequences or (1 if options.hosts else 4)
    options.lr = options.lr or (0.1 if options.optimizer == "sgd" else 1e-4)
    return options


def _hosts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected hosts and ranks of each, such as 2x2, got {text!r}")
    return int(found[1]), int(found[2])


def works(options: argparse.Namespace) -> Iterator[Work]:
    """One for each vocabulary."""
    for vocabulary in options.vocabulary:
        given = vars(options) | {"vocabulary": vocabulary}
        yield Work(**{field.name: given[field.name] for field in fields(Work)})


def compare(options: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    everything = []
    with contextlib.ExitStack() as stack:
        cluster = None
        if options.hosts:
            cluster = stack.enter_context(Cluster(options.hosts[0], [Link(mbit=options.mbit)]))
        runner = Runner(options, cluster)
        for work in works(options):
            entries = measure(work, options, runner)
            rows += summary(work, entries, options.hosts is not None)
            everything.append({**asdict(work), "ranks": runner.ranks, "hosts": options.hosts, "cases": entries})
            for entry in entries:
                if entry["problem"] is not None:
                    print(f"vocabulary {work.vocabulary:,}, {entry['case']}: {entry['problem']}", flush=True)
            if options.json:
                write_json(options.json, everything)
    where = f"on {options.hosts[0]} hosts, {options.mbit:g} Mbit/s" if options.hosts else "on one host"
    print(
        f"\n{runner.ranks} ranks of {options.threads} thread(s) {where}, {options.layers} layers, D = {options.width}, "
        f"{runner.ranks} x {options.sequences} sequences of {options.length} tokens, {work.masked} of them predicted, "
        f"{options.precision}, {options.optimizer}{', huge pages' if options.huge_pages else ''}\n"
    )
    print(table(rows, text_columns=2))


def main() -> None:
    options = parse()
    if options.rank_of:
        run_as_rank(CASES[options.rank_of], next(works(options)), options.result)
        return
    with unless_there_is_no_cluster():
        compare(options)


if __name__ == "__main__":
    main()
