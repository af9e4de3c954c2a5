"""Codecs: how one bucket travels. Each turns tensors into a message, exchanges it, and turns what came into sums.

# Note [presence flags]
Behind its tensors a bucket carries one number for each of them: positive where this rank had a gradient, zero where it
had none and sends zeros. After the sum a positive number means that some rank had one. So ranks learn of gradients that
only others have without a message of their own, and a tensor that no rank used stays without a gradient. The number is
one divided by the number of ranks, so that no format can overflow, nor lose it, below millions of ranks.

# Note [half formats on the wire]
Gradients of float32 and float64 are divided by the number of ranks before they are rounded to a half format, and their
sum is multiplied by it afterwards: a sum of values that are in range themselves cannot leave the range. Where the
number of ranks is a power of two that costs nothing but the smallest values of the format.

# Note [residuals]
With error feedback a codec keeps what it did not send, in float32 (float64 for float64 gradients) and in the units of
the message. It becomes part of the next gradient of the tensor that this rank has; a tensor that is absent in a round
sends nothing and keeps its residual. A round counts when it is committed: one whose sums are refused (NaN, infinity)
leaves the residuals as they were. What is not finite never stays in a residual.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridpar.comm.buckets import Bucket
from hybridpar.comm.engine.largest import largest
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.lane import Lane
from hybridpar.kernels.pack_table import PackTable

# How many values were not finite: a number, or on CUDA one that is still being computed there.
Count = int | Tensor
# Of a smaller tensor all values travel: its indices would cost more than they save.
DENSE_BELOW = 1024


class Codec(ABC):
    """One bucket on its way. ``pack``, ``exchange``, ``unpack``, ``commit``, in this order, once a round.

    Attributes:
        bucket: its tensors.
        table: copies them.
        factor: what a gradient is multiplied with before it is sent.
        nbytes: what one rank sends.
        sums: [bucket.numel] after ``exchange``, before they are scaled back.
        residual: see Note [residuals]; None where nothing is ever left out.
    """

    sums: Tensor
    nbytes: int
    residual: Tensor | None = None

    def __init__(self, bucket: Bucket, factor: float) -> None:
        self.bucket, self.factor = bucket, factor
        self.table = PackTable(bucket.counts, bucket.dtype)

    @abstractmethod
    def pack(self, tensors: Sequence[Tensor | None]) -> Count:
        """Make the message from this rank's tensors; returns how many of their values are not finite."""

    @abstractmethod
    def exchange(self, lane: Lane) -> None:
        """Collective: send it, and form the sums."""

    @abstractmethod
    def present(self) -> list[bool]:
        """After ``exchange``: whether any rank had a gradient for each tensor."""

    @abstractmethod
    def unpack(self, tensors: Sequence[Tensor | None]) -> Count:
        """Write the sums into tensors; returns how many of the values read are not finite."""

    @abstractmethod
    def commit(self) -> None:
        """The round counts: keep what was not sent. See Note [residuals]."""

    def spans(self) -> list[tuple[int, int, int]]:
        """(index, begin, end) of each tensor in the bucket."""
        ends = list(accumulate(self.bucket.counts))
        return [
            (index, end - count, end)
            for index, count, end in zip(self.bucket.members, self.bucket.counts, ends, strict=True)
        ]


class DenseCodec(Codec):
    """All values, in the wire's dtype, by one all-reduce."""

    def __init__(
        self, bucket: Bucket, factor: float, back: float, travels: torch.dtype, lane: Lane, device: torch.device
    ) -> None:
        super().__init__(bucket, factor)
        self._back, self._flag = back, 1.0 / lane.size
        # In the lane's own memory packing is all the copying there is.
        self._message = lane.allocate(bucket.numel + len(bucket.members), travels, device)
        self.sums, self._flags = self._message[: bucket.numel], self._message[bucket.numel :]
        self.nbytes = self._message.nbytes

    def pack(self, tensors: Sequence[Tensor | None]) -> Count:
        nonfinite = self.table.pack(tensors, self.sums, self.factor)
        self._set_flags(len(tensors), _absent(tensors))
        return nonfinite

    def exchange(self, lane: Lane) -> None:
        lane.all_reduce(self._message, "sum")

    def present(self) -> list[bool]:
        return [flag > 0 for flag in self._flags.tolist()]

    def unpack(self, tensors: Sequence[Tensor | None]) -> Count:
        return self.table.unpack(self.sums, tensors, self._back)

    def commit(self) -> None:
        pass

    def _set_flags(self, members: int, absent: Sequence[int]) -> None:
        self._flags.fill_(self._flag)
        if absent:
            flags = [self._flag] * members
            for member in absent:
                flags[member] = 0.0
            self._flags.copy_(torch.tensor(flags))


