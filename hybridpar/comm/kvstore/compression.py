"""Compression of what is pushed: 2 bits as MXNet does it, and half precision.

# Note [codes that add up]
MXNet's servers decode what each worker sends and add it up. Here the codes themselves are added, by one all-reduce.
A value becomes -1, 0 or 1 threshold, and is coded as 0, 1 or 2. The codes of n ranks sum to at most 2n, so a field that
is wide enough for 2n holds the sum, and several fields lie side by side in one float32 without ever meeting: it
carries whole numbers below 2^24 exactly, in whatever order the ranks are added. Floats and not integers, because the
engine merges small tensors of floats into buckets. The sum of the codes minus n, times the threshold, is what the
servers would have got: bit for bit on up to 3 ranks and wherever the threshold has few bits, such as 0.5; otherwise a
server rounds once more for each rank, in the order in which the ranks happen to arrive.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_EXACT_BITS = 24  # whole numbers that float32 carries exactly
_CHUNK = 1 << 16  # elements, so that what is read several times stays in the cache


class Coder(ABC):
    """Codes the values of one key; what it keeps from step to step is its own.

    Attributes:
        numel, dtype: of what travels.
    """

    numel: int
    dtype: torch.dtype

    @abstractmethod
    def encode(self, tensor: Tensor, words: Tensor) -> None:
        """Write what travels for ``tensor``, which stays as it is, into ``words`` [numel]."""

    @abstractmethod
    def decode(self, words: Tensor, tensor: Tensor) -> None:
        """Write the sum over the ranks into ``tensor``."""


class Compression(ABC):
    """How pushed values are made smaller. Policies are compared by value: the same on every rank."""

    @abstractmethod
    def applies(self, name: str, dtype: torch.dtype) -> bool:
        """Whether values of this dtype are compressed; otherwise they travel as they are.

        Args:
            name: of the key, for the error.

        Raises:
            TypeError: they cannot be compressed so.
        """

    @abstractmethod
    def coder(self, example: Tensor, ranks: int) -> Coder:
        """A coder for values like ``example``, to which this applies."""


@dataclass(frozen=True)
class TwoBit(Compression):
    """As MXNet's ``2bit``: a value of at least the threshold is sent as the threshold, and the rest is kept for later.

    float32 only. The reasoning is in Note [codes that add up].

    Attributes:
        threshold: above 0; rounded to float32.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        rounded = float(torch.tensor(self.threshold, dtype=torch.float32))
        if not (math.isfinite(rounded) and rounded > 0):
            raise ValueError(f"2bit compression: expected a threshold above 0, got {self.threshold}")
        object.__setattr__(self, "threshold", rounded)

    def applies(self, name: str, dtype: torch.dtype) -> bool:
        if dtype != torch.float32:
            raise TypeError(f"2bit compression of {name}: expected float32, got {_name(dtype)}; cast it first")
        return True

    def coder(self, example: Tensor, ranks: int) -> Coder:
        return TwoBitCoder(example, self.threshold, ranks)


@dataclass(frozen=True)
class Half(Compression):
    """Values travel as float16 or bfloat16, divided by the number of ranks first so that no sum can overflow.

    What is that narrow already travels as it is.

    Attributes:
        dtype: float16 or bfloat16.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"expected float16 or bfloat16 as the wire format, got {_name(self.dtype)}")

    def applies(self, name: str, dtype: torch.dtype) -> bool:
        if not dtype.is_floating_point:
            raise TypeError(
                f"{_name(self.dtype)} compression of {name}: expected floating-point values, got {_name(dtype)}; keep "
                "keys of whole numbers in a store without compression"
            )
        return dtype.itemsize > self.dtype.itemsize

    def coder(self, example: Tensor, ranks: int) -> Coder:
        return HalfCoder(example, self.dtype, ranks)


def compression(params: Mapping[str, Any]) -> Compression:
    """What ``set_gradient_compression`` is given, as a policy.

    Args:
        params: ``{"type": "2bit", "threshold": 0.5}`` (the threshold may be left out), ``{"type": "fp16"}`` or
            ``{"type": "bf16"}``.

    Raises:
        TypeError: not a dictionary.
        ValueError: an unknown type or parameter, or a threshold that is not above 0.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"set_gradient_compression: expected a dictionary, got {type(params).__name__}")
    rest = dict(params)
    kind = rest.pop("type", None)
    found: Compression
    if kind == "2bit":
        threshold = rest.pop("threshold", 0.5)
        try:
            found = TwoBit(float(threshold))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"2bit compression: expected a number as threshold, got {threshold!r}") from error
    elif kind in ("fp16", "bf16"):
        found = Half(torch.float16 if kind == "fp16" else torch.bfloat16)
    else:
        raise ValueError(f"set_gradient_compression: expected type '2bit', 'fp16' or 'bf16', got {kind!r}")
    if rest:
        raise ValueError(f"set_gradient_compression: {kind} has no parameters {sorted(map(str, rest))}")
    return found


