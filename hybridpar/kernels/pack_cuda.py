"""pack and unpack on CUDA tensors: the tables that csrc/cuda/pack.cu reads, and its launches. No call waits.

# Note [tables]
What a kernel must know of every tensor (address, place, size, strides) travels in one asynchronous copy. Gradients
mostly stay where they are from step to step, so tables are kept and found again by their content. A table belongs
to a stream: its copy is ordered before the kernels of that stream alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybridpar.kernels import _native

_NAMES = {
    _native.FLOAT32: "float32",
    _native.FLOAT64: "float64",
    _native.BFLOAT16: "bfloat16",
    _native.FLOAT16: "float16",
}
_KEPT = 512
# Items (csrc/cuda/items.h) are long where there is much to do, so that the search for their tensor costs nothing, and
# short where there is little, so that there are enough of them for the whole device. Multiples of 8 keep alignment.
_ITEM_LENGTHS = (2048, 1024, 512)
_ENOUGH_ITEMS = 4096

Arguments = tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]
]


class Launcher(Protocol):
    """What of ``hybridpar.kernels.cuda.Module`` is used here."""

    def launch(self, kernel: str, warps: int, *arguments: int | float) -> None: ...


@dataclass(frozen=True)
class _Part:
    """The tensors of one dtype: ``dtype`` as its code, the place of their columns in the table, their number."""

    dtype: int
    begin: int
    tensors: int
    items: int


@dataclass(frozen=True)
class _Table:
    """On the device: the columns of each part, then the geometry."""

    memory: torch.Tensor
    parts: tuple[_Part, ...]
    geometry: int
    item_length: int

    def address(self, place: int) -> int:
        return self.memory.data_ptr() + place * self.memory.element_size()


def pack(launcher: Launcher, arguments: Arguments, bucket: torch.Tensor, dtype: int, scale: float) -> torch.Tensor:
    """See `hybridpar.kernels.pack`.

    Args:
        launcher: the compiled kernels.
        arguments: the tensors, as `hybridpar.kernels._native` takes them.
        bucket, dtype: the bucket, and its dtype as `_native` numbers them.

    Returns:
        How many values were not finite: int64 [] on the bucket's device, complete in the order of the current stream.
    """
    return _convert(launcher, arguments, bucket, dtype, scale, to_bucket=True)


def unpack(launcher: Launcher, arguments: Arguments, bucket: torch.Tensor, dtype: int, scale: float) -> torch.Tensor:
    """See `hybridpar.kernels.unpack`; arguments and result as for ``pack``."""
    return _convert(launcher, arguments, bucket, dtype, scale, to_bucket=False)


def _convert(
    launcher: Launcher, arguments: Arguments, bucket: torch.Tensor, dtype: int, scale: float, *, to_bucket: bool
) -> torch.Tensor:
    nonfinite = torch.zeros((), dtype=torch.int64, device=bucket.device)
    stream = torch.cuda.current_stream(bucket.device).cuda_stream if bucket.is_cuda else 0
    table = _table(bucket.device, stream, *(column.tobytes() for column in arguments))
    for part in table.parts:
        launcher.launch(
            _kernel(part.dtype, dtype, scale) if to_bucket else _kernel(dtype, part.dtype, scale),
            part.items,
            table.address(part.begin),
            part.tensors,
            table.address(table.geometry),
            part.items,
            table.item_length,
            bucket.data_ptr(),
            int(to_bucket),
            float(scale),
            nonfinite.data_ptr(),
        )
    return nonfinite


def _kernel(source: int, target: int, scale: float) -> str:
    if source == target and scale == 1.0:
        return f"copy_{_NAMES[source]}"
    return f"convert_{_NAMES[source]}_to_{_NAMES[target]}"


@functools.lru_cache(maxsize=_KEPT)
def _table(
    device: torch.device,
    stream: int,
    addresses: bytes,
    counts: bytes,
    dtypes: bytes,
    geometry_at: bytes,
    geometry: bytes,
) -> _Table:
    """Note [tables]; ``stream`` only tells them apart."""
    numbers, parts, item_length = table_of(
        np.frombuffer(addresses, np.int64),
        np.frombuffer(counts, np.int64),
        np.frombuffer(dtypes, np.uint8),
        np.frombuffer(geometry_at, np.int64),
    )
    memory = torch.from_numpy(np.concatenate([numbers, np.frombuffer(geometry, np.int64)]))
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("expected pack and unpack outside of CUDA graphs, got a stream that is being captured")
        memory = memory.pin_memory().to(device, non_blocking=True)
    return _Table(memory, parts, len(numbers), item_length)


def table_of(
    addresses: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    dtypes: npt.NDArray[np.uint8],
    geometry_at: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], tuple[_Part, ...], int]:
    """The columns of csrc/cuda/items.h for the tensors of each dtype, the parts that they form, and items' length."""
    places = np.cumsum(counts) - counts
    if len(geometry_at) == 0:
        geometry_at = np.full(len(counts), -1, dtype=np.int64)
    total = int(counts.sum())
    item_length = next((length for length in _ITEM_LENGTHS if total >= length * _ENOUGH_ITEMS), _ITEM_LENGTHS[-1])
    columns: list[npt.NDArray[np.int64]] = []
    parts: list[_Part] = []
    begin = 0
    for dtype in np.unique(dtypes[counts > 0]).tolist():
        rows = np.flatnonzero((dtypes == dtype) & (counts > 0))
        items = -(-counts[rows] // item_length)
        columns += [addresses[rows], places[rows], counts[rows], np.cumsum(items) - items, geometry_at[rows]]
        parts.append(_Part(dtype, begin, len(rows), int(items.sum())))
        begin += 5 * len(rows)
    return np.concatenate(columns or [np.empty(0, dtype=np.int64)]), tuple(parts), item_length
