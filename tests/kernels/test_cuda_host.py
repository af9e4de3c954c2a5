"""What stands for a device in the tests of the CUDA kernels does what a device does."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels.cuda_host import library


@pytest.mark.parametrize("for_block", [False, True])
@pytest.mark.parametrize(("missing", "stuck"), [(0, 1), (40, 1), (64, 0)])
def test_threads_that_wait_for_one_that_never_comes_are_counted(missing: int, stuck: int, for_block: bool) -> None:
    library().wait_without(ctypes.c_uint(missing), ctypes.c_bool(for_block))
    assert library().take_stuck() == stuck
    assert library().take_stuck() == 0


@pytest.mark.parametrize("step", [1, 7, 63])
@pytest.mark.parametrize("mask", [1, 2, 16, 21])
def test_threads_of_a_warp_exchange_values(mask: int, step: int) -> None:
    found = (ctypes.c_longlong * 64)()
    library().shuffle(ctypes.c_int(mask), ctypes.c_longlong(step), found)
    assert list(found) == [thread ^ mask for thread in range(64)]
    assert library().take_stuck() == 0