class _Residual:
    """What is left out: as committed, and as it will be when the present round counts."""

    def __init__(self, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        self._codec = codec
        codec.residual = torch.zeros(codec.bucket.numel, dtype=dtype, device=device)
        self.pending = torch.empty_like(codec.residual)

    def add_to(self, tensors: Sequence[Tensor | None]) -> Count:
        """Into ``pending``: gradients and what was left out of earlier ones."""
        nonfinite = self._codec.table.pack(tensors, self.pending, self._codec.factor)
        assert self._codec.residual is not None
        self.pending.add_(self._codec.residual)
        return nonfinite

    def keep(self, begin: int, end: int) -> None:
        """Nothing of this part is sent in this round."""
        assert self._codec.residual is not None
        self.pending[begin:end] = self._codec.residual[begin:end]

    def commit(self, nonfinite: Count) -> None:
        """``nonfinite`` sums there were. Where this rank's part is not finite, neither is the sum."""
        if not isinstance(nonfinite, int) or nonfinite:
            self.pending.nan_to_num_(0.0, 0.0, 0.0)
        assert self._codec.residual is not None
        self._codec.residual, self.pending = self.pending, self._codec.residual


class FeedbackCodec(DenseCodec):
    """All values in a half format; what rounding takes is kept."""

    def __init__(
        self, bucket: Bucket, factor: float, back: float, travels: torch.dtype, lane: Lane, device: torch.device
    ) -> None:
        super().__init__(bucket, factor, back, travels, lane, device)
        self._left = _Residual(self, accumulator(bucket.dtype), device)
        self._nonfinite: Count = 0

    def pack(self, tensors: Sequence[Tensor | None]) -> Count:
        nonfinite = self._left.add_to(tensors)
        self.sums.copy_(self._left.pending)
        self._left.pending.sub_(self.sums)
        absent = _absent(tensors)
        spans = self.spans() if absent else []
        for member in absent:
            _, begin, end = spans[member]
            self.sums[begin:end] = 0.0
            self._left.keep(begin, end)
        self._set_flags(len(tensors), absent)
        return nonfinite

    def unpack(self, tensors: Sequence[Tensor | None]) -> Count:
        self._nonfinite = super().unpack(tensors)
        return self._nonfinite

    def commit(self) -> None:
        self._left.commit(self._nonfinite)


@dataclass(frozen=True)
class _Row:
    """One rank's message: views of its bytes."""

    values: Tensor
    indices: Tensor
    flags: Tensor


class TopKCodec(Codec):
    """Of each tensor the values of largest magnitude, with their places, by one all-gather; added in rank order."""

    def __init__(
        self, bucket: Bucket, factor: float, fraction: float, travels: torch.dtype, lane: Lane, device: torch.device
    ) -> None:
        super().__init__(bucket, factor)
        if bucket.numel >= 1 << 31:
            raise ValueError(
                f"top_k: expected buckets of less than 2**31 values, got one of {bucket.numel:,}; "
                "send so large a tensor whole, with a wire without top_k"
            )
        wide = accumulator(bucket.dtype)
        self._left = _Residual(self, wide, device)
        self.sums = torch.empty(bucket.numel, dtype=wide, device=device)
        # (begin, end, first, last) of a tensor in the bucket and in the values that travel; None: all of it travels.
        self._chosen: list[tuple[int, int, int, int]] = []
        whole: list[Tensor] = []
        places: dict[int, tuple[int, int]] = {}
        filled = 0
        for index, begin, end in self.spans():
            if end - begin >= DENSE_BELOW:
                k = most(fraction, end - begin)
                self._chosen.append((begin, end, filled, filled + k))
                places[index] = filled, filled + k
                filled += k
        self._indexed = filled
        for index, begin, end in self.spans():
            if index not in places:
                whole.append(torch.arange(begin, end, device=device))
                places[index] = filled, filled + end - begin
                filled += end - begin
        self._places = [places[index] for index in bucket.members]
        self._index = torch.empty(filled, dtype=torch.int64, device=device)
        if whole:
            torch.cat(whole, out=self._index[self._indexed :])
        self._whole = self._index[self._indexed :]
        self._rows = self._make_rows(lane, filled, travels, device)
        self._own = self._rows[lane.rank]
        self._nonfinite: Count = 0

    def _make_rows(self, lane: Lane, filled: int, travels: torch.dtype, device: torch.device) -> list[_Row]:
        values = _rounded_up(filled * travels.itemsize)
        indices = values + _rounded_up(4 * self._indexed)
        self.nbytes = indices + _rounded_up(len(self.bucket.members))
        self._messages = list(torch.zeros(lane.size, self.nbytes, dtype=torch.uint8, device=device))
        return [
            _Row(
                message[: filled * travels.itemsize].view(travels),
                message[values : values + 4 * self._indexed].view(torch.int32),
                message[indices : indices + len(self.bucket.members)],
            )
            for message in self._messages
        ]

    def pack(self, tensors: Sequence[Tensor | None]) -> Count:
        nonfinite = self._left.add_to(tensors)
        pending = self._left.pending
        magnitudes = torch.abs(pending, out=self.sums)
        for begin, end, first, last in self._chosen:
            found = largest(magnitudes[begin:end], last - first)
            torch.add(found, begin, out=self._index[first:last])
        sent = pending[self._index]
        self._own.values.copy_(sent)
        pending[self._index] = sent.sub_(self._own.values)
        self._own.indices.copy_(self._index[: self._indexed])
        self._own.flags.fill_(1)
        absent = _absent(tensors)
        spans = self.spans() if absent else []
        for member in absent:
            first, last = self._places[member]
            self._own.values[first:last] = 0.0
            self._own.flags[member] = 0
            self._left.keep(*spans[member][1:])
        return nonfinite

    def exchange(self, lane: Lane) -> None:
        lane.all_gather(self._messages, self._messages[lane.rank])
        self.sums.zero_()
        for row in self._rows:
            values = row.values.to(self.sums.dtype)
            self.sums.index_add_(0, row.indices, values[: self._indexed])
            self.sums.index_add_(0, self._whole, values[self._indexed :])

    def present(self) -> list[bool]:
        return [any(flags) for flags in zip(*(row.flags.tolist() for row in self._rows), strict=True)]

    def unpack(self, tensors: Sequence[Tensor | None]) -> Count:
        self._nonfinite = self.table.unpack(self.sums, tensors)
        return self._nonfinite

    def commit(self) -> None:
        self._left.commit(self._nonfinite)


def make_codec(bucket: Bucket, wire: Wire, lane: Lane, device: torch.device, scale: float) -> Codec:
    """Collective where the lane has memory of its own: the codec of one bucket.

    Args:
        scale: factor applied to every tensor before it is summed.
    """
    travels = wire.dtype_of(bucket.dtype)
    if wire.top_k is not None and max(bucket.counts) >= DENSE_BELOW:
        return TopKCodec(bucket, scale, wire.top_k, travels, lane, device)
    if travels == bucket.dtype:
        return DenseCodec(bucket, scale, 1.0, travels, lane, device)
    kind = FeedbackCodec if wire.keeps_residuals else DenseCodec
    return kind(bucket, scale / lane.size, float(lane.size), travels, lane, device)


def carry_over(old: Sequence[Codec], new: Sequence[Codec]) -> None:
    """Give new codecs the residuals of old ones, tensor by tensor; those of tensors that now travel whole are lost."""
    kept = {
        index: (codec.residual[begin:end], codec.factor)
        for codec in old
        if codec.residual is not None
        for index, begin, end in codec.spans()
    }
    for codec in new:
        for index, begin, end in codec.spans() if codec.residual is not None else ():
            if index in kept:
                value, factor = kept[index]
                assert codec.residual is not None
                codec.residual[begin:end] = value * (codec.factor / factor)


def accumulator(gradient: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are added up."""
    return torch.float64 if gradient == torch.float64 else torch.float32


def most(fraction: float, count: int) -> int:
    """How many values of a tensor of ``count`` travel: at least one."""
    return min(count, max(1, math.ceil(fraction * count)))


def _absent(tensors: Sequence[Tensor | None]) -> list[int]:
    return [member for member, tensor in enumerate(tensors) if tensor is None]


def _rounded_up(count: int) -> int:
    return (count + 7) // 8 * 8
