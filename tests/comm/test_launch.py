"""hp.init() under torchrun, under mpirun, with hand-set variables, and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROGRAM = """
import hybridpar as hp, torch
group = hp.init(timeout=30)
total = group.all_reduce(torch.tensor([group.rank + 1.0])).item()
print(f"<{group.rank} of {group.size} by {group.topology.launcher}: {total}>", flush=True)
"""


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_alone() -> None:
    result = _run([sys.executable, "-c", PROGRAM])
    assert "<0 of 1 by alone: 1.0>" in result.stdout, result.stderr


def test_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = _run([str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(program)])
    assert result.returncode == 0, result.stderr
    assert "<0 of 2 by torchrun: 3.0>" in result.stdout
    assert "<1 of 2 by torchrun: 3.0>" in result.stdout


@pytest.mark.mpi
def test_under_mpirun_without_a_master_address(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = _run([str(BIN / "mpirun"), "-n", "2", sys.executable, str(program)])
    assert result.returncode == 0, result.stderr
    assert "<0 of 2 by hydra: 3.0>" in result.stdout
    assert "<1 of 2 by hydra: 3.0>" in result.stdout


def test_ranks_that_never_come_end_in_an_error_that_names_the_operation() -> None:
    program = PROGRAM.replace("timeout=30", "timeout=3")
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    result = _run([sys.executable, "-c", program], **variables)
    assert result.returncode != 0
    assert "CommunicationError: rank 0: init of env:// failed" in result.stderr


OVER_MPI = """
import hybridpar as hp, torch
group = hp.init(timeout=30, transport="mpi", shared_memory=SHARED)
assert not torch.distributed.is_initialized() and group.hosts == [[0, 1]]
model = hp.DataParallel(torch.nn.Linear(3, 2), group=group)
model(torch.full((1, 3), group.rank + 1.0)).sum().backward()
total = model.module.weight.grad.sum().item()
print(f"<{group.rank} of {group.size} on {type(group._lane).__name__}: {total}>", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("shared_memory", "lane"), [(True, "HostLane"), (False, "MpiLane")])
def test_mpi_may_be_the_transport(shared_memory: bool, lane: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OVER_MPI.replace("SHARED", str(shared_memory)))
    result = _run([str(BIN / "mpirun"), "-n", "2", sys.executable, str(program)])
    assert result.returncode == 0, result.stderr
    assert f"<0 of 2 on {lane}: 18.0>" in result.stdout
    assert f"<1 of 2 on {lane}: 18.0>" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("transport='carrier pigeon'", {}, "transport: expected 'torch' or 'mpi', got 'carrier pigeon'"),
        ("transport='mpi'", {"RANK": "0", "WORLD_SIZE": "1"}, "expected ranks that mpirun started for 'mpi'"),
        ("transport='mpi', interfaces=['eth0']", {}, r"interfaces: expected none with transport='mpi', got \['eth0'\]"),
    ],
)
def test_a_transport_that_makes_no_sense_is_refused(arguments: str, variables: dict[str, str], message: str) -> None:
    result = _run([sys.executable, "-c", f"import hybridpar as hp; hp.init({arguments})"], **variables)
    assert re.search(f"ValueError: .*{message}", result.stderr), result.stderr