class Quantiser:
    """The rule of 2-bit compression for one sequence of values: keeps what was not sent, as MXNet's residual."""

    def __init__(self, example: Tensor, threshold: float) -> None:
        self._threshold = threshold
        self.residual = torch.zeros(example.numel(), dtype=example.dtype, device=example.device)

    def codes(self, values: Tensor, start: int, out: Tensor) -> None:
        """-1, 0 or 1 for ``values`` [n], which begin at element ``start`` of the sequence, into ``out`` [n]."""
        residual = self.residual[start : start + values.numel()]
        residual.add_(values)
        torch.ge(residual, self._threshold, out=out)
        out.sub_(residual.le(-self._threshold).to(out.dtype))
        residual.sub_(out, alpha=self._threshold)


class TwoBitCoder(Coder):
    """Note [codes that add up]. Field k of word w is element k * numel + w, so that all steps run along memory."""

    def __init__(self, example: Tensor, threshold: float, ranks: int) -> None:
        self.bits = (2 * ranks).bit_length()
        self.fields = _EXACT_BITS // self.bits
        if self.fields == 0:
            raise ValueError(f"2bit compression: expected at most {2**23 - 1} ranks, got {ranks}")
        self.dtype, self.numel = torch.float32, -(-example.numel() // self.fields)
        self._threshold, self._ranks = threshold, ranks
        self._quantiser = Quantiser(example, threshold)

    def encode(self, tensor: Tensor, words: Tensor) -> None:
        flat = tensor.reshape(-1)
        scratch = torch.empty(min(_CHUNK, self.numel), device=flat.device)
        for start in range(0, self.numel, _CHUNK):
            part = words[start : start + _CHUNK].zero_()
            for field in range(self.fields):
                first = field * self.numel + start
                values = flat[first : min(first + part.numel(), (field + 1) * self.numel)]
                codes = scratch[: values.numel()]
                self._quantiser.codes(values, first, codes)
                part[: values.numel()].add_(codes.add_(1), alpha=2.0 ** (self.bits * field))

    def decode(self, words: Tensor, tensor: Tensor) -> None:
        flat = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        flat = flat.view(-1)
        mask = (1 << self.bits) - 1
        for start in range(0, self.numel, _CHUNK):
            part = words[start : start + _CHUNK].to(torch.int32)
            for field in range(self.fields):
                first = field * self.numel + start
                target = flat[first : min(first + part.numel(), (field + 1) * self.numel)]
                target.copy_((part[: target.numel()] >> (self.bits * field)) & mask)
                target.sub_(self._ranks).mul_(self._threshold)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


class HalfCoder(Coder):
    """Divides by the number of ranks, rounds to half, and multiplies the sum again."""

    def __init__(self, example: Tensor, dtype: torch.dtype, ranks: int) -> None:
        self.numel, self.dtype, self._ranks = example.numel(), dtype, ranks

    def encode(self, tensor: Tensor, words: Tensor) -> None:
        torch.div(tensor, self._ranks, out=words.view(tensor.shape))

    def decode(self, words: Tensor, tensor: Tensor) -> None:
        tensor.copy_(words.view(tensor.shape)).mul_(self._ranks)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
