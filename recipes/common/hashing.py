"""Random numbers that are a pure function of counters.

A value depends on (seed, counters) alone: not on call order, batch, process or rank. The mixing step is the output
function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def hash_counters(seed: int, *counters: npt.NDArray[Any] | int) -> UInt64Array:
    """Hash integer counters, which broadcast against each other, to uniform uint64 values (at least one dimension)."""
    value = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    for counter in counters:
        if isinstance(counter, int):
            words = np.array([counter & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        else:
            words = counter.astype(np.uint64)
        value = _mix((_mix(value) ^ words) + _STEP)
    return value


def uniform(seed: int, *counters: npt.NDArray[Any] | int) -> npt.NDArray[np.float64]:
    """Uniform float64 values in [0, 1) with 53 random bits."""
    return (hash_counters(seed, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(words: UInt64Array) -> npt.NDArray[np.float32]:
    """Bell-shaped float32 values, mean 0 and deviation 1, one per hash word.

    The sum of the word's four 16-bit parts (Irwin-Hall): bounded by 3.47, and made of integers, so that the result is
    the same bits on every machine, which logarithms and cosines are not.
    """
    parts = np.zeros(words.shape, dtype=np.int32)
    for shift in (0, 16, 32, 48):
        parts += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int32)
    deviation = 65536.0 / np.sqrt(3.0)
    return ((parts - 131070).astype(np.float32) * np.float32(1.0 / deviation)).astype(np.float32)


def _mix(value: UInt64Array) -> UInt64Array:
    """One SplitMix64 output step; uint64 arrays wrap without a warning."""
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
