"""A Horovod script runs as it is but for the import, under torchrun and mpirun, and trains as the formulas say."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.comm.horovod.scripts import digits

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "tests" / "comm" / "horovod" / "scripts" / "digits.py"


def _run(command: list[str], script: list[str]) -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, *script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def torchrun(ranks: int, *arguments: str) -> dict[str, Any]:
    """The script's result."""
    return _run([str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"], [str(SCRIPT), *arguments])


@functools.cache
def one_process(ranks: int) -> dict[str, Any]:
    """The same without communication: step k sums what ranks with a k-th batch compute, divided by all ranks."""
    args = digits.parser.parse_args([])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(args.seed)
        model = digits.Net()
        images, labels, test_images, test_labels = digits.data()
        shares = [digits.share(len(images), rank, ranks) for rank in range(ranks)]
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * ranks, momentum=args.momentum)
        for epoch in range(1, args.epochs + 1):
            orders = [
                torch.randperm(mine.stop - mine.start, generator=torch.Generator().manual_seed(epoch)) + mine.start
                for mine in shares
            ]
            batches = [order.split(args.batch_size) for order in orders]
            for step in range(max(map(len, batches))):
                optimizer.zero_grad()
                for theirs in batches:
                    if step < len(theirs):
                        output = model(images[theirs[step]])
                        (F.nll_loss(output, labels[theirs[step]]) / ranks).backward()
                optimizer.step()
        even = len(test_images) // ranks * ranks
        with torch.no_grad():
            output = model(test_images[:even])
        return {
            "size": ranks,
            "loss": F.nll_loss(output, test_labels[:even]).item(),
            "accuracy": (output.argmax(1) == test_labels[:even]).double().mean().item(),
            "weights": [parameter.sum().item() for parameter in model.parameters()],
        }
    finally:
        torch.set_default_dtype(before)


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["size"] == expected["size"]
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-12)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-8, abs=1e-10)


def test_under_torchrun_uneven_ranks_train_as_one_process() -> None:
    _equal(torchrun(3), one_process(3))


@pytest.mark.mpi
def test_under_mpirun_uneven_ranks_train_as_one_process() -> None:
    _equal(_run([str(BIN / "mpirun"), "-n", "2", sys.executable], [str(SCRIPT)]), one_process(2))


def test_what_it_learns_is_worth_something_and_options_hardly_matter() -> None:
    expected = one_process(2)
    assert expected["accuracy"] > 0.9
    found = torchrun(2, "--fp16-allreduce", "--gradient-predivide-factor", "2.0")
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.03)


MPI_PROGRAM = """
import numpy, torch
from mpi4py import MPI
import hybridpar.horovod as hvd

TRANSPORT
world = MPI.COMM_WORLD
assert (hvd.rank(), hvd.size()) == (world.Get_rank(), world.Get_size())
for dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
    tensor = torch.arange(6).to(dtype) * (hvd.rank() + 2)
    for ours, theirs in ((hvd.Sum, MPI.SUM), (hvd.Max, MPI.MAX), (hvd.Min, MPI.MIN), (hvd.Product, MPI.PROD)):
        expected = numpy.empty_like(tensor.numpy())
        world.Allreduce(tensor.numpy(), expected, op=theirs)
        for _ in range(3):
            assert numpy.array_equal(hvd.allreduce(tensor, name=f"{dtype} {ours}", op=ours).numpy(), expected)
    rows = tensor[: hvd.rank() + 1].clone()
    assert hvd.allgather(rows).tolist() == [value for theirs in world.allgather(rows.tolist()) for value in theirs]
    assert hvd.broadcast(tensor, 1).tolist() == world.bcast(tensor.tolist(), 1)
    assert hvd.alltoall(tensor).tolist() == sum(world.alltoall([one.tolist() for one in tensor.chunk(2)]), [])
half = world.Split(0 if hvd.rank() else 1)
own = hvd.ProcessSet(half)
assert own.ranks == [hvd.rank()]
hvd.barrier()
open(f"{FOLDER}/{hvd.rank()}", "w").write(str(hvd.mpi_enabled()))
"""


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["torch", "mpi"])
def test_under_mpirun_results_are_mpi4pys(transport: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    check = "assert isinstance(hvd.mpi_threads_supported(), bool)" if transport == "mpi" else ""
    begin = f"hvd.init(transport={transport!r})\nFOLDER = {str(tmp_path)!r}\n{check}"
    program.write_text(MPI_PROGRAM.replace("TRANSPORT", begin))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(BIN / "mpirun"), "-n", "2", sys.executable, str(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [str(transport == "mpi")] * 2
