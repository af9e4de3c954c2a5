"""Starting: from what a launcher says to a group."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group, check_interfaces, connect
from hybridpar.comm.lanes.compose import Ways
from hybridpar.comm.lanes.lane import AloneLane
from hybridpar.comm.lanes.mpi_lane import MpiLane
from hybridpar.comm.lanes.mpi_library import load
from hybridpar.comm.lanes.watch import Watch
from hybridpar.topology import Topology, detect, host_identity

Transport = Literal["torch", "mpi"]


def init(
    *,
    timeout: float = DEFAULT_TIMEOUT,
    shared_memory: bool = True,
    interfaces: Sequence[str] = (),
    transport: Transport = "torch",
) -> Group:
    """The group of all ranks of this job, under torchrun, mpirun, Slurm or ps-lite's launcher, or alone.

    Adopts a torch.distributed that is already initialised. Otherwise, under a launcher, initialises it, with gloo for
    CPU tensors and NCCL for CUDA tensors where CUDA is available, and shuts it down when the process ends.

    Args:
        timeout: seconds that one collective may wait for the other ranks before it raises.
        shared_memory: inside a host CPU tensors travel through its shared memory (/dev/shm) and not over gloo. Where
            there is none, that is logged, and gloo serves.
        interfaces: names of this host's network interfaces (``eth0``) to use side by side, the same number on every
            host; without any, gloo chooses one (GLOO_SOCKET_IFNAME, or the one that the host's name stands for).

        transport: ``"torch"``, or ``"mpi"`` under mpirun: then CPU tensors travel over MPI between hosts (CUDA tensors
            do not travel at all), torch.distributed is left alone, and ``interfaces`` are MPI's own business.

    Raises:
        ValueError: the launcher's variables contradict each other, or do not go with the transport.
        CommunicationError: the other ranks could not be reached in time.
    """
    if transport not in ("torch", "mpi"):
        raise ValueError(f"transport: expected 'torch' or 'mpi', got {transport!r}")
    check_interfaces(interfaces)
    if transport == "mpi":
        return _over_mpi(detect(), timeout, shared_memory, interfaces)
    if dist.is_initialized():
        return Group.from_torch(timeout=timeout, shared_memory=shared_memory, interfaces=interfaces)
    topology = detect()
    if topology.launcher == "alone" or (topology.size == 1 and topology.address is None):
        return Group(AloneLane(), topology)
    if topology.address is None or topology.port is None:
        topology = _meet_through_mpi(topology)
    if torch.cuda.is_available():
        torch.cuda.set_device(topology.local_rank % torch.cuda.device_count())
    # torchrun's agent may serve the meeting place itself, which env:// knows about.
    where = "env://" if topology.launcher == "torchrun" else f"tcp://{topology.address}:{topology.port}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=where,
            rank=topology.rank,
            world_size=topology.size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise CommunicationError(str(error), rank=topology.rank, operation="init", tensor=where) from error
    # gloo's threads may abort a process that ends with the group still open.
    atexit.register(_shut_down)
    store = dist.distributed_c10d._get_default_store()
    group = connect(
        store, topology.rank, range(topology.size), topology=topology, timeout=timeout, shared_memory=shared_memory,
        interfaces=interfaces,
    )  # fmt: skip
    return _counted(group) if topology.launcher == "ps-lite" else group


def _counted(group: Group) -> Group:
    """The same, with the local ranks that the launcher did not tell."""
    here = next(host for host in group.hosts if group.rank in host)
    topology = replace(group.topology, local_rank=here.index(group.rank), local_size=len(here))
    return Group(group._lane, topology, group._origin)


def _shut_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _over_mpi(topology: Topology, timeout: float, shared_memory: bool, interfaces: Sequence[str]) -> Group:
    if topology.launcher == "torchrun":
        raise ValueError("transport: expected ranks that mpirun started for 'mpi', got torchrun; use 'torch'")
    if interfaces:
        raise ValueError(f"interfaces: expected none with transport='mpi', got {list(interfaces)}; MPI has its own way")
    world = _world(topology.size)
    hosts = world.allgather(topology.host)
    topology = replace(topology, local_size=hosts.count(topology.host))
    # A communicator of its own: the user's messages on MPI.COMM_WORLD are not ours.
    own, ranks = world.Dup(), range(topology.size)
    watch = Watch(topology.rank, ranks, own.allgather)
    parent = MpiLane(own, timeout, ranks, watch)
    return Group.over(parent, Ways(host_identity(), timeout, shared_memory, watch=watch), topology=topology)


def _meet_through_mpi(topology: Topology) -> Topology:
    """Let rank 0 choose a port and tell the others over MPI."""
    world = _world(topology.size)
    hosts = world.allgather(topology.host)
    place = None
    if world.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = (topology.host if len(set(hosts)) > 1 else "127.0.0.1", probe.getsockname()[1])
    address, port = world.bcast(place)
    return replace(topology, address=address, port=port, local_size=hosts.count(topology.host))


def _world(size: int) -> Any:
    """MPI.COMM_WORLD, if it has that many ranks."""
    world = load().MPI.COMM_WORLD
    if world.Get_size() != size:
        raise ValueError(
            f"mpirun started {size} ranks but mpi4py sees {world.Get_size()}: expected both from one MPI; "
            "use the mpirun of the MPI that mpi4py was installed with"
        )
    return world
