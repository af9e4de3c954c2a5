"""A group: ranks as a value, with collectives."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.host_lane import with_shared_memory
from hybridpar.comm.lanes import AloneLane, Lane, Op, ThreadHub, ThreadLane, TorchLane
from hybridpar.comm.shm_lane import ShmLane
from hybridpar.comm.values import gather_json
from hybridpar.topology import Topology, detect

DEFAULT_TIMEOUT = 300.0


class Group:
    """The ranks that work together. Every collective must be called by all of them, in the same order.

    Attributes:
        rank, size: this rank in [0, size), and the number of ranks.
        local_rank, host, topology: where this rank runs.
    """

    def __init__(self, lane: Lane, topology: Topology) -> None:
        self._lane = lane
        self.topology = topology
        self.rank, self.size = lane.rank, lane.size
        self.local_rank, self.host = topology.local_rank, topology.host

    @classmethod
    def alone(cls) -> Group:
        """A group of one."""
        return cls(AloneLane(), replace(detect({}), host=socket.gethostname()))

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        shared_memory: bool = True,
    ) -> Group:
        """The ranks of an initialised torch.distributed (or of one of its groups), on communicators of their own.

        Args:
            process_group: None means all ranks of the job.
            timeout: seconds that one collective may wait for the other ranks.
            shared_memory: as for ``init``.
        """
        ranks = dist.get_process_group_ranks(process_group)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        lane: Lane = TorchLane(ranks, backend, timeout)
        if shared_memory:
            lane = with_shared_memory(lane, timeout)
        topology = detect()
        if topology.size != dist.get_world_size():  # torch was initialised by hand, without a launcher
            topology = Topology(dist.get_rank(), dist.get_world_size(), host=topology.host, launcher="torch")
        return cls(lane, topology)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, host={self.host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Itself: a copied module works with the same ranks."""
        return self

    def new_lane(self) -> Lane:
        """A further communicator of these ranks, for use by another thread. Collective."""
        return self._lane.clone()

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce ``tensor`` (contiguous, any shape) over the ranks, in place, and return it."""
        self._lane.all_reduce(_contiguous(tensor, "all_reduce"), op)
        return tensor

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the tensors of all ranks along dimension 0.

        Args:
            tensor: [rows, ...]; all dimensions but the first are equal on all ranks.
            sizes: rows of each rank; None when every rank has as many as this one.

        Returns:
            [sum of sizes, ...].
        """
        sizes = self._checked_sizes(sizes, tensor.shape[0])
        if sizes[self.rank] != tensor.shape[0]:
            raise ValueError(f"expected {sizes[self.rank]} rows as sizes[{self.rank}] says, got {tensor.shape[0]}")
        gathered = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        self._lane.all_gather(gathered.split(sizes), tensor.contiguous())
        return gathered

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Sum over the ranks, of which this rank gets its own rows: the adjoint of ``all_gather``.

        Args:
            tensor: [sum of sizes, ...], the same shape on all ranks.
            sizes: rows that each rank receives; None divides the rows evenly.
        """
        if sizes is None and tensor.shape[0] % self.size:
            raise ValueError(f"expected rows divisible by {self.size} ranks, got {tensor.shape[0]}; pass sizes")
        sizes = self._checked_sizes(sizes, tensor.shape[0] // self.size)
        if sum(sizes) != tensor.shape[0]:
            raise ValueError(f"expected {sum(sizes)} rows as sizes {list(sizes)} say, got {tensor.shape[0]}")
        output = tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
        self._lane.reduce_scatter(output, tensor.contiguous().split(sizes))
        return output

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrite ``tensor`` (contiguous) with that of rank ``root``, and return it."""
        self._lane.broadcast(_contiguous(tensor, "broadcast"), root)
        return tensor

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._lane.barrier()

    def all_gather_json(self, value: Any) -> list[Any]:
        """Each rank's value, in rank order. Values are anything that JSON can carry."""
        return gather_json(self._lane, value)

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """The value of rank ``root``; the other ranks' values are not looked at."""
        return self.all_gather_json(value if self.rank == root else None)[root]

    def close(self) -> None:
        """Free the communicators. Collective where the library demands it."""
        self._lane.close()

    def _checked_sizes(self, sizes: Sequence[int] | None, default: int) -> list[int]:
        if sizes is None:
            return [default] * self.size
        if len(sizes) != self.size:
            raise ValueError(f"expected one size for each of {self.size} ranks, got {len(sizes)}")
        return list(sizes)


def thread_groups(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Group]:
    """Groups for ``size`` ranks that are threads of this process: thread r uses element r. CPU tensors only.

    If a thread leaves early, call ``abort_thread_group`` so that the others raise at once.
    """
    hub = ThreadHub(size, timeout)
    host = socket.gethostname()
    return [Group(ThreadLane(hub, rank), Topology(rank, size, rank, size, host, "threads")) for rank in range(size)]


def abort_thread_group(group: Group) -> None:
    """Make every wait of every rank of a thread group fail now: called when a rank cannot go on."""
    if not isinstance(group._lane, ThreadLane | ShmLane):
        raise TypeError(f"expected a group made by thread_groups, got {group!r}")
    group._lane.abort()


def init(*, timeout: float = DEFAULT_TIMEOUT, shared_memory: bool = True) -> Group:
    """The group of all ranks of this job, under torchrun, mpirun or Slurm, or alone.

    Adopts a torch.distributed that is already initialised. Otherwise, under a launcher, initialises it, with gloo for
    CPU tensors and NCCL for CUDA tensors where CUDA is available, and shuts it down when the process ends.

    Args:
        timeout: seconds that one collective may wait for the other ranks before it raises.
        shared_memory: if all ranks are on one host, CPU tensors travel through its shared memory (/dev/shm) and not
            over gloo. Where there is none, that is logged, and gloo serves.

    Raises:
        ValueError: the launcher's variables contradict each other.
        CommunicationError: the other ranks could not be reached in time.
    """
    if dist.is_initialized():
        return Group.from_torch(timeout=timeout, shared_memory=shared_memory)
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
    return Group(Group.from_torch(timeout=timeout, shared_memory=shared_memory)._lane, topology)


def _shut_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet_through_mpi(topology: Topology) -> Topology:
    """Let rank 0 choose a port and tell the others over MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"{topology.launcher} does not say where ranks meet: expected MASTER_ADDR and MASTER_PORT, got neither; "
            "set them, or install hybridpar[mpi] so that the ranks can agree over MPI"
        ) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != topology.size:
        raise ValueError(
            f"mpirun started {topology.size} ranks but mpi4py sees {world.Get_size()}: expected both from one MPI; "
            "use the mpirun of the MPI that mpi4py was installed with"
        )
    hosts = world.allgather(topology.host)
    place = None
    if world.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = (topology.host if len(set(hosts)) > 1 else "127.0.0.1", probe.getsockname()[1])
    address, port = world.bcast(place)
    return replace(topology, address=address, port=port, local_size=hosts.count(topology.host))


def _contiguous(tensor: Tensor, operation: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{operation} works in place: expected a contiguous tensor, got strides {tensor.stride()}")
    return tensor
