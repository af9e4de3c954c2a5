"""Bundles: small gradients that are sent as one tensor, always the same ones.

# Note [bundles]
A gradient that is sent by itself costs its rank some tens of microseconds, however small it is. So those of up to
32 KiB are put together once and for all, in the order in which backward is expected to reach them. What is in a bundle
is a function of the names, shapes and dtypes of the parameters; a bundle says all of them when the ranks find out what
they ask for, so that models that differ are noticed, and the first parameter that does is named. In a bundle all
gradients are dense, and in the dtype of the compression; they get their own layout and dtype back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.any_order.sender import FLOATS
from hybridpar.comm.horovod.compression import BF16Compressor, FP16Compressor, NoneCompressor
from hybridpar.comm.horovod.request import Operation
from hybridpar.kernels import pack, unpack
from hybridpar.kernels.pack_table import PackTable

_SMALL_BYTES, _BUNDLE_BYTES = 32 << 10, 1 << 20
_WIRE = {NoneCompressor: None, FP16Compressor: torch.float16, BF16Compressor: torch.bfloat16}


@dataclass(eq=False)
class Bundle:
    """Parameters whose gradients are sent as one tensor.

    Attributes:
        name: the same on all ranks.
        detail: of every parameter: name, dtype and shape.
        dtype: on the way.
        missing: the parameters whose gradients are not ready.
        operation: while the gradients are on their way.
    """

    name: str
    detail: str
    dtype: torch.dtype
    parameters: tuple[nn.Parameter, ...]
    counts: tuple[int, ...]
    missing: set[nn.Parameter] = field(default_factory=set)
    operation: Operation | None = None
    buffer: Tensor | None = None

    def __post_init__(self) -> None:
        self.missing = set(self.parameters)
        self._table = PackTable(self.counts, self.parameters[0].dtype)

    def packed(self) -> Tensor:
        """The gradients, one behind the other; zeros for those that no backward has reached."""
        if self.buffer is None:
            self.buffer = torch.empty(sum(self.counts), dtype=self.dtype, device=self.parameters[0].device)
        held = [one.grad for one in self.parameters]
        grads = [grad if grad is None or grad.layout == torch.strided else grad.to_dense() for grad in held]
        if self._fits_table(grads):
            self._table.pack(grads, self.buffer)
        else:
            pack(grads, self.counts, self.buffer)
        return self.buffer

    def unpack(self) -> None:
        """The inverse."""
        assert self.buffer is not None
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        grads = [one.grad for one in self.parameters if one.grad is not None]
        dense = [
            grad if grad.layout == torch.strided else torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            for grad in grads
        ]
        if self._fits_table(dense):
            self._table.unpack(self.buffer, dense)
        else:
            unpack(self.buffer, self.counts, dense)
        for parameter, grad, values in zip(self.parameters, grads, dense, strict=True):
            if grad is not values:
                parameter.grad = values.to_sparse(grad.sparse_dim())

    def _fits_table(self, grads: Sequence[Tensor | None]) -> bool:
        """Parameters may ask for gradients of another dtype than their own."""
        return {grad.dtype for grad in grads if grad is not None} <= {self.parameters[0].dtype}

    def reset(self) -> None:
        """For the next step."""
        self.operation = None
        self.missing.update(self.parameters)


def plan_bundles(names: Mapping[nn.Parameter, str], compression: Any) -> list[Bundle]:
    """Note [bundles].

    Args:
        names: of the parameters, the same and in the same order on all ranks.
        compression: where it is not one of ours there are no bundles: it may look at each gradient.
    """
    if not (isinstance(compression, type) and compression in _WIRE):
        return []
    closed: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(list(names)):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if size > _SMALL_BYTES or parameter.dtype not in FLOATS:
            continue
        if kind not in filling or filled[kind] + size > _BUNDLE_BYTES:
            filling[kind], filled[kind] = [], 0
            closed.append(filling[kind])
        filling[kind].append(parameter)
        filled[kind] += size
    return [_bundle(members, names, compression) for members in closed if len(members) > 1]


def _bundle(members: list[nn.Parameter], names: Mapping[nn.Parameter, str], compression: Any) -> Bundle:
    told = [f"{names[one]}: {str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in members]
    name = f"allreduce.{names[members[0]]} and others"
    dtype = _WIRE[compression] or members[0].dtype
    return Bundle(name, "; ".join(told), dtype, tuple(members), tuple(one.numel() for one in members))
