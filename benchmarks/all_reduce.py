"""All-reduce between the ranks of one host: ours, gloo and MPI, from 1 KB to 256 MB.

    python benchmarks/all_reduce.py [--ranks 2 4] [--bytes 1024 65536 ...] [--rounds 3] [--json FILE]

Ways:

ours         Group.all_reduce of an ordinary tensor: what is copied into and out of shared memory counts
ours bucket  the same on memory from lane.allocate, as the gradient engine's buckets have it
gloo         torch.distributed.all_reduce, in the same processes as ours
mpich        Allreduce in place through mpi4py (the MPI that mpi4py was installed with), in processes of its own

Every size is reduced in turns by the ways that share processes, `--rounds` rounds of fresh processes for everything.
Columns: microseconds from the moment when all ranks are ready until the last rank has the result, median over all calls
of all rounds; gigabytes a second, the bytes of one rank's tensor over that time; how many times as long each peer takes
as ours and as ours bucket. `floor` is the same for every rank reading and writing an ordinary tensor once, in place, at
the same time: no all-reduce can do less. bfloat16 is measured at 64 MB. MPI has no bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.launch import CaseError, run_ranks
from support.report import table, write_json

import hybridpar as hp

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
HALF_SIZE = 64 * MIB
Times = dict[str, list[float]]


def repeats_of(size: int) -> int:
    return max(5, min(200, (256 * MIB) // size))


def timed(work: Callable[[], object], ready: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call on this rank, after one that is not counted."""
    taken = []
    for repeat in range(repeats + 1):
        ready()
        start = time.perf_counter()
        work()
        if repeat:
            taken.append(time.perf_counter() - start)
    return taken


def calls_of(group: hp.Group, dtype: torch.dtype, size: int) -> dict[str, Callable[[], object]]:
    """The ways that share processes, each on a tensor of its own of ``size`` bytes."""
    count = size // dtype.itemsize
    lane = group._lane
    ordinary, other = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    bucket = lane.allocate(count, dtype, ordinary.device).fill_(0)
    target = torch.zeros_like(ordinary)
    return {
        "ours": lambda: group.all_reduce(ordinary),
        "ours bucket": lambda: group.all_reduce(bucket),
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


def run_as_mpi_rank(options: argparse.Namespace) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found: dict[str, Times] = {}
    for size in options.bytes:
        values = np.zeros(size // 4, dtype=np.float32)
        taken = np.array(timed(lambda v=values: world.Allreduce(MPI.IN_PLACE, v), world.Barrier, repeats_of(size)))
        world.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
        found[f"float32 {size}"] = {"mpich": taken.tolist()}
    if world.Get_rank() == 0:
        write_json(options.result, found)


def run_mpi(arguments: Sequence[str], ranks: int, timeout: float) -> Any:
    """The JSON that rank 0 left.

    Raises:
        CaseError: there is no MPI, it failed, or took longer than ``timeout`` seconds.
    """
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        raise CaseError("no mpirun beside this Python; pip install 'hybridpar[mpi]'")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(mpirun), "-n", str(ranks), sys.executable, str(Path(__file__)), *arguments]
        try:
            done = subprocess.run(
                [*command, "--mpi-rank", "--result", str(result)],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=timeout, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CaseError(f"too slow: stopped after {timeout:g} s") from error
        if done.returncode:
            raise CaseError(f"failed:\n{done.stderr[-2000:]}")
        return json.loads(result.read_text())


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Times]:
    """Seconds of every call of every round, by case and way."""
    sizes = ["--bytes", *map(str, options.bytes)]
    found: dict[str, Times] = {}
    for number in range(options.rounds):
        print(f"{ranks} ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
        results = [
            run_ranks(
                Path(__file__), ["--rank", *sizes],
                ranks=ranks, timeout=options.timeout, environment={"OMP_NUM_THREADS": "1"},
            )
        ]  # fmt: skip
        try:
            results.append(run_mpi(sizes, ranks, options.timeout))
        except CaseError as error:
            print(f"MPI: {error}", file=sys.stderr)
        for result in results:
            for case, ways in result.items():
                for way, taken in ways.items():
                    found.setdefault(case, {}).setdefault(way, []).extend(taken)
    return found


def size_text(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // KIB} KB"


def summary(ranks: int, found: dict[str, Times]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case, ways in found.items():
        dtype, size = case.split()
        medians = {way: statistics.median(taken) for way, taken in ways.items()}
        row: dict[str, object] = {"ranks": ranks, "dtype": dtype, "size": size_text(int(size))}
        order = ["ours", "ours bucket", "gloo", "mpich", "floor"]
        row |= {f"{way} us": f"{1e6 * medians[way]:,.1f}" if way in medians else "" for way in order}
        row |= {f"{way} GB/s": f"{int(size) / medians[way] / 1e9:.2f}" if way in medians else "" for way in order}
        for peer in ("gloo", "mpich"):
            for way in ("ours", "ours bucket"):
                row[f"{peer} / {way}"] = f"{medians[peer] / medians[way]:.1f}" if peer in medians else ""
        rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="of each rank's tensor, multiples of 4")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one set of processes may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> None:
    everything = {}
    for ranks in options.ranks:
        found = measure(options, ranks)
        everything[str(ranks)] = found
        print(table(summary(ranks, found), text_columns=3), flush=True)
        print()
        if options.json:
            write_json(options.json, everything)


def main() -> None:
    options = parse()
    if options.rank:
        run_as_rank(options)
    elif options.mpi_rank:
        run_as_mpi_rank(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
