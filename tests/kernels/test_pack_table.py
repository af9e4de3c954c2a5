"""A table packs and unpacks as the door does, whatever is out of the ordinary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.kernels import pack, unpack
from hybridpar.kernels.pack_table import PackTable

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KINDS = ["plain", "missing", "strided", "empty", "nan", "inference"]


def _tensor(kind: str, dtype: torch.dtype, seed: int) -> Tensor | None:
    if kind == "missing":
        return None
    if kind == "empty":
        return torch.empty(0, dtype=dtype)
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if kind == "strided":
        return values.t()
    if kind == "nan":
        values[1, 2] = torch.nan
    if kind == "inference":
        with torch.inference_mode():
            return values + 1
    return values


@given(st.lists(st.sampled_from(KINDS), max_size=5), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_a_table_does_what_the_door_does(kinds: list[str], dtype: torch.dtype, wire: torch.dtype) -> None:
    tensors = [_tensor(kind, dtype, seed) for seed, kind in enumerate(kinds)]
    counts = [0 if kind == "empty" else 12 for kind in kinds]
    table = PackTable(counts, dtype)
    buckets = [torch.full((sum(counts),), 7.0, dtype=wire) for _ in range(2)]
    assert table.pack(tensors, buckets[0], 0.5) == pack(tensors, counts, buckets[1], 0.5)
    assert torch.equal(buckets[0].nan_to_num(9), buckets[1].nan_to_num(9))
    given_back = [[None if t is None else torch.empty_like(t) for t in tensors] for _ in range(2)]
    assert table.unpack(buckets[0], given_back[0], 4.0) == unpack(buckets[1], counts, given_back[1], 4.0)
    for ours, theirs in zip(*given_back, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))


def test_autograd_notices_what_was_unpacked() -> None:
    weight = torch.ones(3, requires_grad=True)
    product = (weight * (saved := torch.ones(3))).sum()
    PackTable([3], torch.float32).unpack(torch.zeros(3), [saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
