"""The gradient engine: tensors become ready, are packed into buckets, are summed over the ranks, are unpacked.

# Note [fixed plan]
Buckets leave in plan order on every rank, whatever order tensors become ready in: a bucket waits until all earlier
ones are complete. So all ranks issue the same collectives in the same order and nothing has to be negotiated. A
tensor that never becomes ready (an unused parameter) only delays what follows it until ``flush``.

# Note [presence flags]
Behind its tensors a bucket carries one number for each of them: 1 where this rank had a gradient, 0 where it had
none and sends zeros. After the sum a positive number means that some rank had one. So ranks learn of gradients that
only others have without a message of their own, and a tensor that no rank used stays without a gradient.

# Note [sums wait for flush]
A gradient that autograd has put into .grad may share its memory with one that is still flowing backward (a view of a
parameter is enough). The communication thread may read it, but a sum written there during backward would be used
again further down. So sums stay in their buckets until backward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from hybridpar.comm.agreement import check_same_settings
from hybridpar.comm.buckets import Bucket, check_same_tensors, plan_buckets
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group
from hybridpar.comm.lanes import Lane, describe
from hybridpar.comm.worker import Worker
from hybridpar.kernels import pack, unpack

DEFAULT_BUCKET_BYTES = 4 << 20
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Engine:
    """Sums registered tensors over the ranks of a group, on a thread of its own, while the caller computes.

    Once ``register`` has been called, each round is any number of ``submit`` and one ``flush``, on every rank.

    Args:
        group: the ranks.
        bucket_bytes: upper limit of a bucket (a larger tensor travels alone).
        scale: factor applied to every tensor before it is summed.
    """

    def __init__(self, group: Group, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, scale: float = 1.0) -> None:
        self._group, self._bucket_bytes, self._scale = group, bucket_bytes, scale
        self._lane = group.new_lane()
        self._worker = Worker("hybridpar-engine")
        self._names: list[str] = []
        self._rounds: list[_BucketRound] = []
        self._home: dict[int, int] = {}
        self._next = 0

    def register(self, names: Sequence[str], tensors: Sequence[Tensor], order: Sequence[int] | None = None) -> None:
        """Collective: say what will be sent.

        Args:
            names: for error messages, one for each tensor.
            tensors: examples of what will be submitted: shapes, dtypes and devices count, values do not.
            order: indices in the order in which they are expected to be ready; None means as given.

        Raises:
            CommunicationError: the ranks' names, shapes, dtypes or orders differ (on every rank).
            ValueError: the ranks' bucket_bytes or scale differ (on every rank); or the tensors are on several devices.
            TypeError: a tensor is not float32, float64, bfloat16 or float16.
        """
        order = range(len(tensors)) if order is None else order
        dtypes = [tensor.dtype for tensor in tensors]
        check_same_tensors(
            self._group, [names[i] for i in order], [tensors[i].shape for i in order], [dtypes[i] for i in order]
        )
        check_same_settings(self._group, "Engine", {"bucket_bytes": self._bucket_bytes, "scale": self._scale})
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {tensor.dtype}")
        if len(devices := {tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"expected tensors on one device, got {sorted(map(str, devices))}; use an engine for each")
        plan = plan_buckets([tensor.numel() for tensor in tensors], dtypes, order, self._bucket_bytes)
        self._names = list(names)
        self._rounds = [_BucketRound(bucket, [tensors[i] for i in bucket.members], self._lane) for bucket in plan]
        self._home = {index: home for home, bucket in enumerate(plan) for index in bucket.members}
        self._next = 0

    def submit(self, index: int, tensor: Tensor) -> None:
        """Tensor ``index`` is ready; it will hold the sum after ``flush``. Returns at once; call once a round.

        Raises:
            RuntimeError: the tensor was already submitted in this round.
            ValueError: the tensor has not the shape, dtype and device that were registered.
        """
        current = self._rounds[self._home[index]]
        shape = current.shapes[index]
        if tensor.shape != shape or tensor.dtype != current.buffer.dtype or tensor.device != current.buffer.device:
            registered = f"{str(current.buffer.dtype).removeprefix('torch.')}{list(shape)} on {current.buffer.device}"
            raise ValueError(
                f"{self._names[index]}: expected {registered} as registered, got {describe(tensor)} on {tensor.device}"
            )
        if index in current.tensors:
            raise RuntimeError(
                f"{self._names[index]} was submitted twice in one round: expected one backward pass for each flush; "
                "use no_sync() for all backward passes but the last, and use_reentrant=False in torch.utils.checkpoint"
            )
        current.tensors[index] = tensor
        self._send_complete()

    def submitted(self, index: int) -> bool:
        """Whether tensor ``index`` was submitted in this round."""
        return index in self._rounds[self._home[index]].tensors

    def flush(self) -> dict[int, Tensor]:
        """End the round: tensors not submitted count as zero. Waits for all sums.

        Returns:
            New tensors, by index, for those that this rank did not submit but another rank did.

        Raises:
            CommunicationError: a rank did not take part, or left; names the tensors of the bucket. The ranks are out
                of step then: nothing more can be sent with this engine.
        """
        for current in self._rounds:
            current.closed = True
        self._send_complete()
        try:
            for current in self._rounds:
                assert current.future is not None
                current.future.result()
                current.deliver()
            return {index: tensor for current in self._rounds for index, tensor in current.received.items()}
        finally:
            for current in self._rounds:
                current.reset()
            self._next = 0

    def close(self) -> None:
        """Free the thread and the communicator. Collective where the library demands it."""
        self._worker.close()
        self._lane.close()

    def _send_complete(self) -> None:
        """Note [fixed plan]: hand every bucket that is next and complete to the communication thread."""
        while self._next < len(self._rounds) and self._rounds[self._next].complete:
            current = self._rounds[self._next]
            current.future = self._worker.submit(current.reduce, self._lane, self._scale, self._names)
            self._next += 1


class _BucketRound:
    """One bucket: its buffer, and what has been submitted into it in the present round."""

    def __init__(self, bucket: Bucket, examples: Sequence[Tensor], lane: Lane) -> None:
        self.bucket = bucket
        self.shapes = {index: example.shape for index, example in zip(bucket.members, examples, strict=True)}
        # Note [presence flags]. In the lane's own memory packing is all the copying there is.
        self.buffer = lane.allocate(bucket.numel + len(bucket.members), bucket.dtype, examples[0].device)
        self.tensors: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        self.closed = False
        self.future: Future[None] | None = None

    @property
    def complete(self) -> bool:
        return self.closed or len(self.tensors) == len(self.bucket.members)

    def reset(self) -> None:
        self.tensors, self.received = {}, {}
        self.closed, self.future = False, None

    def reduce(self, lane: Lane, scale: float, names: Sequence[str]) -> None:
        """On the communication thread."""
        members, counts = self.bucket.members, self.bucket.counts
        values, flags = self.buffer[: self.bucket.numel], self.buffer[self.bucket.numel :]
        mine: list[Tensor | None] = [self.tensors.get(index) for index in members]
        pack(mine, counts, values, scale)
        flags.copy_(torch.tensor([float(tensor is not None) for tensor in mine]))
        try:
            lane.all_reduce(self.buffer, "sum")
        except CommunicationError as error:
            text = f"the gradients of {names[members[0]]} .. {names[members[-1]]}"
            raise CommunicationError(error.reason, rank=lane.rank, operation="all_reduce", tensor=text) from error
        if len(self.tensors) < len(members):
            for index, present in zip(members, flags.tolist(), strict=True):
                if present > 0 and index not in self.tensors:
                    self.received[index] = self.buffer.new_empty(self.shapes[index])

    def deliver(self) -> None:
        """Note [sums wait for flush]: on the caller's thread, write the sums into what was submitted."""
        members, counts = self.bucket.members, self.bucket.counts
        targets = [self.tensors.get(index, self.received.get(index)) for index in members]
        unpack(self.buffer[: self.bucket.numel], counts, targets)
