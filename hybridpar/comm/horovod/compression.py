"""Compression of what is sent: a smaller dtype on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What ``compression=`` takes: classes or objects with these two methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The result, from what arrived."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """As float16, and the dtype before."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """In the dtype before."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors as bfloat16, which has the range of float32; others as they are. Not in Horovod."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """As bfloat16, and the dtype before."""
        return (tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point else tensor), tensor.dtype


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compression(compression: Any) -> Any:
    """Raises TypeError for what has no ``compress`` and ``decompress``."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression: expected hvd.Compression.none, .fp16, .bf16, or something with compress() and decompress(), "
            f"got {compression!r}"
        )
    return compression
