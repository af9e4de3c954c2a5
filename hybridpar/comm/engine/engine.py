"""The gradient engine: tensors become ready, are packed into buckets, are summed over the ranks, are unpacked.

# Note [fixed plan]
Buckets leave in one order on every rank, whatever order tensors become ready in: a bucket waits until all earlier
ones are complete, and the n-th takes track n modulo their number. So on each of them all ranks issue the same
collectives in the same order and nothing has to be negotiated. A tensor that never becomes ready (an unused parameter)
only delays what follows it until the round is closed.

# Note [sums wait for flush]
A gradient that autograd has put into .grad may share its memory with one that is still flowing backward (a view of a
parameter is enough). The communication thread may read it, but a sum written there during backward would be used
again further down. So sums stay in their buckets until backward is over.

# Note [not finite]
Unpacking counts values that are not finite, and all ranks see the same sums, so all of them know alike, without a
message, that a round is bad. Only then do they ask each other who had such values, of which each has made a note when
its own tensors were packed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.agreement import check_same_settings
from hybridpar.comm.buckets import Bucket, check_same_tensors, plan_buckets
from hybridpar.comm.engine import held_back
from hybridpar.comm.engine.codec import Codec, carry_over, make_codec
from hybridpar.comm.engine.plan import DEFAULT_PLAN, Plan
from hybridpar.comm.engine.round_report import report_of
from hybridpar.comm.engine.rounds import BucketRound
from hybridpar.comm.engine.tracks import Tracks
from hybridpar.comm.errors import NonFiniteError
from hybridpar.comm.group import Group
from hybridpar.comm.timeline.timeline import NoTimeline, Timeline
from hybridpar.kernels import _native

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Seconds between the last bucket's being complete and flush, at most, for it to be worth holding back.
_AT_ONCE = 1e-3


class Engine:
    """Sums registered tensors over the ranks of a group, on threads of its own, while the caller computes.

    Once ``register`` has been called, each round is any number of ``submit`` and one ``flush``, on every rank; or
    ``close_round`` and a ``deliver`` of every bucket, with whatever the caller does in between. The same tensors give
    the same bits in every round.

    Collective.

    Args:
        group: the ranks.
        plan: how tensors travel.
        scale: factor applied to every tensor before it is summed.
        timeline: records what happens when.
        check_finite: ``flush`` raises, on every rank, if a sum is not finite.

    Attributes:
        plan: the present one.
        arrivals: which tensors have been announced in the present round.

    Raises:
        ValueError: the ranks' arguments differ (on every rank).
    """

    def __init__(
        self,
        group: Group,
        *,
        plan: Plan = DEFAULT_PLAN,
        scale: float = 1.0,
        timeline: Timeline | None = None,
        check_finite: bool = False,
    ) -> None:
        check_same_settings(group, "Engine", {**plan.to_json(), "scale": scale, "check_finite": check_finite})
        self.plan = plan.resolved(len(group.hosts))
        self.check_finite = check_finite
        self._group, self._scale = group, scale
        self._timeline = NoTimeline() if timeline is None else timeline
        self._tracks = Tracks(group, "hybridpar-engine")
        self.arrivals = _native.Arrivals()
        self._names: list[str] = []
        self._examples: list[Tensor] = []
        self._order: list[int] = []
        self._rounds: list[BucketRound] = []
        self._home: list[BucketRound] = []  # of each tensor
        # The next bucket to send; how many are undelivered in a closed round; rounds so far.
        self._next, self._outstanding, self._count = 0, 0, 0
        # Whether flush was called as soon as the last bucket was complete, in the round before.
        self._came_at_once = False
        self._failure: str | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are sent."""
        return tuple(current.codec.bucket for current in self._rounds)

    @property
    def failed(self) -> bool:
        """Whether a round failed, so that the ranks are out of step."""
        return self._failure is not None

    def register(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        order: Sequence[int] | None = None,
        launch_order: Sequence[int] | None = None,
    ) -> None:
        """Collective: say what will be sent.

        Args:
            names: for error messages, one for each tensor.
            tensors: examples of what will be submitted: shapes, dtypes and devices count, values do not.
            order: indices in the order in which they are expected to be ready; None means as given.
            launch_order: see ``replan``.

        Raises:
            CommunicationError: the ranks' names, shapes, dtypes or orders differ (on every rank).
            ValueError: the tensors are on several devices; see also ``replan``.
            TypeError: a tensor is not float32, float64, bfloat16 or float16.
        """
        order = range(len(tensors)) if order is None else order
        dtypes = [tensor.dtype for tensor in tensors]
        check_same_tensors(
            self._group, [names[i] for i in order], [tensors[i].shape for i in order], [dtypes[i] for i in order]
        )
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {tensor.dtype}")
        if len(devices := {tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"expected tensors on one device, got {sorted(map(str, devices))}; use an engine for each")
        self._names, self._order = list(names), list(order)
        self._examples = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._on_host = self._device.type == "cpu"
        self._rounds = []
        self.replan(self.plan, launch_order)

    def replan(self, plan: Plan, launch_order: Sequence[int] | None = None) -> None:
        """Collective, between rounds: from now on send by another plan.

        Communicators of the same route are used again. What error feedback has kept of a tensor goes on with it; it is
        lost where the tensor now travels whole.

        Args:
            plan: how tensors travel.
            launch_order: numbers of the new buckets in the order in which to send them, the same on all ranks; None
                means as they become ready, which is how they are numbered.

        Raises:
            ValueError: the ranks' arguments differ (on every rank), or launch_order does not name each bucket once.
            RuntimeError: a round has begun.
        """
        if any(current.begun for current in self._rounds):
            raise RuntimeError("replan: expected to be called between rounds, got tensors that wait for flush()")
        launch = None if launch_order is None else list(launch_order)
        plan = plan.resolved(len(self._group.hosts))
        check_same_settings(self._group, "Engine.replan", {**plan.to_json(), "launch_order": launch})
        counts, dtypes = [tensor.numel() for tensor in self._examples], [tensor.dtype for tensor in self._examples]
        assert plan.bucket_bytes is not None
        buckets = plan_buckets(counts, dtypes, self._order, plan.bucket_bytes)
        launch = list(range(len(buckets))) if launch is None else launch
        if sorted(launch) != list(range(len(buckets))):
            raise ValueError(f"launch_order: expected each of {len(buckets)} buckets once, got {launch[:20]}")
        old: list[Codec] = [current.codec for current in self._rounds if current.codec.residual is not None]
        self._rounds, self._home, self.plan = [], [], plan
        if not buckets:
            return
        tracks = self._tracks.arrange(plan, self._device)
        launched = [buckets[place] for place in launch]
        home = {index: number for number, bucket in enumerate(launched) for index in bucket.members}
        self.arrivals.arrange([home[index] for index in range(len(home))])
        for number, bucket in enumerate(launched):
            track = tracks[number % len(tracks)]
            codec = make_codec(bucket, plan.wire, track.lane, self._device, self._scale)
            examples = [self._examples[index] for index in bucket.members]
            names = [self._names[index] for index in bucket.members]
            self._rounds.append(
                BucketRound(number, codec, track, examples, names, self._device, self.arrivals, self._timeline)
            )
        self._home = [self._rounds[home[index]] for index in range(len(home))]
        carry_over(old, [current.codec for current in self._rounds])
        self._next = 0

    def submit(self, index: int, tensor: Tensor) -> None:
        """Tensor ``index`` is ready; it will hold the sum after ``flush``. Returns at once; call once a round.

        On CUDA it is ready on the current stream.

        Raises:
            RuntimeError: the tensor was already submitted in this round, or the round is closed.
            ValueError: the tensor has not the shape, dtype and device that were registered.
        """
        current = self._home[index]
        current.give(index, tensor)
        if len(current.tensors) == len(current.members):
            self._send_complete()

    def announce(self, index: int) -> int | None:
        """Tensor ``index`` will be among those of a ``submit_bucket`` in this round. Cheaper than ``submit`` for each.

        On CUDA it will be ready on the current stream.

        Returns:
            The number of its bucket, once the whole bucket has been announced: submit it as soon as it is ready.

        Raises:
            RuntimeError: as ``submit``.
        """
        current = self._home[index]
        return current.number if current.announce(index) else None

    def announced(self, index: int) -> bool:
        """Whether tensor ``index`` was announced in this round."""
        return index in self.arrivals

    def submit_bucket(self, number: int, tensors: Sequence[Tensor | None]) -> None:
        """The tensors of bucket ``number`` of ``buckets`` are ready, in its order; None: not in this round.

        Raises:
            RuntimeError: the bucket has tensors already, the round is closed, or one that was announced is None.
            ValueError: as ``submit``.
        """
        self._rounds[number].take(tensors)
        self._send_complete()

    def members(self, number: int) -> tuple[int, ...]:
        """Indices of the tensors of bucket ``number`` of ``buckets``."""
        return self._rounds[number].members

    def open_buckets(self) -> list[int]:
        """Numbers of the buckets of which nothing has been submitted in this round."""
        return [current.number for current in self._rounds if not current.tensors]

    def submitted(self, index: int) -> bool:
        """Whether tensor ``index`` was submitted in this round."""
        return index in self._home[index].tensors

    def missing(self) -> list[int]:
        """Indices of the tensors that have not been submitted in this round."""
        return [
            index
            for current in self._rounds
            if len(current.tensors) < len(current.members)
            for index in current.members
            if index not in current.tensors
        ]

    def flush(self) -> dict[int, Tensor]:
        """End the round: tensors not submitted count as zero. Waits for all sums.

        Returns:
            New tensors, by index, for those that this rank did not submit but another rank did.

        Raises:
            CommunicationError: a rank did not take part, or left; names the tensors of the bucket. The ranks are out
                of step then: nothing more can be sent with this engine.
            NonFiniteError: with ``check_finite``, on every rank: a sum is not finite. Names the first such tensor and
                the ranks whose values are not finite. All tensors hold their sums; the next round is not affected.
        """
        last = self._rounds[-1] if self._rounds else None
        self._came_at_once = self._next < len(self._rounds) or (
            last is not None and time.perf_counter() - last.times.ready < _AT_ONCE
        )
        self._close()
        received: dict[int, Tensor] = {}
        try:
            if last is not None:
                last.exchange_held()
            for current in self._rounds:
                self._arrive(current)
                received |= current.received
            bad = [current for current in self._rounds if self.check_finite and int(current.sum_nonfinite)]
            if bad:
                raise self._nonfinite(bad)
            for current in self._rounds:
                current.codec.commit()
        finally:
            self._end_round()
        return received

    def close_round(self) -> None:
        """End the round, without waiting: tensors not submitted count as zero. ``deliver`` every bucket after it."""
        self._came_at_once = False
        held_back.let_go()
        self._close()

    def deliver(self, number: int) -> dict[int, Tensor]:
        """Wait for bucket ``number`` of ``buckets`` and write its sums; after ``close_round``, once for each.

        Sums are not checked for finite values.

        Returns, raises: as ``flush``.
        """
        current = self._rounds[number]
        try:
            self._arrive(current)
        except BaseException:
            self._end_round()
            raise
        current.codec.commit()
        received = current.received
        current.reset()
        self._outstanding -= 1
        if not self._outstanding:
            self._end_round()
        return received

    def report(self) -> dict[str, Any]:
        """What the plan is, and how the last round went; as JSON can carry it. See ``round_report.report_of``."""
        return report_of(self.plan, self._rounds, self._count)

    def close(self) -> None:
        """Free the threads and the communicators. Collective where the library demands it."""
        for current in self._rounds:
            held_back.take(current)
        self._tracks.close()

    def _end_round(self) -> None:
        for current in self._rounds:
            current.reset()
        self._next = self._outstanding = 0
        self._count += 1

    def _close(self) -> None:
        for current in self._rounds:
            current.closed = True
        self._outstanding = len(self._rounds)
        try:
            self._send_complete()
        except BaseException:
            self._end_round()
            raise

    def _send_complete(self) -> None:
        """Note [fixed plan]: hand every bucket that is next and complete to its track."""
        while self._next < len(self._rounds) and self._rounds[self._next].complete:
            if self._failure is not None:
                raise RuntimeError(f"not sent, because an earlier operation of this engine failed: {self._failure}")
            try:
                self._rounds[self._next].send(self._may_hold())
            except BaseException as error:
                self._fail(error)
                raise
            self._next += 1

    def _may_hold(self) -> bool:
        """See Note [held back]."""
        *others, _ = self._rounds
        is_last = self._next == len(others)
        return self._came_at_once and is_last and self._on_host and all(each.exchanged for each in others)

    def _arrive(self, current: BucketRound) -> None:
        """Wait for a bucket and write its sums. If it failed, no other thread works on any when this returns."""
        try:
            current.wait()
            current.deliver(self.check_finite)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """The ranks are out of step. No other thread works on a bucket when this returns."""
        self._failure = f"{type(error).__name__}: {error}"
        self._tracks.abort(self._failure)
        for current in self._rounds:
            current.settle()

    def _nonfinite(self, bad: Sequence[BucketRound]) -> NonFiniteError:
        """Collective. See Note [not finite]."""
        found = [index_count for current in bad for index_count in current.nonfinite_sums()]
        index, count = found[0]
        current = self._home[index]
        mine = [index in current.own_bad, index in current.tensors]
        everyone = self._group.all_gather_json(mine)
        ranks = tuple(rank for rank, (is_bad, _) in enumerate(everyone) if is_bad)
        total = current.shapes[index].numel()
        others = f"; {len(found) - 1} more tensors are not finite" if len(found) > 1 else ""
        detail = f"{count} of {total} values{others}"
        if not ranks:
            ranks = tuple(rank for rank, (_, has_one) in enumerate(everyone) if has_one)
            travels = str(current.codec.sums.dtype).removeprefix("torch.")
            detail = f"{detail}; every rank's own are finite, but their sum overflows in {travels}"
        return NonFiniteError(self._names[index], ranks, detail)
