"""How the engine sends: bucket size, number of tracks, route and wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.compose import ROUTES, Route

DEFAULT_BUCKET_BYTES = 4 << 20
# Between hosts a bucket is worth more hand-offs between threads and ranks, as measured.
_BETWEEN_HOSTS = 8 << 20
_MOST_TRACKS = 64


@dataclass(frozen=True)
class Plan:
    """Everything that the ranks must choose alike before gradients travel.

    Attributes:
        bucket_bytes: gradients travel together up to this many bytes of their own dtype; a larger one travels alone.
            None: 4 MiB inside a host, 8 MiB between hosts.
        tracks: buckets travel on so many communicators side by side, each with a thread of its own: one bucket is on
            the network while another is in its shared-memory part. None: one inside a host, three between hosts.
        route: how a bucket crosses the ranks: ``"flat"``, ``"striped"``, ``"hierarchical"``, or ``"auto"``, what suits
            the hosts (see ``hybridpar.comm.lanes.compose.compose``).
        wire: what of a gradient travels, and in which format.
        compress_exponents: between hosts float32 and bfloat16 take fewer bytes, some 27 bits a value in place of 32 and
            11 in place of 16, and every bit arrives (see ``hybridpar.comm.lanes.compressed_lane``). For networks of one
            or a few Gbit/s. CUDA tensors and float64 travel as they are.
    """

    bucket_bytes: int | None = None
    tracks: int | None = None
    route: Route = "auto"
    wire: Wire = field(default_factory=Wire)
    compress_exponents: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "tracks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"Plan.{name}: expected an int, got {value!r}")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(
                f"Plan.bucket_bytes: expected 1 or more, got {self.bucket_bytes}; 1 sends every tensor alone"
            )
        if self.tracks is not None and not 1 <= self.tracks <= _MOST_TRACKS:
            raise ValueError(
                f"Plan.tracks: expected 1 to {_MOST_TRACKS}, got {self.tracks}; 2 or 3 keep a network busy"
            )
        if self.route not in ROUTES:
            raise ValueError(
                f"Plan.route: expected one of {', '.join(map(repr, ROUTES))}, got {self.route!r}; "
                "'auto' is what suits the hosts"
            )
        if not isinstance(self.compress_exponents, bool):
            raise TypeError(f"Plan.compress_exponents: expected True or False, got {self.compress_exponents!r}")
        if not isinstance(self.wire, Wire):
            raise TypeError(f"Plan.wire: expected a Wire, got {self.wire!r}; pass hp.Wire(dtype=...)")
        if self.compress_exponents and not self.wire.has_exponents_to_spare:
            raise ValueError(
                f"Plan.compress_exponents: expected a wire of float32 or bfloat16 values, got {self.wire.describe()}; "
                "float16 has few bits of exponent, and top_k sends few values"
            )

    def resolved(self, hosts: int) -> Plan:
        """The same plan with a bucket size and a number of tracks that fit so many hosts, where it leaves them open."""
        return replace(
            self,
            bucket_bytes=self.bucket_bytes or (DEFAULT_BUCKET_BYTES if hosts == 1 else _BETWEEN_HOSTS),
            tracks=self.tracks or (1 if hosts == 1 else 3),
        )

    def describe(self) -> str:
        """In words, for a log line."""
        tracks = f"{self.tracks or 'fitting'} track{'s' * (self.tracks != 1)}"
        buckets = "fitting buckets" if self.bucket_bytes is None else f"buckets of {_bytes(self.bucket_bytes)}"
        compressed = ", exponents compressed between hosts" if self.compress_exponents else ""
        return f"{buckets} on {tracks}, route {self.route}, wire: {self.wire.describe()}{compressed}"

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON can carry them."""
        return {
            "bucket_bytes": self.bucket_bytes,
            "tracks": self.tracks,
            "route": self.route,
            "wire": self.wire.to_json(),
            "compress_exponents": self.compress_exponents,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_json``. Fields that are missing have their default.

        Raises:
            TypeError, ValueError: a field has an unknown name or a value that it cannot have.
        """
        if unknown := value.keys() - {each.name for each in fields(cls)}:
            known = ", ".join(each.name for each in fields(cls))
            raise ValueError(f"Plan: expected {known}, got also {sorted(unknown)}")
        return cls(**{**value, "wire": Wire.from_json(value.get("wire", {}))})


DEFAULT_PLAN = Plan()


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"
