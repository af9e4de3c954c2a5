"""pack and unpack in plain PyTorch: the twin of csrc/pack.cc and csrc/cuda/pack.cu, where neither serves and as their
test oracle.

The door, `hybridpar.kernels.pack` and `unpack`, has checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(
    tensors: Sequence[torch.Tensor | None], counts: Sequence[int], bucket: torch.Tensor, scale: float = 1.0
) -> int | torch.Tensor:
    """See `hybridpar.kernels.pack`."""
    nonfinite = torch.zeros((), dtype=torch.int64, device=bucket.device)
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(bucket, list(counts)), strict=True):
            if tensor is None:
                part.zero_()
                continue
            nonfinite += _nonfinite(tensor)
            part.copy_(_scaled(tensor.reshape(-1), scale, part.dtype))
    return _read(nonfinite)


def unpack(
    bucket: torch.Tensor, counts: Sequence[int], tensors: Sequence[torch.Tensor | None], scale: float = 1.0
) -> int | torch.Tensor:
    """See `hybridpar.kernels.unpack`."""
    nonfinite = torch.zeros((), dtype=torch.int64, device=bucket.device)
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(bucket, list(counts)), strict=True):
            if tensor is None:
                continue
            nonfinite += _nonfinite(part)
            tensor.copy_(_scaled(part, scale, tensor.dtype).view(tensor.shape))
    return _read(nonfinite)


def _read(count: torch.Tensor) -> int | torch.Tensor:
    """On a device the count stays there: reading it would wait."""
    return int(count) if count.is_cpu else count


def _nonfinite(values: torch.Tensor) -> torch.Tensor:
    return values.isfinite().logical_not_().sum()


def _scaled(values: torch.Tensor, scale: float, target: torch.dtype) -> torch.Tensor:
    """The product in float64 where either end is float64, else float32; float64 -> half goes by way of float32."""
    if values.dtype == target and scale == 1.0:
        return values
    compute = torch.float64 if torch.float64 in (values.dtype, target) else torch.float32
    product = values.to(compute) * scale
    return product if target == torch.float64 else product.to(torch.float32).to(target)
