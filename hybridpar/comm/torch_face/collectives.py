"""torch's collectives on a lane: CPU tensors of any strides and dtypes, and torch's kinds of reductions.

A lane takes contiguous tensors of some dtypes and knows sum, maximum and minimum. All else is brought into that shape
here, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.lanes.lane import Lane, Op
from hybridpar.comm.lanes.shm_lane import DTYPES


@dataclass(frozen=True)
class Reduction:
    """Each value times ``factor``, combined over the ranks by ``op``, divided by their number if ``average``."""

    op: Op
    average: bool = False
    factor: float | Tensor | None = None


_SUM, _AVERAGE, _MAX, _MIN = Reduction("sum"), Reduction("sum", average=True), Reduction("max"), Reduction("min")


def reduction_of(op: Any) -> Reduction | None:
    """What a ``ReduceOp`` of torch means on a lane; None for those that lanes do not know (products, bitwise ones)."""
    if op == dist.ReduceOp.SUM:
        return _SUM
    if op == dist.ReduceOp.AVG:
        return _AVERAGE
    if op == dist.ReduceOp.MAX:
        return _MAX
    if op == dist.ReduceOp.MIN:
        return _MIN
    if op == dist.ReduceOp.PREMUL_SUM:
        return Reduction("sum", factor=op.__getstate__()[1])  # torch gives no other access to it
    return None


def can_reduce(tensor: Tensor, reduction: Reduction) -> bool:
    """Whether lanes can do it."""
    return tensor.dtype in DTYPES or (tensor.is_complex() and reduction.op == "sum")


def all_reduce(lane: Lane, tensors: Sequence[Tensor], reduction: Reduction) -> None:
    """Replace each tensor by its reduction over the ranks."""
    plain = reduction.factor is None and not reduction.average
    for tensor in tensors:
        if plain and tensor.dtype in DTYPES and tensor.is_contiguous() and not tensor.is_neg():
            lane.all_reduce(tensor, reduction.op)
            continue
        flat = _flat(tensor)
        before, after = _factors(reduction, flat.dtype, lane.size)
        if before is not None:
            flat.mul_(before)
        lane.all_reduce(flat, reduction.op)
        if after is not None:
            flat.div_(after)
        _put(flat, tensor)


def reduce(lane: Lane, tensor: Tensor, root: int, reduction: Reduction) -> None:
    """The reduction, on rank ``root`` only; elsewhere ``tensor`` stays as it is."""
    flat = _flat(tensor)
    before, after = _factors(reduction, flat.dtype, lane.size)
    mine = lane.rank == root
    if before is not None:
        flat = flat.mul_(before) if mine else flat * before
    if reduction.op == "sum":
        parts = [flat.new_empty(0)] * lane.size
        parts[root] = flat
        lane.reduce_scatter(parts[lane.rank], parts)
    else:
        flat = flat if mine else flat.clone()
        lane.all_reduce(flat, reduction.op)
    if mine:
        if after is not None:
            flat.div_(after)
        _put(flat, tensor)


def all_gather(lane: Lane, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """``outputs[r]`` becomes the tensor of rank r. Sizes may differ between ranks."""
    flats = [_moved(output) for output in outputs]
    lane.all_gather(flats, _moved(tensor))
    for flat, output in zip(flats, outputs, strict=True):
        _put(flat, output)


def all_gather_single(lane: Lane, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Each output becomes the inputs of all ranks, one after the other."""
    for output, tensor in zip(outputs, inputs, strict=True):
        if tensor.numel():
            flat, own = _moved(output), _moved(tensor)
            lane.all_gather(flat.split(own.numel()), own)
            _put(flat, output)


def reduce_scatter(lane: Lane, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """``output`` becomes the reduction of the ``inputs[rank]`` of all ranks. The inputs stay as they are."""
    flat, parts = _flat(output), [_flat(part) for part in inputs]
    before, after = _factors(reduction, flat.dtype, lane.size)
    if reduction.op == "sum":
        lane.reduce_scatter(flat, parts if before is None else [part * before for part in parts])
    else:
        everything = torch.cat(parts)
        lane.all_reduce(everything, reduction.op)
        flat.copy_(everything.split([part.numel() for part in parts])[lane.rank])
    if after is not None:
        flat.div_(after)
    _put(flat, output)


def reduce_scatter_single(
    lane: Lane, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction
) -> None:
    """Each output becomes this rank's part of the reduced input."""
    for output, tensor in zip(outputs, inputs, strict=True):
        if output.numel():
            reduce_scatter(lane, output, tensor.reshape(-1).split(output.numel()), reduction)


def all_to_all(lane: Lane, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """``outputs[r]`` becomes the ``inputs[rank]`` of rank r."""
    flats = [_moved(output) for output in outputs]
    lane.all_to_all(flats, [_moved(part) for part in inputs])
    for flat, output in zip(flats, outputs, strict=True):
        _put(flat, output)


def all_to_all_single(
    lane: Lane, output: Tensor, tensor: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
) -> None:
    """The same for rows of one tensor."""
    flat, own = _moved(output), _moved(tensor)
    lane.all_to_all(_rows(flat, output_rows), _rows(own, input_rows))
    _put(flat, output)


def broadcast(lane: Lane, tensor: Tensor, root: int) -> None:
    """``tensor`` becomes that of rank ``root``."""
    flat = _moved(tensor)
    lane.broadcast(flat, root)
    if lane.rank != root:
        _put(flat, tensor)


def barrier(lane: Lane) -> None:
    """Return when every rank has called."""
    lane.barrier()


def _factors(reduction: Reduction, dtype: torch.dtype, size: int) -> tuple[float | Tensor | None, int | None]:
    """What to multiply by before the sum, and what to divide by after it."""
    if not reduction.average:
        return reduction.factor, None
    # A sum of float16 values overflows long before their average does.
    return (1 / size, None) if dtype is torch.float16 else (None, size)


def _flat(tensor: Tensor) -> Tensor:
    """The values as a lane reduces them, [numel]: the tensor's own memory where that is possible."""
    if tensor.dtype in DTYPES and tensor.is_contiguous() and not tensor.is_neg():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous().view(-1)


def _moved(tensor: Tensor) -> Tensor:
    """The values as a lane moves them: as ``_flat``, dtypes that lanes do not know as bytes."""
    flat = _flat(tensor)
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)


def _rows(flat: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """Parts of so many rows each; together they are all of the values."""
    row = flat.numel() // max(1, sum(rows))
    return list(flat.split([count * row for count in rows]))


def _put(flat: Tensor, tensor: Tensor) -> None:
    """Write back what ``_flat`` or ``_moved`` made of ``tensor``, where that was a copy."""
    if flat is tensor:
        return
    if flat.data_ptr() == tensor.data_ptr() and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return
    if tensor.is_complex():
        tensor.copy_(torch.view_as_complex(flat.view(tensor.dtype.to_real()).view(*tensor.shape, 2)))
    else:
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
