"""The rows that a head starts with, against the formula."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hybridpar.kernels import draw_normal_rows

STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return state ^ (state >> np.uint64(31))


def _by_formula(ids: Tensor, width: int, seed: int, std: float) -> Tensor:
    """float64 [n, width]."""
    start = _mixed(np.array([seed & (1 << 64) - 1], dtype=np.uint64) + STEP)
    counters = ids.numpy().astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    cells = (_mixed(counters * STEP + start) >> np.uint64(41)).astype(np.float64)
    return std * torch.special.ndtri(torch.from_numpy((cells + 0.5) / 2**23))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 513])
@pytest.mark.parametrize("seed", [0, 7, -1, 1 << 63])
def test_rows_are_quantiles_of_the_normal_distribution_at_hashed_places(
    dtype: torch.dtype, width: int, seed: int
) -> None:
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:300] + (1 << 40)
    rows = draw_normal_rows(torch.full((300, width), 7, dtype=dtype), ids, seed=seed, std=0.25)
    expected = _by_formula(ids, width, seed, 0.25)
    half = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 0)
    torch.testing.assert_close(rows.double(), expected, rtol=1e-6 + half, atol=1e-9 + half * 2**-10)


def test_a_row_depends_on_nothing_but_its_class_and_rows_have_the_moments_of_a_normal_distribution() -> None:
    ids = torch.arange(5000)
    rows = draw_normal_rows(torch.empty(5000, 96), ids, seed=3, std=1.0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        some = torch.tensor([4999, 0, 17, 17])
        assert torch.equal(draw_normal_rows(torch.empty(4, 96), some, seed=3, std=1.0), rows[some])
        assert torch.equal(draw_normal_rows(torch.empty(5000, 96), ids, seed=3, std=1.0), rows)
    finally:
        torch.set_num_threads(threads)
    values, deviation = rows.double().flatten(), 1 / rows.numel() ** 0.5
    assert abs(float(values.mean())) < 5 * deviation
    assert abs(float(values.square().mean()) - 1) < 5 * 2**0.5 * deviation
    assert abs(float(values.pow(4).mean()) - 3) < 5 * 96**0.5 * deviation
    assert len(draw_normal_rows(torch.empty(0, 4), ids[:0], seed=0, std=1.0)) == 0


def test_what_is_not_rows_and_their_classes_is_refused() -> None:
    rows, ids = torch.empty(4, 8), torch.arange(4)
    for wrong in (rows.int(), rows.T, rows.flatten()):
        with pytest.raises(TypeError, match=r"expected contiguous floating-point rows \[n, D\] on the CPU, got"):
            draw_normal_rows(wrong, ids, seed=0, std=1.0)
    for wrong in (ids.int(), ids[:3]):
        with pytest.raises(TypeError, match=r"expected int64 \[4\] on the CPU, got"):
            draw_normal_rows(rows, wrong, seed=0, std=1.0)
