"""The engine for tensors that become ready in any order: keys of a store, calls by name, graphs that change.

Nothing is planned ahead. The ranks agree again and again on what all of them have submitted, and send that; see
Note [agreement without a coordinator] in ``hybridpar.comm.any_order.readiness``. Where the order is known, ``Engine``
needs no negotiation at all.

# Note [sums arrive at once]
A sum is written into the submitted tensor as soon as it has arrived, on the communication thread, and then its future
resolves there. So nothing else may read or write that memory meanwhile: a gradient that a running backward still uses
is for ``Engine``, which holds its sums back.

# Note [rounding]
What is agreed together travels together, and that depends on timing. Shared memory adds each element in rank order
whatever lies beside it, so sums have the same bits in every run. Where a library's order of addition depends on an
element's place in its buffer, sums of three ranks or more may differ in their last bits from run to run.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.agreement import check_same_settings, raise_together
from hybridpar.comm.any_order.outstanding import Outstanding
from hybridpar.comm.any_order.readiness import OPS, Terms
from hybridpar.comm.any_order.sender import FLOATS, INTEGERS, Sender
from hybridpar.comm.any_order.stalls import Asks, Inquiry, StallWatch
from hybridpar.comm.any_order.submission import Submission, Told, resolve
from hybridpar.comm.any_order.traffic import Registered, Traffic
from hybridpar.comm.buckets import check_same_tensors
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.lanes.lane import Op, describe
from hybridpar.comm.timeline.timeline import NoTimeline, Timeline

_PULSE_SECONDS = 1.0


class AnyOrderEngine:
    """Combines registered tensors over the ranks of a group, each as soon as every rank has submitted it.

    Collective: construct it on all ranks, with equal arguments.

    Args:
        group: the ranks.
        bucket_bytes: what is agreed together is merged into buckets of at most this; a larger tensor travels alone.
        stall_seconds: a warning says which ranks wait for which tensor, and for whom, when it has waited for so long.
        timeout: seconds that a submission may wait for the other ranks to submit the same. Time in which other tensors
            travel does not count. When it is over, everything outstanding fails. It may be longer than one collective
            of the group may wait: that bounds only how soon a rank that lives must show itself, which it does once a
            second from a thread of its own, whatever its other threads compute.
        watch: how to ask the other ranks what they wait for; None means the group's own.
        timeline: records what travels when.

    Raises:
        ValueError: the arguments differ between the ranks, or are out of range.
    """

    def __init__(
        self,
        group: Group,
        *,
        bucket_bytes: int = 4 << 20,
        stall_seconds: float = 10.0,
        timeout: float = DEFAULT_TIMEOUT,
        watch: Asks | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if bucket_bytes < 1 or not stall_seconds > 0 or not timeout > 0:
            raise ValueError(
                "AnyOrderEngine: expected bucket_bytes, stall_seconds and timeout above 0, got "
                f"{bucket_bytes}, {stall_seconds} and {timeout}"
            )
        check_same_settings(group, "AnyOrderEngine", {"bucket_bytes": bucket_bytes, "timeout": timeout})
        self._group, self._process = group, os.getpid()
        key = group.broadcast_json(f"any order {secrets.token_hex(8)}")
        control, data = group.new_lane(), group.new_lane()
        rank = control.ranks[control.rank]
        self._outstanding = Outstanding(rank, min(_PULSE_SECONDS, timeout / 4))
        inquiry = Inquiry(group.watch if watch is None else watch, key, control.ranks, rank)
        self._registered: list[Registered] = []
        # The threads hold all that they need but the engine, so that an abandoned engine is collected, and they end.
        sender = Sender(data, bucket_bytes, NoTimeline() if timeline is None else timeline)
        self._traffic = Traffic(self._outstanding, self._registered, inquiry, control, data, sender)
        inquiry.publish(_Status(self._outstanding))
        stalls = StallWatch(self._outstanding, inquiry, stall_seconds, timeout, self._traffic.give_up)
        self._traffic.start()
        if group.size > 1:
            threading.Thread(target=stalls.run, name="hybridpar-stalls", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._outstanding.drain)
        self._finalizer.atexit = False
        group.barrier()  # nobody asks for a status before all have published theirs

    def register(self, names: Sequence[str], tensors: Sequence[Tensor]) -> range:
        """Collective: say what may be submitted from now on. May be called again, while others are on their way.

        Args:
            names: for error messages and reports, one for each tensor.
            tensors: examples of what will be submitted: shapes, dtypes and devices count, values do not.

        Returns:
            The indices of these tensors: numbering continues where the last registration ended.

        Raises:
            CommunicationError: the ranks' names, shapes or dtypes differ (on every rank).
            ValueError: there is not one name for each tensor, or they are on several devices (on every rank).
            TypeError: a tensor has a dtype that cannot be sent (on every rank).
        """
        self._check_process("register")
        raise_together(self._group, self._refused(names, tensors))
        check_same_tensors(self._group, names, [t.shape for t in tensors], [t.dtype for t in tensors])
        # In this order: from the moment that the names are known, others may send the tensors past this rank.
        self._registered += [Registered(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return self._outstanding.register(names)

    def submit(
        self,
        index: int,
        tensor: Tensor,
        *,
        op: Op = "sum",
        scale: float = 1.0,
        priority: int = 0,
        patient: bool = False,
    ) -> Future[Tensor]:
        """Tensor ``index`` is ready. Returns at once; from any thread.

        The n-th submission of a tensor is combined with the n-th on every other rank, however far apart they are.
        The tensor is read some time later, and then overwritten: leave its memory alone until the future is done.
        See Note [sums arrive at once]. On CUDA it is read after what the current stream holds now, and every stream may
        use it when the future is done. Callbacks of the future run on the communication thread: they may submit, but
        must not wait for other futures.

        Args:
            tensor: of the shape, dtype and device that were registered; any strides.
            op: how the ranks' values are combined, the same on every rank.
            scale: factor applied to this rank's values first. Ranks may differ. Floating-point tensors only.
            priority: of the tensors that are agreed together the highest goes first, of equal ones the lowest index.
                Where the ranks' priorities differ, the highest counts.
            patient: it may wait for the other ranks for ever, unless one of them is lost or has closed its engine.

        Returns:
            A future of ``tensor``, with the result in place. It cannot be cancelled. It raises CommunicationError,
            naming tensor and rank, if a rank is lost or late, or if the ranks asked for different operations.

        Raises:
            ValueError: index, shape, dtype, device, op, scale or priority are not as described.
            CommunicationError: the engine has failed before.
            RuntimeError: the engine is closed.
        """
        return self.submit_many([index], [tensor], op=op, scale=scale, priority=priority, patient=patient)[0]

    def submit_many(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        op: Op = "sum",
        scale: float = 1.0,
        priority: int | Sequence[int] = 0,
        patient: bool = False,
    ) -> list[Future[Tensor]]:
        """``submit`` of several tensors on the same terms. Where all ranks do so, they are agreed together.

        Args:
            indices: one or more, none of them twice.
            tensors: one for each.
            priority: of all, or one for each.

        Returns:
            The future of each.

        Raises:
            As ``submit``, before anything is submitted.
        """
        futures: list[Future[Tensor]] = [Future() for _ in indices]
        for future in futures:
            future.set_running_or_notify_cancel()  # what other ranks count on cannot be cancelled
        self.send(indices, tensors, op=op, scale=scale, priority=priority, patient=patient, told=resolve, notes=futures)
        return futures

    def send(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        op: Op = "sum",
        scale: float = 1.0,
        priority: int | Sequence[int] = 0,
        patient: bool = False,
        told: Told | None = None,
        notes: Sequence[Any] = (),
    ) -> list[Submission]:
        """``submit_many``, without the cost of a future for each of many small tensors.

        Args:
            told: is told what has arrived, on the communication thread: it must not wait, nor raise.
            notes: for ``told``, one for each; None for each if empty.

        Returns:
            Each tensor on its way: ``done()`` and ``result()`` as of a future.
        """
        self._check_process("submit")
        priorities = [priority] * len(indices) if isinstance(priority, int) else priority
        for index, tensor, one in zip(indices, tensors, priorities, strict=True):
            self._check(index, tensor)
            self._check_terms(index, tensor, op, scale, one)
        terms = [_terms(op, one) for one in priorities]
        return self._outstanding.put_many(indices, tensors, terms, scale, patient=patient, told=told, notes=notes)

    def step_aside(self, went_along: Callable[[int], None] | None = None) -> Future[int]:
        """This rank has nothing more to submit, but the others may: it goes along until all ranks have called this.

        Whatever all the others submit is combined with values of this rank that change nothing: zeros in a sum, the
        lowest value in a maximum, the highest in a minimum. See Note [standing aside] in
        ``hybridpar.comm.any_order.readiness``. Returns at once.

        Args:
            went_along: called on the communication thread with the index of each tensor that has so been combined.

        Returns:
            A future of the rank that called last (of several at once, the highest), the same on all ranks. When it is
            done every rank takes part as before. It raises CommunicationError if a rank is lost.

        Raises:
            ValueError: this rank stands aside already.
            CommunicationError: the engine has failed before.
            RuntimeError: the engine is closed.
        """
        self._check_process("step_aside")
        if self._outstanding.aside is None:
            self._traffic.went_along = went_along
        return self._outstanding.step_aside()

    def wait_outstanding(self) -> None:
        """Return when all that was submitted on this rank so far has arrived, or failed."""
        self._outstanding.wait_for(self._outstanding.submissions())

    def wait_all(self) -> None:
        """Wait for everything that was submitted on this rank, by whichever thread.

        Raises:
            CommunicationError: a submission has failed, now or since the last call.
        """
        self._check_process("wait_all")
        if self._traffic.is_current_thread():
            raise RuntimeError("wait_all: expected a thread of your own, got the communication thread (a callback)")
        self.wait_outstanding()
        if (lost := self._outstanding.first_lost()) is not None:
            raise lost

    def close(self) -> None:
        """End the threads and free the communicators. What is still outstanding fails, here and on the other ranks."""
        self._check_process("close")
        self._finalizer.detach()
        self._traffic.stop()

    def _check_process(self, operation: str) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{operation} in a forked child: expected the process that made the engine; start workers with "
                "multiprocessing's spawn, or fork before hp.init()"
            )

    def _name(self, index: int) -> str:
        return self._outstanding.names[index]

    def _check(self, index: int, tensor: Tensor) -> None:
        if not 0 <= index < len(self._registered):
            raise ValueError(f"expected the index of one of {len(self._registered)} registered tensors, got {index}")
        known = self._registered[index]
        if tensor.shape != known.shape or tensor.dtype != known.dtype or tensor.device != known.device:
            registered = f"{describe(torch.empty(known.shape, dtype=known.dtype, device='meta'))} on {known.device}"
            got = f"{describe(tensor)} on {tensor.device}"
            raise ValueError(f"{self._name(index)}: expected {registered} as registered, got {got}")
        if not tensor.is_contiguous() and any(
            extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"{self._name(index)}: expected elements that each have their own memory, got strides "
                f"{tensor.stride()} for shape {tuple(tensor.shape)}; call .contiguous() on it first"
            )

    def _check_terms(self, index: int, tensor: Tensor, op: Op, scale: float, priority: int) -> None:
        if op not in OPS:
            raise ValueError(f"{self._name(index)}: expected op 'sum', 'max' or 'min', got {op!r}")
        if scale != 1 and (tensor.dtype not in FLOATS or not math.isfinite(scale)):
            raise ValueError(
                f"{self._name(index)}: expected a finite scale, and 1 for whole numbers, got {scale} for {tensor.dtype}"
            )
        if not -(1 << 63) <= priority < 1 << 63:
            raise ValueError(f"{self._name(index)}: expected a priority within 64 bits, got {priority}")

    def _refused(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Exception | None:
        """What is wrong on this rank."""
        if len(names) != len(tensors):
            return ValueError(f"expected one name for each tensor, got {len(names)} names for {len(tensors)} tensors")
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype not in FLOATS + INTEGERS:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS + INTEGERS)
                return TypeError(f"{name}: expected {known}, got {tensor.dtype}")
        devices = {tensor.device for tensor in tensors} | {known.device for known in self._registered[:1]}
        if len(devices) > 1:
            found = sorted(map(str, devices))
            return ValueError(f"expected tensors on one device, got {found}; use an engine for each")
        return None


@lru_cache(maxsize=4096)
def _terms(op: Op, priority: int) -> Terms:
    """The same few, again and again."""
    return Terms(op, priority)


class _Status:
    """What this rank waits for, for others to ask. Refers to no more than it must."""

    def __init__(self, outstanding: Outstanding) -> None:
        self._outstanding = weakref.ref(outstanding)

    def __call__(self) -> object:
        outstanding = self._outstanding()
        return {} if outstanding is None else outstanding.status()
