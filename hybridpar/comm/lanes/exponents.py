"""A shorter form of bfloat16 and float32 values that keeps every bit, for slow networks: exponents are compressed.

csrc/exponents.h says how. Normally distributed values take 11.3 bits in place of 16, and 27.3 in place of 32; zeros
take three where there are many.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hybridpar.kernels._native as _native

_CODES = {torch.bfloat16: _native.BFLOAT16, torch.float32: _native.FLOAT32}
DTYPES = tuple(_CODES)


def compressed_bound(count: int, dtype: torch.dtype) -> int:
    """Bytes that ``count`` values take at most.

    Raises:
        TypeError: the dtype is neither bfloat16 nor float32.
    """
    return _native.compressed_bound(count, _code(dtype))


def compress(values: Tensor, target: Tensor) -> int:
    """Write the shorter form of values into the first bytes of ``target``; returns how many bytes those are.

    Args:
        values: bfloat16 or float32, contiguous, on the CPU.
        target: uint8 [at least ``compressed_bound(values.numel(), values.dtype)``], contiguous, on the CPU.

    Raises:
        TypeError: another dtype, device or memory layout.
        ValueError: ``target`` is too short.
    """
    code = _checked(values, target)
    if target.numel() < (bound := _native.compressed_bound(values.numel(), code)):
        raise ValueError(f"compress: expected room for {bound} bytes, got {target.numel()}")
    return _native.compress_exponents(values.data_ptr(), values.numel(), code, target.data_ptr())


def expand(source: Tensor, values: Tensor, *, add: bool = False) -> None:
    """The inverse of ``compress``: overwrite ``values``, or add to them.

    Args:
        source: uint8, just the bytes of as many values; contiguous, on the CPU.
        values: as for ``compress``.
        add: write the sums of what is there and what was compressed; bfloat16 is added in float32 and rounded once.

    Raises:
        TypeError: another dtype, device or memory layout.
        ValueError: the bytes are not what so many values were compressed to.
    """
    code = _checked(values, source)
    _native.expand_exponents(source.data_ptr(), source.numel(), values.data_ptr(), values.numel(), code, add)


def _code(dtype: torch.dtype) -> int:
    if dtype not in _CODES:
        raise TypeError(f"expected bfloat16 or float32, got {dtype}; other formats have few bits of exponent to spare")
    return _CODES[dtype]


def _checked(values: Tensor, form: Tensor) -> int:
    for tensor in (values, form):
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise TypeError(
                f"expected contiguous tensors on the CPU, got strides {tensor.stride()} on {tensor.device}; "
                "use .cpu().contiguous()"
            )
    if form.dtype is not torch.uint8:
        raise TypeError(f"expected uint8 for the compressed form, got {form.dtype}")
    return _code(values.dtype)
