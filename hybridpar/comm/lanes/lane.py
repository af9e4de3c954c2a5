"""A lane: one ordered communicator of an existing library. The whole contract is the class ``Lane``.

Every rank of a lane must call the same operations in the same order. Tensors are contiguous. Calls block until the
result may be used (on CUDA: until it is ordered on the current stream). What goes wrong raises
``CommunicationError`` within the time-out; nothing is retried.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridpar.comm.errors import CommunicationError

Op = Literal["sum", "max", "min"]
# What every lane between processes can reduce. Gathered and broadcast is any dtype.
REDUCIBLE = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


class Lane(ABC):
    """One ordered communicator between ``size`` ranks, seen from ``rank``.

    Attributes:
        rank, size: this rank in [0, size), and the number of ranks.
        ranks: the number of every member in the whole job. Errors call ranks by these.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> Lane:
        """Itself: a copied module works with the same ranks."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Replace ``tensor`` (any shape) by its elementwise sum, maximum or minimum over the ranks."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill ``outputs[r]`` with the tensor of rank r. Sizes may differ between ranks and may be zero.

        ``tensor`` may be ``outputs[rank]`` itself.
        """

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """Fill ``output`` with the sum over the ranks of their ``inputs[rank]``. Sizes as for ``all_gather``.

        ``output`` may be ``inputs[rank]`` itself; the other inputs stay as they are.
        """

    @abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Fill ``outputs[r]`` with ``inputs[rank]`` of rank r. Sizes may differ between pairs of ranks and may be zero.

        Any dtype, the same in all of them. Outputs and inputs share no memory.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with that of rank ``root``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def split(self, members: Sequence[int]) -> Lane:
        """A further communicator of some ranks of this lane, numbered in the order of ``members``.

        Collective over the members, of which the caller is one; the other ranks know nothing of it.
        """

    def clone(self) -> Lane:
        """A further, independent communicator of the same ranks. Collective."""
        return self.split(range(self.size))

    @abstractmethod
    def close(self) -> None:
        """Free what the lane holds. It may not be used again."""

    def abort(self, why: str = "") -> None:
        """Make present and later calls fail, on all ranks as far as the library can tell them: this one cannot go on.

        From any thread.

        Args:
            why: for the others, where the library can carry it.
        """
        self.close()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Collective: uninitialised memory [numel] on which this lane's ``all_reduce`` is as fast as it can be."""
        return torch.empty(numel, dtype=dtype, device=device)


class AloneLane(Lane):
    """The lane of a group of one: every collective is the identity."""

    rank, size = 0, 1

    def __init__(self, job_rank: int = 0) -> None:
        self.ranks = (job_rank,)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        pass

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        outputs[0].copy_(tensor)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        output.copy_(inputs[0])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        outputs[0].copy_(inputs[0])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        pass

    def barrier(self) -> None:
        pass

    def split(self, members: Sequence[int]) -> Lane:
        return AloneLane(self.ranks[0])

    def close(self) -> None:
        pass


class ThreadHub:
    """What the threads of one ``ThreadLane`` share: a slot a rank, and a barrier."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.barrier = threading.Barrier(size)
        self.slots: list[object] = [None] * size
        self._children: dict[tuple[tuple[int, ...], int], ThreadHub] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def child(self, members: tuple[int, ...], number: int) -> ThreadHub:
        """The hub of the ``number``-th lane split off for ``members``, made by whichever of them asks first."""
        with self._lock:
            if (members, number) not in self._children:
                self._children[members, number] = ThreadHub(len(members), self.timeout)
                if self._aborted:
                    self._children[members, number].abort()
            return self._children[members, number]

    def abort(self) -> None:
        """Make every present and later wait of every rank fail at once: one of them has died."""
        with self._lock:
            self._aborted = True
            children = list(self._children.values())
        self.barrier.abort()
        for child in children:
            child.abort()


_COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class ThreadLane(Lane):
    """Ranks are threads of one process (CPU tensors). Sums are taken in rank order, so they are reproducible."""

    def __init__(self, hub: ThreadHub, rank: int, ranks: Sequence[int] | None = None) -> None:
        self.rank, self.size = rank, hub.size
        self.ranks = tuple(range(hub.size) if ranks is None else ranks)
        self._hub = hub
        self._splits: Counter[tuple[int, ...]] = Counter()

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
            raise CommunicationError(reason, rank=self.ranks[self.rank], operation=operation, tensor=tensor) from None

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

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        text = describe(inputs)
        with self._shared(tuple(inputs), "all_to_all", text) as slots:
            for sender, parts in enumerate(slots):
                sent: Tensor = list(parts)[self.rank]  # type: ignore[call-overload]
                if sent.nbytes != outputs[sender].nbytes:
                    reason = (
                        f"expected {outputs[sender].nbytes} bytes from rank {self.ranks[sender]}, got {sent.nbytes}; "
                        "give the same sizes on both ranks"
                    )
                    raise CommunicationError(reason, rank=self.ranks[self.rank], operation="all_to_all", tensor=text)
                outputs[sender].view(-1).copy_(sent.view(-1))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._shared(tensor, "broadcast", describe(tensor)) as slots:
            if self.rank != root:
                tensor.copy_(_tensors(slots)[root])

    def barrier(self) -> None:
        self._wait("barrier", "nothing")

    def split(self, members: Sequence[int]) -> Lane:
        chosen = tuple(members)
        self._splits[chosen] += 1
        hub = self._hub.child(chosen, self._splits[chosen])
        return ThreadLane(hub, chosen.index(self.rank), [self.ranks[member] for member in chosen])

    def close(self) -> None:
        pass

    def abort(self, why: str = "") -> None:
        """Make every wait of every rank fail, on this lane and those made of it."""
        self._hub.abort()


def check_reducible(operation: str, tensor: Tensor) -> None:
    """Raises TypeError for a dtype that not every lane between processes can add up."""
    if tensor.dtype not in REDUCIBLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise TypeError(f"{operation}: expected {names}, got {describe(tensor)}; cast it first")


def written(*tensors: Tensor) -> None:
    """Lets autograd notice, as it would after copy_, that values saved for backward have changed."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def describe(tensor: Tensor | Sequence[Tensor]) -> str:
    """``float32[3, 4]``, or ``float32[12] in 3 parts``: how errors name what has no name."""
    if isinstance(tensor, Tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    name = str(tensor[0].dtype).removeprefix("torch.")
    return f"{name}[{sum(part.numel() for part in tensor)}] in {len(tensor)} parts"


def _tensors(slots: Sequence[object]) -> list[Tensor]:
    return [slot for slot in slots if isinstance(slot, Tensor)]
