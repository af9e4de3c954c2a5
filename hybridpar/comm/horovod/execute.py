"""Doing what all ranks have agreed on, on a lane: every rank calls the same functions in the same order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod.reduce_op import LANE_OPS, ReduceOp
from hybridpar.comm.horovod.request import Operation, Request
from hybridpar.comm.horovod.table import Verdict
from hybridpar.comm.lanes.lane import Lane


class Executor:
    """Runs collectives on a lane, on one thread.

    Args:
        lane: no other thread uses it.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._stream: torch.cuda.Stream | None = None

    def run(self, verdict: Verdict, mine: Operation | None) -> Any:
        """Collective.

        Args:
            verdict: without a problem.
            mine: what this rank asked for; None where it joined.

        Returns:
            The result, whose scaling may still have to be finished.
        """
        request = verdict.request
        if request.kind == "barrier":
            return None  # that all have asked is all there is to it
        if mine is None:
            return self._all_reduce(request, neutral(request), scaled=True)
        assert mine.tensor is not None
        with self._in_order(mine):
            match request.kind:
                case "allreduce":
                    return self._all_reduce(request, mine.tensor, scaled=False)
                case "allgather":
                    rows = [verdict.entries[rank].own[0] for rank in range(self._lane.size)]
                    return self._gather(mine.tensor, rows), rows
                case "broadcast":
                    return self._broadcast(mine.tensor, request.root)
                case "alltoall":
                    splits = [verdict.entries[rank].own for rank in range(self._lane.size)]
                    return self._all_to_all(mine.tensor, splits)
                case "reducescatter":
                    return self._reduce_scatter(request, mine.tensor)
                case unknown:
                    raise AssertionError(unknown)

    @contextmanager
    def _in_order(self, mine: Operation) -> Iterator[None]:
        """On CUDA: after what the asking stream held, and over before the future is told."""
        if mine.ready is None:
            yield
            return
        assert mine.tensor is not None
        device = mine.tensor.device
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mine.ready)
            yield
            self._stream.synchronize()

    def _all_reduce(self, request: Request, tensor: Tensor, *, scaled: bool) -> Tensor:
        """In place."""
        op = ReduceOp(request.op)
        flat = tensor.contiguous().view(-1)
        if not scaled:
            request.scaling(self._lane.size).start(flat)
        if op is ReduceOp.PRODUCT:
            everyone = self._gather(flat, [flat.numel()] * self._lane.size).view(self._lane.size, -1)
            flat.fill_(1)
            for values in everyone:  # in rank order, in the dtype of the tensor
                flat.mul_(values)
        elif flat.numel():
            self._lane.all_reduce(flat, LANE_OPS[op])
        return _put_back(flat, tensor)

    def _gather(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """[rows of this rank, ...] -> [sum of rows, ...]."""
        gathered = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        if gathered.numel():
            row = math.prod(tensor.shape[1:]) * tensor.element_size()
            self._lane.all_gather(_bytes(gathered).split([count * row for count in rows]), _bytes(tensor.contiguous()))
        return gathered

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """In place."""
        if tensor.numel():
            flat = tensor.contiguous()
            self._lane.broadcast(_bytes(flat), root)
            if self._lane.rank != root:
                _put_back(flat, tensor)
        return tensor

    def _all_to_all(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Gives what was received, one rank's rows behind the other's, and how many there are of each.

        Args:
            splits: how many rows each rank sends to each.
        """
        me = self._lane.rank
        counts = [rows[me] for rows in splits]
        received = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        if row and any(map(any, splits)):
            outputs = _bytes(received).split([count * row for count in counts])
            self._lane.all_to_all(outputs, _bytes(tensor.contiguous()).split([count * row for count in splits[me]]))
        return received, counts

    def _reduce_scatter(self, request: Request, tensor: Tensor) -> Tensor:
        """[rows, ...] -> this rank's share of the rows: where that is uneven the first ranks get one more."""
        size = self._lane.size
        rows = [tensor.shape[0] // size + (rank < tensor.shape[0] % size) for rank in range(size)]
        values = tensor.clone(memory_format=torch.contiguous_format)
        request.scaling(size).start(values)
        output = values.new_empty((rows[self._lane.rank], *tensor.shape[1:]))
        if values.numel():
            self._lane.reduce_scatter(output, values.split(rows))
        return output


def neutral(request: Request) -> Tensor:
    """Values that change no result, for a rank that has joined."""
    dtype, op = request.torch_dtype, ReduceOp(request.op)
    value: float = 0
    if op is ReduceOp.PRODUCT:
        value = 1
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        value = limits.max if op is ReduceOp.MIN else limits.min
        value = math.copysign(math.inf, value) if dtype.is_floating_point else value
    device = torch.device(request.device, torch.cuda.current_device()) if request.device == "cuda" else request.device
    return torch.full(request.shape, value, dtype=dtype, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """Contiguous values as lanes move them, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _put_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """Write back what ``contiguous`` made of ``tensor``, where that was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    return tensor
