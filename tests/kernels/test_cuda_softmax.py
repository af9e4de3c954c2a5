"""The CUDA kernels of the softmax, run on the host, against their references and against float64."""

from __future__ import annotations

import math
import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import kernels
from hybridpar.kernels import cuda, softmax, softmax_cuda
from hybridpar.kernels import softmax_reference as reference
from tests.kernels.cuda_host import HostLauncher
from tests.kernels.test_softmax import EXACT, ROUNDED, Case, _case, _running

LAUNCHERS = st.builds(
    HostLauncher,
    blocks=st.integers(1, 5),
    threads=st.sampled_from([32, 64, 96, 256]),
    step=st.integers(1, 99),
    source=st.just("margin_softmax"),
)
PAIRS = [(source, target) for source, targets in softmax_cuda.OUTPUTS.items() for target in targets]
# Batches of up to three tiles of either width, multiples of four among them; classes of up to three segments of 16.
shapes = st.tuples(st.integers(0, 48), st.one_of(st.integers(0, 100), st.integers(1, 70).map(lambda n: 4 * n)))


def launcher(**options: int) -> HostLauncher:
    return HostLauncher(source="margin_softmax", **options)


def add_exponentials(case: Case, running: tuple[Tensor, Tensor], out: Tensor, host: HostLauncher) -> Tensor:
    """As on a CUDA device, whose place ``host`` takes; segments are short, so that small chunks have many."""
    with (
        mock.patch.object(softmax, "_module", return_value=host),
        mock.patch.object(softmax_cuda, "_LEAST_CLASSES", 16),
    ):
        return kernels.add_exponentials(*case, *running, out)


def to_probabilities(
    case: Case, samples: tuple[Tensor, Tensor, Tensor], out: Tensor, sums: Tensor | None, host: HostLauncher
) -> None:
    with (
        mock.patch.object(softmax, "_module", return_value=host),
        mock.patch.object(softmax_cuda, "_LEAST_CLASSES", 16),
    ):
        kernels.to_probabilities(*case, *samples, out, sums)


