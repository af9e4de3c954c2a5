"""The softmax kernels against their references, and against torch.logsumexp in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import kernels
from hybridpar.kernels import softmax_reference as reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# What the exact type, and the dtype of the products, can say: neighbours of a logit of 60 are 4e-6 apart in float32.
EXACT = {torch.float64: 1e-13, torch.float32: 4e-6}
ROUNDED = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Case(NamedTuple):
    chunk: kernels.Chunk
    own: kernels.Own

    @property
    def products(self) -> Tensor:
        return self.chunk.products

    @property
    def exact(self) -> torch.dtype:
        return kernels.exact_dtype(self.products.dtype)

    def logits(self) -> Tensor:
        """In float64."""
        logits = self.products.double()
        if self.chunk.inverse_norms is not None:
            logits = logits * self.chunk.inverse_norms.double()[:, None]
        if self.chunk.bias is not None:
            logits = logits + self.chunk.bias.double()[:, None]
        logits = logits * self.chunk.scale
        logits[self.own.classes, self.own.samples] = self.own.values.double()
        return logits


def _case(classes: int, batch: int, dtype: torch.dtype, *, plain: bool = False, seed: int = 0) -> Case:
    random = torch.Generator().manual_seed(seed)
    exact = kernels.exact_dtype(dtype)
    owners = torch.randperm(batch, generator=random)[: batch // 3] if classes else torch.empty(0, dtype=torch.int64)
    own_classes = torch.sort(torch.randint(max(classes, 1), (len(owners),), generator=random)).values
    chunk = kernels.Chunk(
        (torch.rand(classes, batch, generator=random) * 2 - 1).to(dtype),
        None if plain else torch.rand(classes, generator=random).to(exact) + 0.5,
        None if plain else torch.rand(classes, generator=random).to(exact),
        20.0,
    )
    values = torch.randn(len(owners), generator=random).to(exact) * 10
    return Case(chunk, kernels.Own(own_classes, owners, values))


def _running(batch: int, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.full((batch,), -math.inf, dtype=exact), torch.zeros(batch, dtype=exact)


shapes = st.tuples(st.integers(0, 70), st.integers(0, 140))


@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_chunk_by_chunk_gives_the_log_sum_exp_and_the_weights(
    shape: tuple[int, int], dtype: torch.dtype, plain: bool, chunks: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        maximum, total = _running(shape[1], kernels.exact_dtype(dtype))
        seen = torch.full((1, shape[1]), -math.inf, dtype=torch.float64)
        for chunk in range(chunks):
            case = _case(*shape, dtype, plain=plain, seed=chunk)
            out = torch.empty_like(case.products)
            kernels.add_exponentials(*case, maximum, total, out)
            seen = torch.cat([seen, case.logits()])
            weights = torch.exp(case.logits() - maximum.double().clamp(min=-1e30))
            weights = (
                weights if case.chunk.inverse_norms is None else weights * case.chunk.inverse_norms.double()[:, None]
            )
            weights[case.own.classes, case.own.samples] = 0
            torch.testing.assert_close(out.double(), weights, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
        exact = EXACT[maximum.dtype]
        torch.testing.assert_close(maximum.double(), seen.amax(dim=0), rtol=exact, atol=exact)
        found = maximum.double() + total.double().log()
        torch.testing.assert_close(found, torch.logsumexp(seen, 0), rtol=5 * exact, atol=5 * exact)
    finally:
        torch.set_num_threads(before)


@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_probabilities_are_those_of_a_softmax(
    shape: tuple[int, int], dtype: torch.dtype, plain: bool, with_sums: bool, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = _case(*shape, dtype, plain=plain)
        counts = (torch.arange(shape[1]) % 5 > 0).to(case.exact)
        maximum = (case.logits().amax(dim=0) if shape[0] else torch.zeros(shape[1])).to(case.exact)
        log_total = torch.rand(shape[1]).to(case.exact)
        wanted = torch.exp(case.logits() - maximum.double() - log_total.double()) * counts.double()
        wanted[case.own.classes, case.own.samples] = case.own.values.double()
        sums = torch.full((shape[0],), math.nan, dtype=case.exact) if with_sums else None
        out = torch.empty_like(case.products)
        kernels.to_probabilities(*case, maximum, log_total, counts, out, sums)
        torch.testing.assert_close(out.double(), wanted, rtol=2 * ROUNDED[dtype], atol=2 * ROUNDED[dtype])
        if sums is not None:
            exact = 20 * EXACT[case.exact]
            torch.testing.assert_close(sums.double(), wanted.sum(dim=1), rtol=exact, atol=exact)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_and_references_agree(dtype: torch.dtype) -> None:
    case = _case(257, 130, dtype)
    found, wanted = (_running(130, case.exact) for _ in range(2))
    outs = torch.empty_like(case.products), torch.empty_like(case.products)
    for _ in range(2):
        ours = kernels.add_exponentials(*case, *found, outs[0])
        theirs = reference.add_exponentials(*case, *wanted, outs[1])
        torch.testing.assert_close((ours, *found), (theirs, *wanted), rtol=5 * EXACT[case.exact], atol=1e-12)
        torch.testing.assert_close(*outs, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
    counts, sums = torch.ones(130, dtype=case.exact), [torch.empty(257, dtype=case.exact) for _ in range(2)]
    kernels.to_probabilities(*case, found[0], found[1].log(), counts, outs[0], sums[0])
    reference.to_probabilities(*case, found[0], found[1].log(), counts, outs[1], sums[1])
    torch.testing.assert_close(*outs, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


def test_exponentials_are_right_over_their_whole_range() -> None:
    """Each class a logit of its own, and the maximum 0: what comes out is exp."""
    logits = torch.cat([torch.linspace(-86.9, 0, 9001), torch.tensor([-87.5, -1e4, -3e38])])[:, None].contiguous()
    maximum, total = torch.zeros(1), torch.zeros(1)
    out, nobody = torch.empty_like(logits), torch.empty(0, dtype=torch.int64)
    own = kernels.Own(nobody, nobody, torch.empty(0))
    kernels.add_exponentials(kernels.Chunk(logits, None, None, 1.0), own, maximum, total, out)
    wanted = torch.exp(logits[:-3].double())
    assert float(((out[:-3].double() - wanted) / wanted).abs().max()) < 3e-7 and out[-3:].eq(0).all()
    assert total.item() == pytest.approx(float(wanted.sum()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_reaches_the_total_of_its_sample_alone(bad: float, dtype: torch.dtype) -> None:
    case = _case(40, 70, dtype)
    case.products[7, 66] = bad
    if (case.own.samples == 66).any():
        pytest.fail("expected a sample without a class of its own here")
    maximum, total = _running(70, case.exact)
    kernels.add_exponentials(*case, maximum, total, torch.empty_like(case.products))
    assert total[66].isnan() and total[torch.arange(70) != 66].isfinite().all()


def test_many_callers_share_the_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        case = _case(50, 1000, torch.float32)

        def once(_: int) -> Tensor:
            maximum, total = _running(1000, torch.float32)
            kernels.add_exponentials(*case, maximum, total, torch.empty_like(case.products))
            return total

        with ThreadPoolExecutor(8) as pool:
            totals = list(pool.map(once, range(200)))
        assert all(torch.equal(total, totals[0]) for total in totals)
    finally:
        torch.set_num_threads(before)


def test_wrong_memory_is_refused() -> None:
    case = _case(4, 6, torch.float32)
    maximum, total = _running(6, torch.float32)
    with pytest.raises(TypeError, match="expected products and results of one floating-point dtype and shape"):
        kernels.add_exponentials(*case, maximum, total, torch.empty(4, 5))
    with pytest.raises(TypeError, match=r"expected contiguous torch\.float32 beside the products"):
        kernels.add_exponentials(*case, maximum.double(), total, torch.empty(4, 6))
    turned = case.chunk._replace(products=case.products.T.contiguous().T)
    with pytest.raises(ValueError, match="expected contiguous products"):
        kernels.add_exponentials(turned, case.own, maximum, total, torch.empty(4, 6))
