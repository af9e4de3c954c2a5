"""The plans that a search may try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridpar.comm.engine.candidates import candidate_grid
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire

MB = 1 << 20
HALF = Wire(torch.bfloat16)


def test_the_grid_holds_what_can_make_a_difference() -> None:
    def values(name: str, grid: Sequence[Plan]) -> set[Any]:
        assert len(set(grid)) == len(grid)
        return {getattr(plan, name) for plan in grid}

    one_host = candidate_grid([4], 2, 100 * MB)
    assert (values("route", one_host), one_host[0]) == ({"auto"}, Plan(4 * MB, 1))
    assert values("route", candidate_grid([1, 1, 1], 1, 100 * MB)) == {"auto"}
    assert values("route", candidate_grid([1, 1], 2, 100 * MB)) == {"auto", "flat"}
    assert values("route", candidate_grid([2, 1], 1, 100 * MB)) == {"auto", "flat"}
    full = candidate_grid([2, 2], 2, 100 * MB, [HALF, Wire()])
    assert values("route", full) == {"auto", "flat", "striped"}
    assert values("wire", full) == {HALF, Wire()}
    assert full[0] == Plan(4 * MB, 3, "auto", HALF)
    assert values("bucket_bytes", full) == {MB, 4 * MB, 16 * MB, 64 * MB}
    # With 10 MiB in all, buckets of 16 MiB are one bucket, and so are those of 64 MiB.
    assert values("bucket_bytes", candidate_grid([4], 1, 10 * MB)) == {MB, 4 * MB, 16 * MB}
    assert values("compress_exponents", one_host) == {False}
    assert values("compress_exponents", candidate_grid([2, 2], 1, 100 * MB, compressible=False)) == {False}
    few = candidate_grid([2, 2], 1, 1000, [Wire(), Wire(torch.float16), Wire(top_k=0.1)])
    assert [(plan.route, plan.wire, plan.compress_exponents) for plan in few] == [
        (route, wire, compressed)
        for route in ("auto", "flat")
        for compressed in (False, True)
        for wire in (Wire(), Wire(torch.float16), Wire(top_k=0.1))
        if not compressed or wire == Wire()
    ]
    for arguments in (([], 1, MB), ([2, 0], 1, MB), ([2], 1, MB, []), ([2], 1, MB, [Wire(), Wire()])):
        with pytest.raises(ValueError, match="expected"):
            candidate_grid(*arguments)
