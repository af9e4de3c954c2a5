"""A lane that sends sums in fewer bytes than they have: exponents are compressed, and every bit arrives.

# Note [one message]
How long a compressed tensor is depends on its values, so no rank knows what the others will send. But all ranks see
what all have sent, and gradients of one bucket are alike from step to step. So messages have the length of the longest
of the last two of as many values, and a little more; each begins with its true length, and what did not fit follows in
a second one, which all ranks know to be needed, or not. The first message is as long as it can get.

# Note [compressed sums]
With two ranks a sum is one addition, and has the bits that a plain lane gives it. With more the sum is taken in rank
order, half types in float32, and is rounded once: so does gloo's lane with half types, while gloo's own ring takes
float32 in another order for each part of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.exponents import DTYPES, compress, compressed_bound, expand
from hybridpar.comm.lanes.lane import Lane, Op, describe, written

# Below this, for each other rank, messages are mostly latency.
_LEAST_BYTES = 64 << 10
# Larger tensors are taken piece by piece, so that a lane needs no more memory for them: values.
_MOST_VALUES = 2 << 20
# In front of a message: how long the compressed tensor is. Keeps what follows aligned.
_HEAD = 64


class CompressedLane(Lane):
    """Compresses what the sums of another lane send. Everything else goes through it as it is.

    Only sums of CPU tensors of bfloat16 and float32 are compressed, from 64 KiB for each other rank on.

    Args:
        lane: carries the messages; it is closed with this one.
    """

    def __init__(self, lane: Lane) -> None:
        self.rank, self.size, self.ranks = lane.rank, lane.size, lane.ranks
        self._lane = lane
        # Note [one message]: of the last two, bytes without the head, by number of values and dtype.
        self._lengths: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        short = tensor.nbytes < _LEAST_BYTES * (self.size - 1)
        if op != "sum" or tensor.dtype not in DTYPES or not tensor.is_cpu or short or self.size == 1:
            self._lane.all_reduce(tensor, op)
            return
        with self._named("all_reduce", tensor):
            for part in tensor.view(-1).split(_MOST_VALUES):
                if self.size == 2:
                    expand(self._exchange(part)[1 - self.rank], part, add=True)
                else:
                    self._add_own_part(part)
                    self._gather_parts(part)
        written(tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._lane.all_gather(outputs, tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._lane.all_to_all(outputs, inputs)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        self._lane.reduce_scatter(output, inputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._lane.broadcast(tensor, root)

    def barrier(self) -> None:
        self._lane.barrier()

    def split(self, members: Sequence[int]) -> Lane:
        return CompressedLane(self._lane.split(members))

    def close(self) -> None:
        self._lane.close()

    def abort(self, why: str = "") -> None:
        self._lane.abort(why)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._lane.allocate(numel, dtype, device)

    def _exchange(self, own: Tensor, most: int | None = None) -> list[Tensor]:
        """Compressed tensors of all ranks, valid until the next call, of which this rank's is ``own``.

        Args:
            most: the largest number of values of any rank; None where all have as many as this one.
        """
        count = own.numel() if most is None else most
        key = count, own.dtype
        bound = -(-compressed_bound(count, own.dtype) // _HEAD) * _HEAD
        longest = max(self._lengths.get(key, (bound,)))
        planned = min(bound, longest + longest // 64)
        messages = self._scratch(self.size * (_HEAD + bound)).view(self.size, -1).unbind()
        length = compress(own, messages[self.rank][_HEAD:])
        messages[self.rank][:8].view(torch.int64).fill_(length)
        begins = [message[: _HEAD + planned] for message in messages]
        self._lane.all_gather(begins, begins[self.rank])
        lengths = torch.stack([message[:8] for message in messages]).view(torch.int64).view(-1).tolist()
        if max(lengths) > planned:
            rests = [
                message[_HEAD + planned : _HEAD + length] for message, length in zip(messages, lengths, strict=True)
            ]
            self._lane.all_gather(rests, rests[self.rank])
        self._lengths[key] = self._lengths.get(key, (0,))[-1], max(lengths)
        return [message[_HEAD : _HEAD + length] for message, length in zip(messages, lengths, strict=True)]

    def _add_own_part(self, flat: Tensor) -> None:
        """Note [compressed sums]: of its own part of ``flat`` this rank forms the sum, in place."""
        parts = flat.tensor_split(self.size)
        bounds = [compressed_bound(part.numel(), part.dtype) for part in parts]
        room = self.size * bounds[self.rank]
        sent, received = self._scratch(sum(bounds) + room).split([sum(bounds), room])
        places = list(pairwise(accumulate(bounds, initial=0)))
        lengths = [
            0 if rank == self.rank else compress(part, sent[begin:end])
            for rank, (part, (begin, end)) in enumerate(zip(parts, places, strict=True))
        ]
        table = torch.empty(self.size, self.size, dtype=torch.int64)
        self._lane.all_gather(table.unbind(), torch.tensor(lengths))
        outgoing = [sent[begin : begin + length] for (begin, _), length in zip(places, lengths, strict=True)]
        rows = received.view(self.size, -1)
        incoming = [row[:length] for row, length in zip(rows, table[:, self.rank].tolist(), strict=True)]
        self._lane.all_to_all(incoming, outgoing)
        own = parts[self.rank]
        if own.numel():
            own.copy_(_sum_in_order(own, self.rank, incoming))

    def _gather_parts(self, flat: Tensor) -> None:
        parts = flat.tensor_split(self.size)
        for rank, message in enumerate(self._exchange(parts[self.rank], most=parts[0].numel())):
            if rank != self.rank:
                expand(message, parts[rank])

    def _scratch(self, count: int) -> Tensor:
        if self._memory.numel() < count:
            with torch.inference_mode(False):
                self._memory = torch.zeros(count, dtype=torch.uint8)
        return self._memory[:count]

    @contextmanager
    def _named(self, operation: str, tensor: Tensor) -> Iterator[None]:
        """Errors speak of what was asked for, and not of the messages."""
        try:
            yield
        except BaseException as error:
            # What was left in the library may still be read and written there.
            self._memory = torch.empty(0, dtype=torch.uint8)
            if isinstance(error, CommunicationError):
                raise CommunicationError(
                    error.reason, rank=error.rank, operation=operation, tensor=describe(tensor)
                ) from error
            raise


def _sum_in_order(own: Tensor, rank: int, messages: Sequence[Tensor]) -> Tensor:
    """Of what all ranks have, compressed but for ``own``; in float32."""
    theirs, total = torch.empty_like(own), None
    for other, message in enumerate(messages):
        if other != rank:
            expand(message, theirs)
        values = own if other == rank else theirs
        total = values.to(torch.float32, copy=True) if total is None else total.add_(values)
    assert total is not None
    return total
