"""The largest values of a vector."""

from __future__ import annotations

import math

from torch import Tensor

# From here on a look at a sample pays: it takes a hundredth of the time to find values that may be meant at all.
_SAMPLED = 1 << 16
_SAMPLE = 1 << 14


def largest(values: Tensor, count: int) -> Tensor:
    """Places [count], int64, in any order, of the largest ``values`` [n]; a NaN is larger than all.

    As ``values.topk(count).indices``, but on CPU up to ten times as fast where few of many are sought: a threshold that
    is probably low enough is taken from a sample, and only what reaches it is looked at. If it was too high after all,
    everything is.
    """
    numel = values.numel()
    if values.is_cpu and numel >= _SAMPLED and count * 4 <= numel:
        sample = values[:: numel // _SAMPLE]
        rank = min(len(sample), math.ceil(1.3 * count * len(sample) / numel) + 16)
        threshold = sample.topk(rank).values[-1]
        # Not ">=", for which a NaN does not count.
        candidates = (values < threshold).logical_not_().nonzero().squeeze(1)
        if len(candidates) >= count:
            return candidates[values[candidates].topk(count, sorted=False).indices]
    return values.topk(count, sorted=False).indices
