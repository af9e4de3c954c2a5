"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["polynomial", "linear", "cosine", "constant"]


def learning_rate(peak: float, step: int, steps: int, *, warmup: float, schedule: Schedule) -> float:
    """Of step ``step`` (from 0) of ``steps``: a pure function, so that a resumed run needs no other state.

    Args:
        peak: the highest one.
        warmup: share of the steps in which it rises from 0 in a straight line.
        schedule: how it falls to 0 afterwards; polynomial has power 2.
    """
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    left = 1.0 - (step - rising) / max(steps - rising, 1)
    shape = {
        "polynomial": left**2,
        "linear": left,
        "cosine": 0.5 * (1.0 - math.cos(math.pi * left)),
        "constant": 1.0,
    }
    return peak * shape[schedule]
