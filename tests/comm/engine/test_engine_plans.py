"""Every plan gives the sums of float64 within what its wire may lose, and the ranks the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.group import thread_groups
from tests.ranks import run_threads

BF16, FP16 = torch.bfloat16, torch.float16
# Half the distance between neighbours, relative to their size.
EPSILON = {torch.float64: 2**-53, torch.float32: 2**-24, BF16: 2**-8, FP16: 2**-11}
SMALLEST = {torch.float64: 0.0, torch.float32: 0.0, BF16: 0.0, FP16: 2**-25}
SHAPES = [(1500,), (3, 700), (), (5,), (0,), (2, 3, 2, 2)]
WIRES = [
    Wire(),
    Wire(BF16),
    Wire(FP16),
    Wire(BF16, error_feedback=True),
    Wire(FP16, error_feedback=True),
    Wire(top_k=0.01),
    Wire(BF16, top_k=0.3),
    Wire(top_k=1.0),
]


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _seed(number: int, rank: int, index: int) -> int:
    return 10_000 * number + 100 * rank + index


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 3))
    dtypes = st.sampled_from([torch.float32, torch.float64, BF16, FP16])
    kinds = draw(st.lists(st.tuples(st.sampled_from(SHAPES), dtypes), min_size=1, max_size=6))
    subsets = st.lists(st.sampled_from(range(len(kinds))), unique=True)
    plans = st.builds(Plan, st.sampled_from([1, 5000, 1 << 20]), st.integers(1, 3), wire=st.sampled_from(WIRES))
    return {
        "ranks": ranks,
        "kinds": kinds,
        "scale": draw(st.sampled_from([1.0, 1 / ranks])),
        # For each round: a new plan or None, the seed of a launch order, what each rank submits in what order.
        "rounds": draw(
            st.lists(
                st.tuples(st.none() | plans, st.integers(0, 5), st.tuples(*[subsets] * ranks)), min_size=1, max_size=5
            )
        ),
        "plan": draw(plans),
    }


def _play(group: Any, case: dict[str, Any]) -> list[dict[int, Tensor]]:
    engine = Engine(group, plan=case["plan"], scale=case["scale"])
    names = [f"tensor {index}" for index in range(len(case["kinds"]))]
    engine.register(names, [torch.empty(shape, dtype=dtype) for shape, dtype in case["kinds"]])
    results = []
    for number, (plan, order, submitted) in enumerate(case["rounds"]):
        if plan is not None:
            engine.replan(plan)
        if order:
            engine.replan(engine.plan, torch.randperm(len(engine.buckets), generator=_generator(order)).tolist())
        mine = {
            index: _values(*case["kinds"][index], _seed(number, group.rank, index)) for index in submitted[group.rank]
        }
        for index, tensor in mine.items():
            engine.submit(index, tensor)
        received = engine.flush()
        assert not received.keys() & mine.keys()
        results.append(mine | received)
    assert engine.report()["rounds"] == len(case["rounds"])
    engine.close()
    return results


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check_tensor(found: Tensor, parts: list[Tensor], scale: float, wire: Wire) -> None:
    """Error of a sum that is formed one by one in the format that travels, from parts rounded to it."""
    travels = wire.dtype_of(found.dtype)
    exact = torch.stack([part.double() * scale for part in parts]).sum(0)
    size = torch.stack([part.double().abs() * scale for part in parts]).sum(0)
    unit = (
        EPSILON[travels]
        + EPSILON[found.dtype]
        + 2 * EPSILON[torch.float32 if found.dtype != torch.float64 else torch.float64]
    )
    bound = (len(parts) + 2) * (unit * size + SMALLEST[travels] * 3)
    assert bool(((found.double() - exact).abs() <= bound).all())


@settings(max_examples=80)
@given(_cases())
def test_sums_are_those_of_float64_within_the_bounds_of_the_wire(case: dict[str, Any]) -> None:
    per_rank = run_threads(case["ranks"], _play, case)
    plan, fresh = case["plan"], True
    for number, (new, _, submitted) in enumerate(case["rounds"]):
        plan = new or plan
        for index, (shape, dtype) in enumerate(case["kinds"]):
            senders = [rank for rank in range(case["ranks"]) if index in submitted[rank]]
            found = [results[number].get(index) for results in per_rank]
            if not senders:
                assert found == [None] * case["ranks"]
                continue
            assert all(one is not None and one.dtype == dtype and torch.equal(one, found[0]) for one in found)
            whole = plan.wire.top_k in (None, 1.0) or shape not in SHAPES[:2]
            # What error feedback adds from earlier rounds is the matter of other tests.
            if whole and (fresh or not plan.wire.keeps_residuals):
                parts = [_values(shape, dtype, _seed(number, rank, index)) for rank in senders]
                assert found[0] is not None
                _check_tensor(found[0], parts, case["scale"], plan.wire)
        fresh = False


@pytest.mark.parametrize("route", ["auto", "flat", "hierarchical"])
@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (3, 2)])
def test_ranks_of_several_hosts_agree(route: Any, ranks: int, hosts: int) -> None:
    case: dict[str, Any] = {
        "ranks": ranks,
        "kinds": [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.float64)],
        "scale": 1.0,
        "plan": Plan(5000, 2, route),
    }
    everything = [tuple(range(rank % 2, len(case["kinds"]))) for rank in range(ranks)]
    plans = [Plan(3000, 3, route, wire) for wire in WIRES]
    case["rounds"] = [(None, 0, everything)] + [(plan, 1, everything) for plan in plans]
    with ThreadPoolExecutor(ranks) as pool:
        per_rank = list(pool.map(lambda group: _play(group, case), thread_groups(ranks, hosts=hosts)))
    for number, (plan, _, _) in enumerate(case["rounds"]):
        for index, (shape, dtype) in enumerate(case["kinds"]):
            found = [results[number][index] for results in per_rank]
            assert all(torch.equal(one, found[0]) for one in found)
            if plan is None or not plan.wire.keeps_residuals:
                senders = [rank for rank in range(ranks) if index in everything[rank]]
                parts = [_values(shape, dtype, _seed(number, rank, index)) for rank in senders]
                _check_tensor(found[0], parts, 1.0, (plan or case["plan"]).wire)
