"""Composing lanes: which lane serves ranks best, given the hosts they are on and the networks between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from hybridpar.comm.lanes.attendance import Attendance
from hybridpar.comm.lanes.compressed_lane import CompressedLane
from hybridpar.comm.lanes.host_lane import with_shared_memory
from hybridpar.comm.lanes.lane import AloneLane, Lane
from hybridpar.comm.lanes.routes import HierarchicalLane, StripedLane
from hybridpar.comm.lanes.torch_lane import TorchLane
from hybridpar.comm.lanes.values import gather_json
from hybridpar.comm.lanes.watch import Watch

Route = Literal["auto", "flat", "striped", "hierarchical"]
ROUTES: tuple[Route, ...] = get_args(Route)


@dataclass(frozen=True)
class Ways:
    """What a rank's host offers.

    Attributes:
        host: equal for two ranks exactly if they can share memory.
        timeout: seconds that one collective may wait for the other ranks.
        shared_memory: whether CPU tensors may travel through it inside a host.
        interfaces: network interfaces of this host to use side by side, as many on every host; empty leaves the
            choice to the library.
        watch: knows which ranks are gone, where ranks are processes.
    """

    host: str
    timeout: float
    shared_memory: bool = True
    interfaces: tuple[str, ...] = ()
    watch: Watch | None = None
    _named: Counter[tuple[int, ...]] = field(default_factory=Counter, compare=False, repr=False)

    def name(self, ranks: Sequence[int]) -> str:
        """Of the next composed lane of ``ranks``, which make theirs in the same order and so find the same name."""
        self._named[tuple(ranks)] += 1
        return f"composed {tuple(ranks)} {self._named[tuple(ranks)]}"


def compose(
    parent: Lane,
    ways: Ways,
    route: Route = "auto",
    *,
    host_of: Sequence[str] | None = None,
    compress_exponents: bool = False,
) -> Lane:
    """Collective: a new lane of the parent's ranks.

    Args:
        parent: over which the ranks meet; it is left as it is.
        ways: of this rank.
        host_of: what every rank has as ``ways.host``, where that is known already.
        route: ``flat``: one communicator of all ranks. ``striped``: several of them side by side, one for each
            interface. ``hierarchical``: inside the hosts, then across (on all interfaces), then inside again.
            ``auto``: hierarchical where some host has several ranks and there are several hosts; striped where there
            are several interfaces; flat otherwise. Ranks of one host use its shared memory on every route.
        compress_exponents: what crosses hosts does so in a ``CompressedLane``.

    Raises:
        ValueError: no such route.
    """
    if route not in ROUTES:
        raise ValueError(f"route: expected one of {', '.join(ROUTES)}, got {route!r}")
    host_of = gather_json(parent, ways.host) if host_of is None else host_of
    return _compose(parent, range(parent.size), host_of, ways, route, compress_exponents)


def _compose(
    parent: Lane, members: Sequence[int], host_of: Sequence[str], ways: Ways, route: Route, compress: bool
) -> Lane:
    """``host_of`` names the host of every rank of the parent. Only the members take part."""
    hosts: dict[str, list[int]] = {}
    for member in members:
        hosts.setdefault(host_of[member], []).append(member)
    if len(hosts) == 1:
        return _inside(parent, members, ways)
    if route == "auto":
        route = "hierarchical" if len(hosts) < len(members) else "striped"
    if route != "hierarchical":
        return _across(parent, members, ways if route == "striped" else None, compress)
    mates = hosts[ways.host]
    place = mates.index(parent.rank)
    local = _inside(parent, mates, ways)
    carries = place < min(map(len, hosts.values()))
    cross = _across(parent, [host[place] for host in hosts.values()], ways, compress) if carries else None
    order = {member: number for number, member in enumerate(members)}
    ranks = [parent.ranks[member] for member in members]
    return HierarchicalLane(
        local,
        cross,
        [[order[member] for member in host] for host in hosts.values()],
        rank=order[parent.rank],
        ranks=ranks,
        divide=lambda chosen: _compose(parent, [members[rank] for rank in chosen], host_of, ways, "auto", compress),
        attendance=Attendance(ways.watch, ways.name(ranks), ranks),
    )


def _inside(parent: Lane, mates: Sequence[int], ways: Ways) -> Lane:
    """A lane of ranks of one host."""
    if len(mates) == 1:
        return AloneLane(parent.ranks[parent.rank])
    lane = parent.split(mates)
    return with_shared_memory(lane, ways.timeout) if ways.shared_memory else lane


def _across(parent: Lane, members: Sequence[int], ways: Ways | None, compress: bool) -> Lane:
    """A lane that crosses hosts, on all interfaces or, without ``ways``, on the first one."""
    lane = _plain_across(parent, members, ways, compress)
    return CompressedLane(lane) if compress else lane


def _plain_across(parent: Lane, members: Sequence[int], ways: Ways | None, slow: bool) -> Lane:
    if not isinstance(parent, TorchLane):
        return parent.split(members)
    if ways is None or len(ways.interfaces) < 2:
        return parent.split(members, in_pieces=slow)
    # Shares move, and with them the place of a value in its piece: sums must not depend on it.
    return StripedLane(
        [parent.split(members, interface, ordered=True, in_pieces=slow) for interface in ways.interfaces]
    )
