"""MPI's Allreduce in place through mpi4py, as ``benchmarks/all_reduce.py`` starts it on the ranks of an mpirun."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI
from support.report import write_json
from support.timing import repeats_of, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    found: dict[str, list[float]] = {}
    for size in options.bytes:
        values = np.ones(size // 4, dtype=np.float32)
        world.Allreduce(MPI.IN_PLACE, values)
        assert (values == world.size).all()
        values[:] = 0  # which stay finite
        taken = np.array(timed(lambda v=values: world.Allreduce(MPI.IN_PLACE, v), world.Barrier, repeats_of(size)))
        world.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
        found[f"float32 {size}"] = taken.tolist()
    if world.rank == 0:
        version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        write_json(options.result, {"ranks": world.size, "version": version, "seconds": found})


if __name__ == "__main__":
    main()