def same_class_for_all(case: Case) -> Case:
    """All own samples of one class."""
    return case._replace(own=case.own._replace(classes=torch.full_like(case.own.classes, case.products.shape[0] // 2)))


@given(shapes, st.sampled_from(PAIRS), st.booleans(), st.booleans(), st.booleans(), LAUNCHERS)
@settings(max_examples=120, deadline=None)
def test_exponentials_are_the_references(
    shape: tuple[int, int], pair: tuple[torch.dtype, torch.dtype], plain: bool, together: bool, in_place: bool,
    host: HostLauncher,
) -> None:  # fmt: skip
    dtype, target = pair
    ours, theirs = (_running(shape[1], kernels.exact_dtype(dtype)) for _ in range(2))
    for seed in range(2):
        case = _case(*shape, dtype, plain=plain, seed=seed)
        case = same_class_for_all(case) if together else case
        wanted = torch.empty(shape, dtype=target)
        by_reference = reference.add_exponentials(*case, *theirs, wanted)
        out = case.products if in_place and target == dtype else torch.empty(shape, dtype=target)
        rescale = add_exponentials(case, ours, out, host)
        close = {"rtol": 5 * EXACT[case.exact], "atol": 5 * EXACT[case.exact]}
        torch.testing.assert_close((rescale, *ours), (by_reference, *theirs), **close)
        torch.testing.assert_close(out, wanted, rtol=ROUNDED[target], atol=ROUNDED[target])


@given(shapes, st.sampled_from(PAIRS), st.booleans(), st.booleans(), st.booleans(), st.booleans(), LAUNCHERS)
@settings(max_examples=120, deadline=None)
def test_probabilities_are_the_references(
    shape: tuple[int, int], pair: tuple[torch.dtype, torch.dtype], plain: bool, together: bool, with_sums: bool,
    in_place: bool, host: HostLauncher,
) -> None:  # fmt: skip
    dtype, target = pair
    case = _case(*shape, dtype, plain=plain)
    case = same_class_for_all(case) if together else case
    maximum = (case.logits().amax(dim=0) if shape[0] else torch.zeros(shape[1])).to(case.exact)
    samples = maximum, torch.rand(shape[1]).to(case.exact), (torch.arange(shape[1]) % 5 > 0).to(case.exact)
    wanted, sums, sums_wanted = torch.empty(shape, dtype=target), None, None
    if with_sums:
        sums, sums_wanted = (torch.full((shape[0],), math.nan, dtype=case.exact) for _ in range(2))
    reference.to_probabilities(*case, *samples, wanted, sums_wanted)
    out = case.products if in_place and target == dtype else torch.empty(shape, dtype=target)
    to_probabilities(case, samples, out, sums, host)
    torch.testing.assert_close(out, wanted, rtol=2 * ROUNDED[target], atol=2 * ROUNDED[target])
    if sums is not None:
        torch.testing.assert_close(sums, sums_wanted, rtol=20 * EXACT[case.exact], atol=20 * EXACT[case.exact])


@pytest.mark.parametrize("batch", [131, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_grid_and_any_order_of_threads_gives_the_same_bits(dtype: torch.dtype, batch: int) -> None:
    results = []
    for blocks, threads, step in ((1, 256, 1), (7, 256, 3), (16, 256, 101)):
        case, running = _case(150, batch, dtype), _running(batch, torch.float32)
        out, host = torch.empty_like(case.products), launcher(blocks=blocks, threads=threads, step=step)
        rescale = add_exponentials(case, running, out, host)
        samples = running[0], running[1].log(), torch.ones(batch)
        probabilities, sums = torch.empty_like(out), torch.empty(150)
        to_probabilities(case, samples, probabilities, sums, host)
        results.append((rescale, *running, out, probabilities, sums))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_a_long_run_of_chunks_gives_the_log_sum_exp() -> None:
    running = _running(36, torch.float32)
    seen = []
    for seed in range(20):
        case = _case(33, 36, torch.float32, seed=seed)
        add_exponentials(case, running, torch.empty_like(case.products), launcher())
        seen.append(case.logits())
    found = running[0].double() + running[1].double().log()
    torch.testing.assert_close(found, torch.logsumexp(torch.cat(seen), 0), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_not_finite_reaches_the_total_of_its_sample_alone(bad: float, dtype: torch.dtype) -> None:
    case = _case(40, 72, dtype)
    others = torch.arange(72) != 66
    assert not (case.own.samples == 66).any()
    case.products[7, 66] = bad
    running = _running(72, case.exact)
    add_exponentials(case, running, torch.empty_like(case.products), launcher())
    assert running[1][66].isnan() and running[1][others].isfinite().all()


def test_logits_of_minus_infinity_add_nothing() -> None:
    case, running = _case(20, 40, torch.float32, plain=True), _running(40, torch.float32)
    case.products.fill_(-math.inf)
    case.own.values.fill_(-math.inf)
    out = torch.empty_like(case.products)
    assert add_exponentials(case, running, out, launcher()).eq(1).all()
    assert running[0].eq(-math.inf).all() and running[1].eq(0).all() and out.eq(0).all()


def test_vectors_are_taken_only_where_everything_is_aligned() -> None:
    for batch, begin, width in ((128, 0, 4), (128, 1, 1), (128, 4, 4), (126, 0, 1)):
        case, host, running = _case(10, batch, torch.float32), launcher(), _running(batch, torch.float32)
        out = torch.empty(10 * batch + begin)[begin:].view(10, batch)
        add_exponentials(case, running, out, host)
        assert host.launched == [
            f"maxima_float32_{width}",
            f"exponentials_float32_to_float32_{width}",
            "finish_float32",
        ]


@given(st.integers(1, 200_000), st.integers(1, 20_000), st.sampled_from([1, 4]))
def test_tiles_and_segments_cover_a_chunk(classes: int, batch: int, width: int) -> None:
    tiles, segment, segments = softmax_cuda._division(classes, batch, width)
    assert (tiles - 1) * 32 * width < batch <= tiles * 32 * width
    assert (segments - 1) * segment < classes <= segments * segment
    assert segments <= 64 and (segments == 1 or segments * tiles <= 256)


def test_every_kernel_that_can_be_asked_for_is_in_the_source() -> None:
    text = cuda.source("margin_softmax")
    pairs = {f"{source}_to_{target}".replace("torch.", "") for source, target in PAIRS}
    assert set(re.findall(r"^HYBRIDPAR_RESULTS\((\w+)", text, re.MULTILINE)) == pairs
    names = {str(dtype).removeprefix("torch.") for dtype in softmax_cuda.OUTPUTS}
    assert set(re.findall(r"^HYBRIDPAR_MAXIMA\(maxima_(\w+)", text, re.MULTILINE)) == names
    assert set(re.findall(r"^HYBRIDPAR_FINISH_EXPONENTIALS\(finish_(\w+)", text, re.MULTILINE)) == {
        "float32",
        "float64",
    }


def test_wrong_memory_is_refused() -> None:
    case, running = _case(4, 6, torch.bfloat16), _running(6, torch.float32)
    with pytest.raises(TypeError, match="expected products and results of one floating-point dtype and shape"):
        add_exponentials(case, running, torch.empty(4, 6), launcher())
    with pytest.raises(ValueError, match="expected all tensors on one device, got cpu, meta"):
        add_exponentials(case, (running[0], running[1].to("meta")), torch.empty_like(case.products), launcher())


def test_autograd_notices_what_was_written() -> None:
    case, running = _case(4, 6, torch.float32), _running(6, torch.float32)
    versions = [tensor._version for tensor in running]
    add_exponentials(case, running, torch.empty_like(case.products), launcher())
    assert all(tensor._version > version for tensor, version in zip(running, versions, strict=True))
