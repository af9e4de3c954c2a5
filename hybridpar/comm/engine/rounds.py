"""One bucket in the rounds of an engine: what was submitted into it, its way over a track, and when what happened.

# Note [who packs]
A track packs while the caller's backward goes on. But each tensor takes a moment of the interpreter's lock, and so does
each of the caller's hooks: where tensors are many and so small that little of packing is copying, the two only get in
each other's way, and the caller packs before it hands the bucket over. On CUDA packing is one launch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.engine import held_back
from hybridpar.comm.engine.codec import Codec, Count
from hybridpar.comm.engine.tracks import Track
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.lane import describe
from hybridpar.comm.timeline.timeline import Timeline
from hybridpar.comm.timeline.trace import COMPUTATION
from hybridpar.kernels import _native
from hybridpar.kernels.tensor_reader import Expected

# Tensors in a bucket that the caller packs, at least, and bytes of each on average, at most: copying as many takes ten
# times as long as the lock is needed.
_MANY, _SMALL = 64, 16 << 10


@dataclass
class Times:
    """When a bucket was complete and given to its track, and when that began to pack, began to send and was done.

    Readings of time.perf_counter; on CUDA of the thread that hands the work to the device. ``waited`` is for how many
    seconds the caller stood still for it.
    """

    ready: float = 0.0
    begun: float = 0.0
    packed: float = 0.0
    sent: float = 0.0
    waited: float = 0.0


class BucketRound:
    """A bucket. ``submit`` and ``send`` once a round, then ``wait``, ``deliver`` and ``reset``.

    Args:
        number: in the order in which buckets are sent.
        codec: how it travels.
        examples: of its tensors: shapes count.
        names: of its tensors.
        arrivals: where its tensors are noted when they are announced.
    """

    def __init__(
        self,
        number: int,
        codec: Codec,
        track: Track,
        examples: Sequence[Tensor],
        names: Sequence[str],
        device: torch.device,
        arrivals: _native.Arrivals,
        timeline: Timeline,
    ) -> None:
        self.number, self.codec, self.track = number, codec, track
        self.members = codec.bucket.members
        self.shapes = {index: example.shape for index, example in zip(self.members, examples, strict=True)}
        self.names = dict(zip(self.members, names, strict=True))
        self.dtype, self._device = codec.bucket.dtype, device
        self._expected = Expected(list(self.shapes.values()), self.dtype, device)
        self._device_number = torch.empty(0, device=device).get_device()
        self.times = Times()
        self._timeline, self._arrivals = timeline, arrivals
        small = codec.bucket.numel * self.dtype.itemsize <= _SMALL * len(self.members)
        many = len(self.members) >= _MANY
        self._caller_packs = many and small and device.type == "cpu" and codec.residual is None
        self.crossing = track.side.crossing()
        self.reset()

    def reset(self) -> None:
        """A new round."""
        self.crossing.reset()
        held_back.take(self)
        self._arrivals.clear(self.number)
        self.tensors: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        # In bucket order.
        self._given: list[Tensor | None] = []
        self.closed = False
        self.own_nonfinite: Count = 0
        self.sum_nonfinite: Count = 0
        self.own_bad: set[int] = set()
        self._future: Future[Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether there is anything of the present round."""
        return bool(self.tensors) or self.closed or self._arrivals.count(self.number) > 0

    @property
    def complete(self) -> bool:
        return self.closed or len(self.tensors) == len(self.members)

    def announce(self, index: int) -> bool:
        """A tensor will be among those of ``take``. Whether all are, now. Raises as ``give``."""
        if index in self._arrivals or self.closed:
            self._check_open([index])
        if self._device_number >= 0:
            self.crossing.submitted()
        return self._arrivals.add(index)

    def give(self, index: int, tensor: Tensor) -> None:
        """One tensor. Raises ValueError where it is not as registered, RuntimeError where there is one already."""
        self._check(index, tensor)
        self._check_open([index])
        self.tensors[index] = tensor
        if self._device_number >= 0:
            self.crossing.submitted()

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """All tensors of the bucket at once; None where there is none. Raises as ``give``."""
        self._check_open(self.tensors)
        fit = self._expected.fit(tensors)
        for index, tensor in () if fit else zip(self.members, tensors, strict=True):
            if tensor is not None:
                self._check(index, tensor)
            elif index in self._arrivals:
                raise RuntimeError(
                    f"{self.names[index]}: expected the tensor that was announced, got None; hooks must leave "
                    "gradients in place until backward is over"
                )
        given = zip(self.members, tensors, strict=True)
        self.tensors = dict(given) if fit else {index: tensor for index, tensor in given if tensor is not None}  # type: ignore[arg-type]
        if self._device_number >= 0:
            self.crossing.submitted()  # for those that were not announced

    def send(self, hold: bool) -> None:
        """Give it to the track, and return at once. See Note [who packs].

        Args:
            hold: do so only if another bucket is sent before ``exchange_held``. See Note [held back].
        """
        if self._caller_packs:
            with torch.no_grad(), self._timeline.span("pack", row=COMPUTATION, bucket=self.number):
                self._pack()
        self.times = Times(ready=time.perf_counter())
        self.crossing.complete()
        if hold:
            self.track.check_open()
            self._future = Future()  # before others may hand it over
            held_back.hold(self)
        else:
            held_back.let_go()
            self._future = self.track.submit(self._travel)

    def hand_over(self) -> None:
        """To the track's thread, what was held back. What goes wrong is raised by ``wait``."""
        future = self._future
        if future is None:
            return  # a failed round was reset meanwhile
        try:
            self.track.submit_for(future, self._travel)
        except RuntimeError as error:
            future.set_exception(error)

    @property
    def exchanged(self) -> bool:
        """Whether it has been sent, and nothing works on it any longer."""
        return self._future is not None and self._future.done()

    def exchange_held(self) -> None:
        """Here and now, if it was held back. What goes wrong is raised by ``wait``."""
        if not held_back.take(self):
            return
        future = self._future
        assert future is not None
        started = time.perf_counter()
        with torch.no_grad(), self._timeline.span("wait", row=COMPUTATION, bucket=self.number):
            try:
                self._travel()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
        self.times.waited = time.perf_counter() - started

    def wait(self) -> None:
        """Until the sums are there. Raises what went wrong on the way."""
        self.exchange_held()
        held_back.let_go()
        assert self._future is not None
        if not self._future.done():
            started = time.perf_counter()
            with self._timeline.span("wait", row=COMPUTATION, bucket=self.number):
                self._future.exception()
            self.times.waited = time.perf_counter() - started
        self._future.result()

    def settle(self) -> None:
        """After a failure: until no thread works on it any more, whatever became of it."""
        if held_back.take(self):
            self._future = None
        if self._future is not None:
            self._future.exception()

    def deliver(self, check_finite: bool) -> None:
        """On the caller's thread: write the sums into what was submitted. See Note [sums wait for flush].

        Args:
            check_finite: note which of this rank's own tensors are not finite, while they hold what was submitted.
        """
        targets = self._given
        if self.received:
            targets = [
                self.received.get(index, tensor) for index, tensor in zip(self.members, self._given, strict=True)
            ]
        with self._timeline.span("unpack", row=COMPUTATION, bucket=self.number), self.crossing.delivering():
            if check_finite and int(self.own_nonfinite):
                self.own_bad = {index for index, tensor in self.tensors.items() if not bool(tensor.isfinite().all())}
            self.sum_nonfinite = self.codec.unpack(targets)
            for tensor in self.received.values():
                self.crossing.adopt(tensor)

    def nonfinite_sums(self) -> list[tuple[int, int]]:
        """(index, number of values) of each tensor whose sum is not finite, in bucket order."""
        present = {index for index, tensor in zip(self.members, self.codec.present(), strict=True) if tensor}
        found = []
        for index, begin, end in self.codec.spans():
            count = int(self.codec.sums[begin:end].isfinite().logical_not_().sum())
            if count and index in present:
                found.append((index, count))
        return found

    def _check(self, index: int, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{self.names[index]}: expected dense gradients, got one of {tensor.layout}; use sparse=False in the "
                "module that makes it"
            )
        if (
            tensor.shape != self.shapes[index]
            or tensor.dtype is not self.dtype
            or tensor.get_device() != self._device_number
        ):
            registered = f"{str(self.dtype).removeprefix('torch.')}{list(self.shapes[index])} on {self._device}"
            raise ValueError(
                f"{self.names[index]}: expected {registered} as registered, got {describe(tensor)} on {tensor.device}"
            )

    def _check_open(self, indices: Iterable[int]) -> None:
        """For tensors that are to come."""
        for index in indices:
            if index in self.tensors or index in self._arrivals:
                raise RuntimeError(
                    f"{self.names[index]} was submitted twice in one round: expected one backward pass for each "
                    "flush; use no_sync() for all backward passes but the last, and use_reentrant=False in "
                    "torch.utils.checkpoint"
                )
        if self.closed:
            name = self.names[next(iter(indices), self.members[0])]
            raise RuntimeError(f"{name} was submitted into a closed round: expected every bucket to be delivered first")

    def _travel(self) -> None:
        """On the track's thread, or on the caller's: see Note [held back]."""
        with self.crossing.sending():
            self._pack_and_exchange()
            if len(self.tensors) < len(self.members):
                for index, present in zip(self.members, self.codec.present(), strict=True):
                    if present and index not in self.tensors:
                        self.received[index] = torch.empty(self.shapes[index], dtype=self.dtype, device=self._device)

    def _pack(self) -> None:
        self._given = list(map(self.tensors.get, self.members))
        self.own_nonfinite = self.codec.pack(self._given)

    def _pack_and_exchange(self) -> None:
        times, track, nbytes = self.times, self.track, self.codec.nbytes
        times.begun = time.perf_counter()
        if not self._caller_packs:
            waited = round(1e6 * (times.begun - times.ready))
            with self._timeline.span("pack", row=track.row, bucket=self.number, waited_us=waited):
                self._pack()
        times.packed = time.perf_counter()
        with self._timeline.span("send", row=track.row, bucket=self.number, bytes=nbytes):
            try:
                self.codec.exchange(track.lane)
            except CommunicationError as error:
                text = f"the gradients of {self.names[self.members[0]]} .. {self.names[self.members[-1]]}"
                raise CommunicationError(
                    error.reason, rank=error.rank, operation=error.operation, tensor=text
                ) from error
        times.sent = time.perf_counter()
