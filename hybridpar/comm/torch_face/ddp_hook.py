"""A communication hook for torch's DDP: its buckets travel on lanes of hybridpar, in the format that a wire says.

# Note [buckets that change]
DDP cuts its buckets anew after the first step, by the order in which gradients became ready. So nothing is kept by the
number of a bucket: what belongs together is named by the parameters in it, and what was left out of a parameter's
gradient follows the parameter into its next bucket.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from hybridpar.comm.buckets import Bucket
from hybridpar.comm.engine.codec import Codec, carry_over, make_codec
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.tracks import Track, Tracks
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.compose import Route

_PLAIN = Wire()
_Key = tuple[int, ...]


class DdpHookState:
    """The lanes over which one model's gradients travel, and what was left out of them. Made by ``ddp_hook``.

    Args:
        group: the ranks.
        plan: its wire, route and tracks; DDP itself cuts the buckets.
    """

    def __init__(self, group: Group, plan: Plan) -> None:
        self._group, self._plan = group, plan
        self._numbers: dict[Tensor, int] = {}
        self._tracks: Tracks | None = None
        self._ways: list[Track] = []
        self._way_of: dict[_Key, Track] = {}
        self._codecs: dict[_Key, Codec] = {}
        self._owners: dict[int, _Key] = {}
        self._lock = threading.Lock()
        self._failure: str | None = None

    def send(self, buffer: Tensor, parameters: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Collective: begin to replace ``buffer`` by its mean over the ranks, and return at once.

        Args:
            buffer: [numel of all parameters], their gradients one after the other.
            parameters: whose gradients they are.

        Returns:
            Completed with ``buffer``.
        """
        if self._tracks is None:
            self._tracks = Tracks(self._group, "hybridpar-ddp-hook")
            self._ways = self._tracks.arrange(self._plan, buffer.device)
        key = tuple(self._numbers.setdefault(parameter, len(self._numbers)) for parameter in parameters)
        way = self._way_of.setdefault(key, self._ways[len(self._way_of) % len(self._ways)])
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        # What a callback raises is an error for C++ too, where Future.set_exception's would pass for a value.
        outcome = future.then(torch.futures.Future.value)
        counts = tuple(parameter.numel() for parameter in parameters)
        way.submit(functools.partial(self._run, key, counts, buffer, way, future))
        return outcome

    def close(self) -> None:
        """Free the communicators. Collective where the library demands it."""
        if self._tracks is not None:
            self._tracks.close()

    def _run(
        self, key: _Key, counts: tuple[int, ...], buffer: Tensor, way: Track, future: torch.futures.Future[Any]
    ) -> None:
        """On the track's thread. A future must always be completed: DDP waits for it without a limit."""
        try:
            if self._failure is not None:
                raise RuntimeError(f"not sent, because an earlier bucket failed: {self._failure}")
            codec = self._codecs.get(key) or self._new_codec(key, counts, buffer, way)
            parts = buffer.split(counts)
            codec.pack(parts)
            codec.exchange(way.lane)
            codec.unpack(parts)
            codec.commit()
        except BaseException as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            assert self._tracks is not None
            self._tracks.abort(self._failure)
            future.set_exception(error)
        else:
            future.set_result(buffer)

    def _new_codec(self, key: _Key, counts: tuple[int, ...], buffer: Tensor, way: Track) -> Codec:
        """Note [buckets that change]."""
        bucket = Bucket(buffer.dtype, key, counts)
        codec = make_codec(bucket, self._plan.wire, way.lane, buffer.device, 1.0 / self._group.size)
        with self._lock:
            # Older ones first: where two know a parameter, the younger one had it last.
            former = {self._owners[number] for number in key if number in self._owners}
            carry_over([self._codecs[other] for other in self._codecs if other in former], [codec])
            self._codecs[key] = codec
            self._owners.update(dict.fromkeys(key, key))
            for other in set(self._codecs) - set(self._owners.values()):
                del self._codecs[other]
        return codec


def ddp_hook(
    group: Group,
    *,
    wire: Wire = _PLAIN,
    route: Route = "auto",
    tracks: int = 1,
    compress_exponents: bool = False,
) -> tuple[DdpHookState, Callable[[DdpHookState, Any], torch.futures.Future[Tensor]]]:
    """Both arguments of ``DistributedDataParallel.register_comm_hook``::

        model = DistributedDataParallel(network)
        model.register_comm_hook(*hybridpar.ddp_hook(hybridpar.init(), wire=hybridpar.Wire(torch.bfloat16)))

    Gradients become their mean over the ranks, as DDP has it, whatever backend its process group has. They travel while
    backward goes on. Each model needs a hook of its own.

    Args:
        group: the ranks of the model's process group.
        wire: format in which gradients travel.
        route: as for ``Plan``.
        tracks: so many buckets travel side by side, each on a communicator with a thread of its own.
        compress_exponents: as for ``Plan``.

    Raises:
        ValueError: no such route, too few or too many tracks, or a wire whose exponents cannot be compressed.
    """
    return DdpHookState(group, Plan(None, tracks, route, wire, compress_exponents)), _hook


def _hook(state: DdpHookState, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.send(bucket.buffer(), bucket.parameters())


# DDP compares these with the types themselves.
_hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}
