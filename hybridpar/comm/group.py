"""A group: ranks as a value, with collectives."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.compose import Route, Ways, compose
from hybridpar.comm.lanes.lane import AloneLane, Lane, Op, ThreadHub, ThreadLane, check_reducible
from hybridpar.comm.lanes.shm_lane import ShmLane
from hybridpar.comm.lanes.torch_lane import Meeting, TorchLane, interface_problem, own_connection
from hybridpar.comm.lanes.values import gather_json
from hybridpar.comm.lanes.watch import Watch
from hybridpar.topology import Topology, detect, host_identity

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Origin:
    """What further lanes of a group are made from: one over which its ranks meet, what hosts offer, where ranks are."""

    parent: Lane
    ways: Ways
    host_of: Sequence[str]

    def compose(self, route: Route, compress_exponents: bool = False) -> Lane:
        """Collective: a new lane of these ranks."""
        return compose(self.parent, self.ways, route, host_of=self.host_of, compress_exponents=compress_exponents)


class Group:
    """The ranks that work together. Every collective must be called by all of them, in the same order.

    Attributes:
        rank, size: this rank in [0, size), and the number of ranks.
        ranks: number of each rank in the whole job.
        hosts: the ranks of each host, hosts in the order of their first ranks.
        local_rank, host, topology: where this rank runs.
    """

    def __init__(self, lane: Lane, topology: Topology, origin: Origin | None = None) -> None:
        self._lane, self._origin = lane, origin
        self.topology = topology
        self.rank, self.size, self.ranks = lane.rank, lane.size, lane.ranks
        self.local_rank, self.host = topology.local_rank, topology.host
        hosts: dict[str, list[int]] = {}
        for rank in range(self.size):
            hosts.setdefault("" if origin is None else origin.host_of[rank], []).append(rank)
        self.hosts = list(hosts.values())

    @classmethod
    def alone(cls) -> Group:
        """A group of one."""
        return cls(AloneLane(), replace(detect({}), host=socket.gethostname()))

    @classmethod
    def over(cls, parent: Lane, ways: Ways, *, topology: Topology) -> Group:
        """Collective: the ranks of ``parent``, on the lane that serves them best."""
        origin = Origin(parent, ways, gather_json(parent, ways.host))
        return cls(origin.compose("auto"), topology, origin)

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        shared_memory: bool = True,
        interfaces: Sequence[str] = (),
    ) -> Group:
        """The ranks of an initialised torch.distributed (or of one of its groups), on communicators of their own.

        Args:
            process_group: None means all ranks of the job.
            timeout: seconds that one collective may wait for the other ranks.
            shared_memory, interfaces: as for ``init``.
        """
        ranks = dist.get_process_group_ranks(process_group)
        topology = detect()
        if topology.size != dist.get_world_size():  # torch was initialised by hand, without a launcher
            topology = Topology(dist.get_rank(), dist.get_world_size(), host=topology.host, launcher="torch")
        store = dist.distributed_c10d._get_default_store()
        return connect(
            store, dist.get_rank(), ranks, topology=topology, timeout=timeout, shared_memory=shared_memory,
            interfaces=interfaces,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, host={self.host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Itself: a copied module works with the same ranks."""
        return self

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Network interfaces of this host that were asked for."""
        return () if self._origin is None else self._origin.ways.interfaces

    @property
    def watch(self) -> Watch | None:
        """Tells which ranks are gone, where ranks are processes."""
        return None if self._origin is None else self._origin.ways.watch

    def new_lane(self, route: Route = "auto", compress_exponents: bool = False) -> Lane:
        """A further communicator of these ranks, for use by another thread. Collective.

        Args:
            route, compress_exponents: see ``hybridpar.comm.lanes.compose.compose``.
        """
        return self._lane.clone() if self._origin is None else self._origin.compose(route, compress_exponents)

    def split(self, members: Sequence[int]) -> Group:
        """The group of some of these ranks, numbered in the order given. Collective over them, of which this is one."""
        chosen = list(members)
        if len(set(chosen)) != len(chosen) or self.rank not in chosen or not set(chosen) <= set(range(self.size)):
            raise ValueError(
                f"split: expected different ranks below {self.size}, {self.rank} (this one) among them, got {chosen}"
            )
        if self._origin is None:
            return Group(self._lane.split(chosen), self.topology)
        return Group.over(self._origin.parent.split(chosen), self._origin.ways, topology=self.topology)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce ``tensor`` (contiguous, any shape) over the ranks, in place, and return it.

        Raises:
            TypeError: of its dtype there is no sum (before anything is sent).
        """
        check_reducible("all_reduce", tensor)
        # Lanes write past autograd; a decorator that turns it off would take as long as a small sum.
        self._lane.all_reduce(_contiguous(tensor.detach() if tensor.requires_grad else tensor, "all_reduce"), op)
        return tensor

    @torch.no_grad()
    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the tensors of all ranks along dimension 0.

        Args:
            tensor: [rows, ...]; all dimensions but the first are equal on all ranks.
            sizes: rows of each rank; None when every rank has as many as this one, which is then checked.

        Returns:
            [sum of sizes, ...].

        Raises:
            ValueError: the tensor has no dimension, or the ranks have other numbers of rows.
        """
        if tensor.dim() == 0:
            raise ValueError("all_gather: expected rows to put one behind the other, got a tensor without dimensions; "
                             "use tensor[None]")  # fmt: skip
        if sizes is None:
            rows = self._rows(tensor.shape[0])
            if len(set(rows)) > 1:
                raise ValueError(f"all_gather: expected as many rows on every rank, got {rows}; pass sizes={rows}")
        sizes = self._checked_sizes(sizes, tensor.shape[0])
        if sizes[self.rank] != tensor.shape[0]:
            raise ValueError(f"expected {sizes[self.rank]} rows as sizes[{self.rank}] says, got {tensor.shape[0]}")
        gathered = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        self._lane.all_gather(gathered.split(sizes), tensor.detach().contiguous())
        return gathered

    @torch.no_grad()
    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Sum over the ranks, of which this rank gets its own rows: the adjoint of ``all_gather``.

        Args:
            tensor: [sum of sizes, ...], the same shape on all ranks.
            sizes: rows that each rank receives; None divides the rows evenly.

        Raises:
            TypeError: of its dtype there is no sum (before anything is sent).
        """
        check_reducible("reduce_scatter", tensor)
        if sizes is None and tensor.shape[0] % self.size:
            raise ValueError(f"expected rows divisible by {self.size} ranks, got {tensor.shape[0]}; pass sizes")
        sizes = self._checked_sizes(sizes, tensor.shape[0] // self.size)
        if sum(sizes) != tensor.shape[0]:
            raise ValueError(f"expected {sum(sizes)} rows as sizes {list(sizes)} say, got {tensor.shape[0]}")
        output = tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
        self._lane.reduce_scatter(output, tensor.detach().contiguous().split(sizes))
        return output

    @torch.no_grad()
    def all_to_all(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Send to each rank its rows, and get from each the rows that are for this one, however many those are.

        Args:
            tensor: [sum of sizes, ...], in the order of the ranks that the rows are for; all dimensions but the first
                are equal on all ranks.
            sizes: rows for each rank; None divides the rows evenly.

        Returns:
            [rows for this rank, ...], in the order of the ranks that the rows are from.

        Raises:
            ValueError: the tensor has no dimension, or ``sizes`` are not its rows.
        """
        if tensor.dim() == 0:
            raise ValueError("all_to_all: expected rows for each rank, got a tensor without dimensions")
        if sizes is None and tensor.shape[0] % self.size:
            raise ValueError(f"expected rows divisible by {self.size} ranks, got {tensor.shape[0]}; pass sizes")
        sizes = self._checked_sizes(sizes, tensor.shape[0] // self.size)
        if sum(sizes) != tensor.shape[0] or min(sizes) < 0:
            raise ValueError(f"expected {sum(sizes)} rows as sizes {list(sizes)} say, got {tensor.shape[0]}")
        counts = torch.empty(self.size, dtype=torch.int64)
        self._lane.all_to_all(counts.split(1), torch.tensor(sizes).split(1))
        received = counts.tolist()
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        self._lane.all_to_all(output.split(received), tensor.detach().contiguous().split(sizes))
        return output

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrite ``tensor`` (contiguous) with that of rank ``root``, and return it."""
        self._lane.broadcast(_contiguous(tensor, "broadcast").detach(), root)
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
        if self._origin is not None:
            self._origin.parent.close()

    def _rows(self, mine: int) -> list[int]:
        counts = list(torch.empty(self.size, 1, dtype=torch.int64).unbind())
        self._lane.all_gather(counts, torch.tensor([mine]))
        return [int(count) for count in counts]

    def _checked_sizes(self, sizes: Sequence[int] | None, default: int) -> list[int]:
        if sizes is None:
            return [default] * self.size
        if len(sizes) != self.size:
            raise ValueError(f"expected one size for each of {self.size} ranks, got {len(sizes)}")
        return list(sizes)


def connect(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    *,
    topology: Topology,
    timeout: float = DEFAULT_TIMEOUT,
    shared_memory: bool = True,
    interfaces: Sequence[str] = (),
    nccl: bool | None = None,
) -> Group:
    """Collective: a group of ranks that meet at a store, without torch's own process groups.

    Args:
        store: any of torch's that all of ``ranks`` reach.
        rank: number of this rank in the job.
        ranks: numbers of the members, in the order of their ranks in the group.
        topology: of this rank.
        timeout, shared_memory, interfaces: as for ``init``.
        nccl: whether CUDA tensors travel over NCCL, and not over gloo; None means if CUDA is available.

    Raises:
        CommunicationError: the others could not be reached in time.
        ValueError: the ranks have different numbers of interfaces, or one does not exist.
    """
    check_interfaces(interfaces)
    store = own_connection(store)
    exchange = _exchange(store, rank, ranks)
    try:
        watch = Watch(rank, ranks, exchange, topology.address)
        # Before anyone connects, or the others would wait for the one who cannot.
        offers = exchange({"interfaces": len(interfaces), "problem": interface_problem(interfaces)})
    except RuntimeError as error:
        raise CommunicationError(str(error), rank=rank, operation="init", tensor="nothing") from error
    for other, offer in zip(ranks, offers, strict=True):
        if offer["problem"]:
            raise ValueError(f"rank {other}: {offer['problem']}")
    counts = [offer["interfaces"] for offer in offers]
    if len(set(counts)) > 1:
        raise ValueError(f"interfaces: expected as many on every host, got {counts} on the ranks in order")
    meeting = Meeting(store, rank, timeout, watch, torch.cuda.is_available() if nccl is None else nccl)
    parent = TorchLane(meeting, ranks, interfaces[0] if interfaces else None)
    ways = Ways(host_identity(), timeout, shared_memory, tuple(interfaces), watch)
    return Group.over(parent, ways, topology=topology)


def check_interfaces(interfaces: Sequence[str]) -> None:
    """Raises TypeError for a single name in place of a list."""
    if isinstance(interfaces, str):
        raise TypeError(f"interfaces: expected a list of names, got the text {interfaces!r}; use [{interfaces!r}]")


def _exchange(store: Store, rank: int, ranks: Sequence[int]) -> Callable[[Any], list[Any]]:
    """Collective: gives every member's value, by way of the store."""
    place = PrefixStore(f"hybridpar/meet/{','.join(map(str, ranks))}", store)

    def exchange(value: Any) -> list[Any]:
        # Members meet in the same order everywhere, so each counts for itself.
        number = place.add(str(rank), 1)
        place.set(f"{number}/{rank}", json.dumps(value))
        return [json.loads(place.get(f"{number}/{other}")) for other in ranks]

    return exchange


def thread_groups(size: int, *, timeout: float = DEFAULT_TIMEOUT, hosts: int = 1) -> list[Group]:
    """Groups for ``size`` ranks that are threads of this process: thread r uses element r. CPU tensors only.

    If a thread leaves early, call ``abort_thread_group`` so that the others raise at once.

    Args:
        timeout: seconds that one collective may wait for the other ranks.
        hosts: how many hosts the ranks believe to be on, so that routes can be tried out.
    """
    hub = ThreadHub(size, timeout)
    per_host = -(-size // hosts)
    host_of = [socket.gethostname() + f"-{rank // per_host}" * (hosts > 1) for rank in range(size)]
    groups = []
    for rank, host in enumerate(host_of):
        lane = ThreadLane(hub, rank)
        topology = Topology(rank, size, rank % per_host, host_of.count(host), host, "threads")
        origin = Origin(lane, Ways(host, timeout, shared_memory=False), host_of)
        groups.append(Group(lane, topology, origin))
    return groups


def abort_thread_group(group: Group) -> None:
    """Make every wait of every rank of a thread group fail now: called when a rank cannot go on."""
    origin = group._lane if group._origin is None else group._origin.parent
    if not isinstance(origin, ThreadLane | ShmLane):
        raise TypeError(f"expected a group made by thread_groups, got {group!r}")
    origin.abort()
    group._lane.abort()


def _contiguous(tensor: Tensor, operation: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{operation} works in place: expected a contiguous tensor, got strides {tensor.stride()}")
    return tensor
