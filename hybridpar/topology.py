"""Which ranks there are and on which hosts, and what the user switched on.

The only reader of the environment: variables of launchers (torchrun, mpirun, Slurm, ps-lite's, none), HYBRIDPAR_*
switches, and the one of MXNet that matters here.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """This process's place among the ranks.

    Attributes:
        rank, size: global rank in [0, size) and the number of ranks.
        local_rank, local_size: the same, counted on this host only.
        host: name of this host.
        launcher: torchrun, openmpi, hydra (mpich, Intel MPI), slurm, ps-lite (MXNet's launch.py), torch (initialised by
            hand), threads or alone.
        address, port: where rank 0 listens, or None when the launcher does not say.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    launcher: str = "alone"
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size):
            raise ValueError(
                f"expected 0 <= rank < size and 0 <= local_rank < local_size, got rank {self.rank} of {self.size}, "
                f"local_rank {self.local_rank} of {self.local_size}; check the variables that the launcher set"
            )


# rank, size, local rank, local size; the first launcher whose rank variable is set wins.
_LAUNCHERS: dict[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_* is set by srun only: a batch script has SLURM_PROCID too, but is no rank.
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def detect(environ: Mapping[str, str] | None = None) -> Topology:
    """Read the launcher's variables.

    Args:
        environ: variables to read instead of the process's own.

    Raises:
        ValueError: a launcher set its rank but not its size, or a value is not a number.
    """
    environ = os.environ if environ is None else environ
    for launcher, names in _LAUNCHERS.items():
        if names[0] in environ and (launcher != "slurm" or names[1] in environ):
            return _from_variables(launcher, names, environ)
    if ps_lite_role(environ) == "worker":
        return _from_ps_lite(environ)
    return Topology(host=socket.gethostname())


def ps_lite_role(environ: Mapping[str, str] | None = None) -> str | None:
    """What ps-lite's launcher started this process as: worker, server, scheduler; None where it did not.

    Args:
        environ: variables to read instead of the process's own.
    """
    return (os.environ if environ is None else environ).get("DMLC_ROLE") or None


def mxnet_engine(environ: Mapping[str, str] | None = None) -> str | None:
    """Which of its engines MXNet was told to run operators on; None where it chooses.

    Args:
        environ: variables to read instead of the process's own.
    """
    return (os.environ if environ is None else environ).get("MXNET_ENGINE_TYPE") or None


@dataclass(frozen=True)
class Switches:
    """What the environment turns on and off.

    Attributes:
        tune: HYBRIDPAR_TUNE: 0 turns off the trial of plans during the first steps; 1, like nothing, leaves it on.
        tune_file: HYBRIDPAR_TUNE_FILE: where plans that were found are kept for the next run; None: nowhere.
    """

    tune: bool = True
    tune_file: Path | None = None


def switches(environ: Mapping[str, str] | None = None) -> Switches:
    """Read the HYBRIDPAR_* variables. An empty one counts as not set.

    Args:
        environ: variables to read instead of the process's own.

    Raises:
        ValueError: HYBRIDPAR_TUNE is neither 0 nor 1.
    """
    environ = os.environ if environ is None else environ
    tune = environ.get("HYBRIDPAR_TUNE") or "1"
    if tune not in {"0", "1"}:
        raise ValueError(f"expected 0 or 1 in HYBRIDPAR_TUNE, got {tune!r}; 0 turns the tuner off")
    tune_file = environ.get("HYBRIDPAR_TUNE_FILE")
    return Switches(tune == "1", Path(tune_file) if tune_file else None)


def host_identity() -> str:
    """Text that is equal for two processes exactly if they can share memory and see each other's process ids.

    A host is more than its name, which containers and copies of a machine may share. So the text also holds the number
    that the kernel drew when it started, and the namespaces of the process. Processes in different network namespaces
    count as on different hosts, since that is what the user made them.
    """
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text().strip())
    for namespace in ("pid", "net"):
        link = Path("/proc/self/ns") / namespace
        parts.append(str(link.stat().st_ino) if link.exists() else "none")
    memory = Path("/dev/shm")
    parts.append(f"{memory.stat().st_dev}.{memory.stat().st_ino}" if memory.exists() else "none")
    return " ".join(parts)


def _from_variables(launcher: str, names: tuple[str, str, str, str], environ: Mapping[str, str]) -> Topology:
    rank_name, size_name, local_rank_name, local_size_name = names
    if size_name not in environ:
        raise ValueError(
            f"{rank_name} is set but {size_name} is not: expected a whole {launcher} environment; "
            f"launch with {launcher}, or unset {rank_name} to run alone"
        )
    rank, size = _number(rank_name, environ), _number(size_name, environ)
    local_rank = _number(local_rank_name, environ) if local_rank_name in environ else 0
    local_size = _number(local_size_name, environ) if local_size_name in environ else local_rank + 1
    address = environ.get("MASTER_ADDR")
    port = _number("MASTER_PORT", environ) if "MASTER_PORT" in environ else None
    if launcher == "slurm":
        address = address or _first_slurm_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST")))
        port = port or 20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000
    return Topology(rank, size, local_rank, max(local_size, 1), socket.gethostname(), launcher, address, port)


def _from_ps_lite(environ: Mapping[str, str]) -> Topology:
    """A worker of MXNet's launch.py. They have no scheduler, and meet where it would have listened."""
    size = _number("DMLC_NUM_WORKER", environ) if "DMLC_NUM_WORKER" in environ else 0
    # The tracker numbers workers from 0, and servers on from there; ps-lite itself may be told another number.
    name = next((name for name in ("DMLC_WORKER_ID", "DMLC_TASK_ID") if name in environ), None)
    if size < 1 or (name is None and size > 1):
        raise ValueError(
            "DMLC_ROLE is worker: expected DMLC_NUM_WORKER, and DMLC_WORKER_ID or DMLC_TASK_ID with a number for each "
            f"worker, got {', '.join(sorted(name for name in environ if name.startswith('DMLC_')))}; "
            "launch with launch.py --launcher local, or with torchrun or mpirun"
        )
    rank = 0 if name is None else _number(name, environ)
    local = environ.get("DMLC_JOB_CLUSTER") == "local"
    port = _number("DMLC_PS_ROOT_PORT", environ) if "DMLC_PS_ROOT_PORT" in environ else None
    address = environ.get("DMLC_PS_ROOT_URI")
    if size > 1 and (address is None or port is None):
        raise ValueError(
            "DMLC_ROLE is worker: expected DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, where worker 0 listens, got "
            f"{address} and {port}"
        )
    local_rank, local_size = (rank, size) if local else (0, 1)
    return Topology(rank, size, local_rank, local_size, socket.gethostname(), "ps-lite", address, port)


def _number(name: str, environ: Mapping[str, str]) -> int:
    # Slurm writes "2(x3)" for two tasks on each of three nodes.
    match = re.match(r"\d+", environ[name])
    if match is None:
        raise ValueError(f"expected a number in {name}, got {environ[name]!r}; unset it or launch again")
    return int(match.group())


def _first_slurm_host(nodes: str | None) -> str | None:
    """First host of a Slurm list such as ``gpu[03-05,9],login1``."""
    if not nodes:
        return None
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return None if match is None else match.group(1) + (match.group(2) or "")
