"""The launches of csrc/cuda/margin_softmax.cu: see Note [tiles] in tiles.h. No call waits for the device.

All memory comes from torch's allocator and all work goes to the current stream: a CUDA graph can hold it, once a first
call outside of a graph has compiled the kernels. What is no tensor (how many samples have their own class in the
chunk) is part of the graph.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridpar.kernels.cuda import WARP, WARPS_PER_BLOCK
from hybridpar.kernels.softmax_reference import Chunk, Own

# What results may be narrowed to on the way, so that nobody has to read them once more for that.
OUTPUTS = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
# The same for every device, and with them the order of additions: two blocks of 256 threads for each multiprocessor of
# a large one. Each block of the second launch reads what all segments of its tile have found, so these are few, and
# none is shorter than four rounds of its warps.
_BLOCKS = 256
_MOST_SEGMENTS = 64
_LEAST_CLASSES = 64
_WIDE = 4  # samples that a thread reads at once, where their number and the addresses allow it


class Launcher(Protocol):
    """What of ``hybridpar.kernels.cuda.Module`` is used here."""

    def launch(self, kernel: str, warps: int, *arguments: int | float) -> None: ...


class _Division(NamedTuple):
    """A chunk in tiles of samples and segments of classes."""

    tiles: int
    segment_classes: int
    segments: int


def add_exponentials(
    launcher: Launcher, chunk: Chunk, own: Own, maximum_B: Tensor, total_B: Tensor, out_CB: Tensor
) -> Tensor:
    """See `hybridpar.kernels.add_exponentials`; all tensors on one device, of the dtypes and layouts it asks for."""
    classes, batch = chunk.products.shape
    if not classes or not batch:
        return torch.ones_like(maximum_B)
    rescale_B = torch.empty_like(maximum_B)
    width = _width(batch, chunk.products, out_CB, maximum_B)
    division = _division(classes, batch, width)
    parts = maximum_B.new_empty((2, division.segments, batch))
    arguments = (
        *_inputs(chunk, own), out_CB.data_ptr(), maximum_B.data_ptr(), total_B.data_ptr(), rescale_B.data_ptr(), 0,
        parts.data_ptr(), division.segment_classes, division.segments,
    )  # fmt: skip
    warps = division.tiles * division.segments * WARPS_PER_BLOCK
    products, exact = _name(chunk.products.dtype), _name(maximum_B.dtype)
    launcher.launch(f"maxima_{products}_{width}", warps, *arguments)
    launcher.launch(f"exponentials_{products}_to_{_name(out_CB.dtype)}_{width}", warps, *arguments)
    launcher.launch(f"finish_{exact}", -(-batch // WARP), *arguments)
    return rescale_B


def to_probabilities(
    launcher: Launcher,
    chunk: Chunk,
    own: Own,
    maximum_B: Tensor,
    log_total_B: Tensor,
    counts_B: Tensor,
    out_CB: Tensor,
    sums_C: Tensor | None,
) -> None:
    """See `hybridpar.kernels.to_probabilities`; all tensors on one device, of the dtypes and layouts it asks for."""
    classes, batch = chunk.products.shape
    if not classes or not batch:
        if sums_C is not None:
            sums_C.zero_()
        return
    width = _width(batch, chunk.products, out_CB, maximum_B, log_total_B, counts_B)
    division = _division(classes, batch, width)
    launcher.launch(
        f"probabilities_{_name(chunk.products.dtype)}_to_{_name(out_CB.dtype)}_{width}",
        division.tiles * division.segments * WARPS_PER_BLOCK if sums_C is None else classes,
        *_inputs(chunk, own), out_CB.data_ptr(), maximum_B.data_ptr(), log_total_B.data_ptr(), counts_B.data_ptr(),
        0 if sums_C is None else sums_C.data_ptr(), 0, division.segment_classes, division.segments,
    )  # fmt: skip


def _inputs(chunk: Chunk, own: Own) -> tuple[int | float, ...]:
    classes, batch = chunk.products.shape
    return (
        chunk.products.data_ptr(), classes, batch,
        0 if chunk.inverse_norms is None else chunk.inverse_norms.data_ptr(),
        0 if chunk.bias is None else chunk.bias.data_ptr(), float(chunk.scale),
        len(own.classes), own.classes.data_ptr(), own.samples.data_ptr(), own.values.data_ptr(),
    )  # fmt: skip


def _width(batch: int, *tensors: Tensor) -> int:
    aligned = all(tensor.data_ptr() % (_WIDE * tensor.element_size()) == 0 for tensor in tensors)
    return _WIDE if aligned and batch % _WIDE == 0 else 1


def _division(classes: int, batch: int, width: int) -> _Division:
    tiles = -(-batch // (WARP * width))
    segments = min(-(-classes // _LEAST_CLASSES), max(1, _BLOCKS // tiles), _MOST_SEGMENTS)
    segment_classes = -(-classes // segments)
    return _Division(tiles, segment_classes, -(-classes // segment_classes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
