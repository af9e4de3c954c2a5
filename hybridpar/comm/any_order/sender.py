"""Sends what was agreed: tensors merged into buckets on the way out, and parted again when the result is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from hybridpar.comm.any_order.readiness import OPS, Terms
from hybridpar.comm.any_order.submission import Submission
from hybridpar.comm.buckets import plan_buckets
from hybridpar.comm.lanes.lane import Lane, Op
from hybridpar.comm.timeline.timeline import Timeline
from hybridpar.comm.timeline.trace import LANE
from hybridpar.kernels import pack, unpack
from hybridpar.kernels.pack_table import PackTable

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
_PLANS = 256


@dataclass(frozen=True, slots=True)
class _Bucket:
    """What leaves together.

    Attributes:
        places: of the members among the submissions that were agreed together.
        counts: elements of each.
        table: packs them; None for one that travels alone.
    """

    places: list[int]
    counts: list[int]
    table: PackTable | None


class Sender:
    """Combines agreed tensors over the ranks of a lane, on one thread.

    Everything here is a function of what all ranks know: indices, shapes, dtypes and terms.

    Args:
        bucket_bytes: upper limit of a bucket; a larger tensor, and one of whole numbers, travels alone.
        timeline: records when what is sent.
    """

    def __init__(self, lane: Lane, bucket_bytes: int, timeline: Timeline) -> None:
        self._lane, self._bucket_bytes, self._timeline = lane, bucket_bytes, timeline
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._plans: dict[tuple[int, ...], list[_Bucket]] = {}
        self._edition = 0
        self._stream: torch.cuda.Stream | None = None

    def send(
        self, submissions: Sequence[Submission], terms: Sequence[Terms], edition: int
    ) -> Iterator[list[Submission]]:
        """Collective. Yields submissions as their results are in place.

        Args:
            submissions: of different tensors.
            terms: of all tensors; a higher ``edition`` says that they have changed.
        """
        empty = [submission for submission in submissions if submission.tensor.numel() == 0]
        if empty:
            yield empty
        filled = [submission for submission in submissions if submission.tensor.numel()]
        for bucket in self._planned(filled, terms, edition):
            members = [filled[place] for place in bucket.places]
            op = terms[members[0].index].op
            nbytes = sum(member.tensor.nbytes for member in members)
            span = self._timeline.span(
                "send", row=f"{LANE} 0", bytes=nbytes, tensors=len(members), first=members[0].index
            )
            with self._in_order(members), span:
                if bucket.table is None:
                    self._send_alone(members[0], op)
                else:
                    self._send_merged(members, bucket.counts, bucket.table, op)
            yield members

    @contextmanager
    def _in_order(self, members: Sequence[Submission]) -> Iterator[None]:
        """On CUDA: after what the submitting streams held, and over before the futures are told."""
        device = members[0].tensor.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            for member in members:
                if member.ready is not None:
                    self._stream.wait_event(member.ready)
            yield
            self._stream.synchronize()

    def _planned(self, submissions: Sequence[Submission], terms: Sequence[Terms], edition: int) -> list[_Bucket]:
        """In the order in which they leave."""
        if edition != self._edition or len(self._plans) > _PLANS:
            self._plans.clear()
            self._edition = edition
        indices = tuple(submission.index for submission in submissions)
        found = self._plans.get(indices)
        if found is None:
            found = self._plans[indices] = self._plan(submissions, [terms[index] for index in indices])
        return found

    def _plan(self, submissions: Sequence[Submission], terms: Sequence[Terms]) -> list[_Bucket]:
        order = sorted(range(len(terms)), key=lambda place: (-terms[place].priority, submissions[place].index))
        tensors = [submission.tensor for submission in submissions]
        buckets = [[place] for place in order if tensors[place].dtype in INTEGERS]
        for op in OPS:
            chosen = [place for place in order if terms[place].op == op and tensors[place].dtype in FLOATS]
            counts, dtypes = [tensors[place].numel() for place in chosen], [tensors[place].dtype for place in chosen]
            plan = plan_buckets(counts, dtypes, range(len(chosen)), self._bucket_bytes)
            buckets += [[chosen[member] for member in bucket.members] for bucket in plan]
        turn = {place: position for position, place in enumerate(order)}
        return [_bucket(places, tensors) for places in sorted(buckets, key=lambda members: turn[members[0]])]

    def _send_alone(self, submission: Submission, op: Op) -> None:
        """In its own memory where that is possible: the lane copies anyway."""
        tensor, scale = submission.tensor.detach(), submission.scale
        if tensor.is_contiguous() and not tensor.is_inference():
            if scale != 1:
                tensor.mul_(scale)
            self._lane.all_reduce(tensor, op)
        elif tensor.dtype in INTEGERS:
            flat = tensor.clone(memory_format=torch.contiguous_format)
            self._lane.all_reduce(flat, op)
            tensor.copy_(flat)
        else:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            pack([tensor], [tensor.numel()], flat, scale)
            self._lane.all_reduce(flat, op)
            unpack(flat, [tensor.numel()], [tensor])

    def _send_merged(self, members: Sequence[Submission], counts: Sequence[int], table: PackTable, op: Op) -> None:
        tensors = [member.tensor for member in members]
        bucket = self._buffer(tensors[0])[: sum(counts)]
        if len({member.scale for member in members}) == 1:
            table.pack(tensors, bucket, members[0].scale)
        else:
            _pack_with_scales(members, counts, bucket)
        self._lane.all_reduce(bucket, op)
        table.unpack(bucket, tensors)

    def _buffer(self, example: Tensor) -> Tensor:
        if example.dtype not in self._buffers:
            count = max(1, self._bucket_bytes // example.dtype.itemsize)
            self._buffers[example.dtype] = self._lane.allocate(count, example.dtype, example.device)
        return self._buffers[example.dtype]


def _bucket(places: list[int], tensors: Sequence[Tensor]) -> _Bucket:
    members = [tensors[place] for place in places]
    counts = [tensor.numel() for tensor in members]
    return _Bucket(places, counts, PackTable(counts, members[0].dtype) if len(members) > 1 else None)


def _pack_with_scales(members: Sequence[Submission], counts: Sequence[int], bucket: Tensor) -> None:
    """Scales are each rank's own affair: buckets do not depend on them."""
    ends = [0, *accumulate(counts)]
    for scale, run in groupby(range(len(members)), key=lambda place: members[place].scale):
        first, *_, last = [*(places := list(run)), places[-1]]
        part = slice(first, last + 1)
        tensors = [member.tensor for member in members[part]]
        pack(tensors, counts[part], bucket[ends[first] : ends[last + 1]], scale)
