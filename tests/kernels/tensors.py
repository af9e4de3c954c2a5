"""Hypothesis strategies: tensors of odd shapes, strides, dtypes and values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# Around the limits of the half formats, their subnormals and ties, and what no format can count on.
VALUES = [
    0.0, -0.0, 1.0, -1.5, 1 / 3, 65504.0, 65519.99, 65520.0, -70000.0, 2.0**-14, 2.0**-24, 2.0**-25, 3.0 * 2.0**-26,
    1e-40, 1e-300, 3.3e38, 3.4e38, 1e39, 1e300, 1 + 2.0**-8, 1 + 3 * 2.0**-9, 1 + 2.0**-11, 2049.0, float("nan"),
    float("inf"), -float("inf"),
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn, *, writable: bool = False) -> torch.Tensor:
    """Zero to four dimensions of zero to six, as a transposed, sliced, offset or expanded view."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    stored = [0] * len(shape)
    for place, dimension in enumerate(order):
        stored[place] = shape[dimension] * steps[dimension] + 1
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(VALUES), stored, generator=generator)
    values = torch.tensor(VALUES, dtype=torch.float64)[picks].to(dtype)
    inverse = [order.index(dimension) for dimension in range(len(shape))]
    view = values.permute(inverse)
    for dimension, (extent, step) in enumerate(zip(shape, steps, strict=True)):
        view = _every(view, dimension, extent, step)
    if not writable and shape and draw(st.booleans()):
        dimension = draw(st.integers(0, len(shape) - 1))
        if shape[dimension]:
            view = view.narrow(dimension, 0, 1).expand(shape)
    assert list(view.shape) == shape
    return view


def _every(view: torch.Tensor, dimension: int, extent: int, step: int) -> torch.Tensor:
    index = [slice(None)] * view.dim()
    index[dimension] = slice(1, 1 + extent * step, step)
    return view[tuple(index)]


def optional_tensors(*, writable: bool = False) -> st.SearchStrategy[list[torch.Tensor | None]]:
    return st.lists(st.one_of(st.none(), tensors(writable=writable)), max_size=6)
