"""The plans that are worth trying, given where the ranks are and how much they send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from hybridpar.comm.engine.plan import DEFAULT_BUCKET_BYTES, Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.compose import Route

# Step times change little within a factor of two of the best size.
_BUCKET_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
_TRACKS = (1, 3)


def candidate_grid(
    ranks_per_host: Sequence[int],
    interfaces: int,
    gradient_bytes: int,
    wires: Sequence[Wire] = (Wire(),),
    *,
    compressible: bool = True,
) -> list[Plan]:
    """All combinations of what may be chosen; the first is where a search best begins. A pure function.

    Args:
        ranks_per_host: how many ranks each host has.
        interfaces: network interfaces that every host uses side by side; 0 or 1 where there is nothing to choose.
        gradient_bytes: of all gradients together.
        wires: formats that may be chosen, the one to begin with first. Others than ``Wire()`` change what is computed.
        compressible: whether there are gradients whose exponents can be compressed.

    Raises:
        ValueError: no ranks, no wires, or wires that are equal.
    """
    if not ranks_per_host or min(ranks_per_host) < 1:
        raise ValueError(f"ranks_per_host: expected at least one host, each with a rank, got {list(ranks_per_host)}")
    if len(wires) == 0 or len(set(wires)) < len(wires):
        raise ValueError(f"wires: expected one or several different formats, got {list(wires)}")
    hosts, several = len(ranks_per_host), max(ranks_per_host) > 1
    # "auto" is hierarchical where hosts have several ranks, otherwise striped where there are several interfaces.
    routes: list[Route] = ["auto"]
    if hosts > 1 and (several or interfaces > 1):
        routes.append("flat")
    if hosts > 1 and several and interfaces > 1:
        routes.append("striped")
    # From all gradients in one bucket on, a larger limit changes nothing.
    sizes = [size for size in _BUCKET_BYTES if size < gradient_bytes]
    if len(sizes) < len(_BUCKET_BYTES):
        sizes.append(_BUCKET_BYTES[len(sizes)])
    first_size = DEFAULT_BUCKET_BYTES if DEFAULT_BUCKET_BYTES in sizes else sizes[-1]
    # Across hosts one track sends while another one adds up inside its host.
    tracks = [count for count in _TRACKS if count == 1 or gradient_bytes > min(sizes) * (count - 1)]
    first_tracks = 3 if hosts > 1 and 3 in tracks else 1
    # Nothing crosses a network inside a host.
    compressed = (False, True) if hosts > 1 and compressible else (False,)
    return plans(routes, _first(first_size, sizes), _first(first_tracks, tracks), compressed, wires)


def plans(
    routes: Iterable[Route],
    bucket_bytes: Iterable[int | None],
    tracks: Iterable[int | None],
    compress_exponents: Iterable[bool],
    wires: Iterable[Wire],
) -> list[Plan]:
    """All combinations that there can be, in the order given, the last one changing fastest."""
    return [
        Plan(size, count, route, wire, compress)
        for route, size, count, compress, wire in product(routes, bucket_bytes, tracks, compress_exponents, wires)
        if not compress or wire.has_exponents_to_spare
    ]


def _first(one: int, of: Sequence[int]) -> list[int]:
    return [one, *(other for other in of if other != one)]
