"""What this rank is, and what there is to communicate with."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from hybridpar.comm.horovod.context import current
from hybridpar.comm.lanes.mpi_lane import MpiLane


def rank() -> int:
    """Number of this process in [0, size)."""
    return current().group.rank


def size() -> int:
    """How many processes there are."""
    return current().group.size


def local_rank() -> int:
    """Number of this process among those on its host."""
    return _here().index(rank())


def local_size() -> int:
    """How many processes are on this host."""
    return len(_here())


def cross_rank() -> int:
    """Number of this host among those that have a process with this local rank."""
    return [host for host in current().group.hosts if len(host) > local_rank()].index(_here())


def cross_size() -> int:
    """How many hosts have a process with this local rank."""
    return sum(len(host) > local_rank() for host in current().group.hosts)


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    return len({len(host) for host in current().group.hosts}) == 1


def mpi_built() -> bool:
    """Whether MPI can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether tensors travel over MPI between hosts: ``init(transport="mpi")``."""
    origin = current().group._origin
    return origin is not None and isinstance(origin.parent, MpiLane)


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI, too.

    Raises:
        ValueError: tensors do not travel over MPI.
    """
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; launch with mpirun and call hvd.init(transport='mpi')")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether CPU tensors travel over gloo between hosts."""
    return current().group._origin is not None and not mpi_enabled()


def nccl_built() -> int:
    """Version of NCCL (2.27.3 is 22703) where CUDA tensors travel over it; 0 where they cannot."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Intel's oneCCL: never."""
    return False


def _here() -> list[int]:
    group = current().group
    return next(host for host in group.hosts if group.rank in host)
