"""A lane: one ordered communicator of an existing library. The whole contract is the class ``Lane``.

Every rank of a lane must call the same operations in the same order. Tensors are contiguous. Calls block until the
result may be used (on CUDA: until it is ordered on the current stream). What goes wrong raises
``CommunicationError`` within the time-out; nothing is retried.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.errors import CommunicationError

Op = Literal["sum", "max", "min"]


class Lane(ABC):
    """One ordered communicator between ``size`` ranks, seen from ``rank``."""

    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, object]) -> Lane:
        """Itself: a copied module works with the same ranks."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Replace ``tensor`` (any shape) by its elementwise sum, maximum or minimum over the ranks."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill ``outputs[r]`` with the tensor of rank r. Sizes may differ between ranks and may be zero."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """Fill ``output`` with the sum over the ranks of their ``inputs[rank]``. Sizes as for ``all_gather``."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with that of rank ``root``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def clone(self) -> Lane:
        """A further, independent communicator of the same ranks. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free what the lane holds. It may not be used again."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Collective: uninitialised memory [numel] on which this lane's ``all_reduce`` is as fast as it can be."""
        return torch.empty(numel, dtype=dtype, device=device)


class AloneLane(Lane):
    """The lane of a group of one: every collective is the identity."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        pass

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        outputs[0].copy_(tensor)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        output.copy_(inputs[0])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        pass

    def barrier(self) -> None:
        pass

    def clone(self) -> Lane:
        return AloneLane()

    def close(self) -> None:
        pass


class ThreadHub:
    """What the threads of one ``ThreadLane`` share: a slot a rank, and a barrier."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.barrier = threading.Barrier(size)
        self.slots: list[object] = [None] * size
        self._children: list[ThreadHub] = []
        self._lock = threading.Lock()
        self._aborted = False

    def child(self, index: int) -> ThreadHub:
        """The hub of the ``index``-th clone, made by whichever rank asks first."""
        with self._lock:
            while len(self._children) <= index:
                self._children.append(ThreadHub(self.size, self.timeout))
                if self._aborted:
                    self._children[-1].abort()
            return self._children[index]

    def abort(self) -> None:
        """Make every present and later wait of every rank fail at once: one of them has died."""
        with self._lock:
            self._aborted = True
            children = list(self._children)
        self.barrier.abort()
        for child in children:
            child.abort()


_COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class ThreadLane(Lane):
    """Ranks are threads of one process (CPU tensors). Sums are taken in rank order, so they are reproducible."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.rank, self.size = rank, hub.size
        self._hub = hub
        self._clones = 0

    @contextmanager
    def _shared(self, value: object, operation: str, tensor: str) -> Iterator[list[object]]:
        """Show ``value`` to the other ranks for as long as the block lasts."""
        self._hub.slots[self.rank] = value
        self._wait(operation, tensor)
        try:
            yield self._hub.slots
        except BaseException:
            self._hub.abort()  # the others must not wait for a rank that cannot go on
            raise
        self._wait(operation, tensor)

    def _wait(self, operation: str, tensor: str) -> None:
        try:
            self._hub.barrier.wait(self._hub.timeout)
        except threading.BrokenBarrierError:
            reason = f"another rank left, or did not come within {self._hub.timeout:g} s"
            raise CommunicationError(reason, rank=self.rank, operation=operation, tensor=tensor) from None

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        combine = _COMBINE[op]
        with self._shared(tensor, "all_reduce", describe(tensor)) as slots:
            values = _tensors(slots)
            result = values[0].clone()
            for other in values[1:]:
                combine(result, other, out=result)
        tensor.copy_(result)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        with self._shared(tensor, "all_gather", describe(tensor)) as slots:
            for output, value in zip(outputs, _tensors(slots), strict=True):
                output.copy_(value)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        with self._shared(tuple(inputs), "reduce_scatter", describe(output)) as slots:
            mine = [list(parts)[self.rank] for parts in slots]  # type: ignore[call-overload]
            result = mine[0].clone()
            for other in mine[1:]:
                result += other
        output.copy_(result)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._shared(tensor, "broadcast", describe(tensor)) as slots:
            if self.rank != root:
                tensor.copy_(_tensors(slots)[root])

    def barrier(self) -> None:
        self._wait("barrier", "nothing")

    def clone(self) -> Lane:
        self._clones += 1
        return ThreadLane(self._hub.child(self._clones - 1), self.rank)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        """Make every wait of every rank fail, on this lane and its clones."""
        self._hub.abort()


class TorchLane(Lane):
    """A lane on a torch process group of its own: gloo for CPU tensors, NCCL for CUDA tensors.

    Args:
        ranks: global ranks of the members, in lane order; all of them construct the lane together.
        backend: as for ``torch.distributed.new_group``.
        timeout: seconds that one collective may wait for the other ranks.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout: float) -> None:
        self._ranks, self._backend, self._timeout = list(ranks), backend, timeout
        self.size = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())
        with self._named("new_group", "nothing"):
            # use_local_synchronization: only the members of the lane need to take part.
            self._group = dist.new_group(
                self._ranks, timedelta(seconds=timeout), backend, use_local_synchronization=True
            )

    @contextmanager
    def _named(self, operation: str, tensor: Tensor | str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = tensor if isinstance(tensor, str) else describe(tensor)
            raise CommunicationError(str(error), rank=self.rank, operation=operation, tensor=text) from error

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        torch_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        with self._named("all_reduce", tensor):
            dist.all_reduce(tensor, torch_op, self._group)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        # One broadcast a rank: takes uneven sizes, and beats gloo's own all_gather three to one.
        outputs[self.rank].copy_(tensor)
        with self._named("all_gather", tensor):
            works = [
                dist.broadcast(output, self._ranks[root], self._group, async_op=True)
                for root, output in enumerate(outputs)
                if output.numel()
            ]
            for work in works:
                work.wait()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        with self._named("reduce_scatter", output):
            if output.is_cuda and "nccl" in self._backend:
                dist.reduce_scatter(output, list(inputs), group=self._group)
            else:
                self._exchange_and_add(output, inputs)

    def _exchange_and_add(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """gloo: an all-to-all and sums in rank order, half the bytes of gloo's own reduce_scatter."""
        sent = torch.cat([part.reshape(-1) for part in inputs]).cpu()
        received = torch.empty(self.size * output.numel(), dtype=sent.dtype)
        dist.all_to_all_single(
            received, sent, [output.numel()] * self.size, [part.numel() for part in inputs], self._group
        )
        output.view(-1).copy_(received.view(self.size, -1).sum(dim=0))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._named("broadcast", tensor):
            dist.broadcast(tensor, self._ranks[root], self._group)

    def barrier(self) -> None:
        with self._named("barrier", "nothing"):
            dist.all_reduce(torch.zeros(1), group=self._group)

    def clone(self) -> Lane:
        return TorchLane(self._ranks, self._backend, self._timeout)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def describe(tensor: Tensor) -> str:
    """``float32[3, 4]``: how errors name a tensor that has no name."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _tensors(slots: Sequence[object]) -> list[Tensor]:
    return [slot for slot in slots if isinstance(slot, Tensor)]
