"""Horovod's reductions, and how scale factors and divisors are applied to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hybridpar.comm.lanes.lane import Op


class ReduceOp(IntEnum):
    """How values are combined over the ranks; numbered as in Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


LANE_OPS: dict[ReduceOp, Op] = {ReduceOp.AVERAGE: "sum", ReduceOp.SUM: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is done to a rank's values before they are combined, and to the result.

    # Note [one factor]
    For sums of floating-point values the factors and the divisor of an average are one factor, applied before the sum:
    it costs no pass over memory, since packing scales anyway, and sums in half precision overflow later. Whole numbers
    are scaled before and after, rounded towards zero each time as Horovod does; their average is divided exactly.

    Attributes:
        before: factor of each rank's values.
        after: factor of the result.
        divisor: what the result is divided by.
    """

    before: float = 1.0
    after: float = 1.0
    divisor: int = 1

    @classmethod
    def of(cls, op: ReduceOp, prescale: float, postscale: float, dtype: torch.dtype, size: int) -> Scaling:
        """Of an operation among ``size`` ranks."""
        divisor = size if op is ReduceOp.AVERAGE else 1
        if dtype.is_floating_point and op in (ReduceOp.AVERAGE, ReduceOp.SUM):
            return cls(before=prescale * postscale / divisor)
        return cls(prescale, postscale, divisor)

    @property
    def finishes(self) -> bool:
        """Whether there is anything to be done to the result."""
        return self.after != 1 or self.divisor != 1

    def start(self, tensor: Tensor) -> None:
        """Scale a rank's values, in place."""
        _scale(tensor, self.before)

    def finish(self, tensor: Tensor) -> None:
        """Scale and divide the result, in place."""
        if self.divisor != 1 and self.after == 1:
            tensor.div_(self.divisor, rounding_mode="trunc")
        elif self.finishes:
            _scale(tensor, self.after / self.divisor)


def _scale(tensor: Tensor, factor: float) -> None:
    if factor == 1:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc())
