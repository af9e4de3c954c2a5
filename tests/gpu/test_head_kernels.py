"""The kernels of the head on CUDA tensors: against their references there, without waiting, and in CUDA graphs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar import kernels
from hybridpar.kernels import cuda, rows_reference, softmax_cuda, softmax_reference
from hybridpar.kernels.rows import Gradient, Rounding, Rows
from tests.gpu.device import DEVICE
from tests.kernels.test_cuda_rows import KINDS, apply
from tests.kernels.test_rows import CLOSE, DTYPES, NEAREST, _gradient, _rows, _state, _twin
from tests.kernels.test_softmax import EXACT, ROUNDED, Case, _case, _running

pytestmark = pytest.mark.gpu

PAIRS = [(source, target) for source, targets in softmax_cuda.OUTPUTS.items() for target in targets]
# The device's exp differs from the host's by a few units in the last place.
TIMES = 2
Struct = TypeVar("Struct", bound=tuple[Any, ...])


def there(struct: Struct) -> Struct:
    """A named tuple with its tensors on the device."""
    moved = (value.to(DEVICE) if isinstance(value, Tensor) else value for value in struct)
    return type(struct)(*moved)


def case_there(classes: int, batch: int, dtype: torch.dtype, **options: Any) -> Case:
    case = _case(classes, batch, dtype, **options)
    return Case(there(case.chunk), there(case.own))


def running_there(batch: int, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    maximum, total = _running(batch, exact)
    return maximum.to(DEVICE), total.to(DEVICE)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["margin_softmax", "row_update"])
def test_the_compiled_kernels_are_used(name: str) -> None:
    assert cuda.find_module(name, DEVICE) is not None, "see the warning in the log"


shapes = st.tuples(st.integers(0, 700), st.one_of(st.integers(0, 300), st.integers(1, 300).map(lambda n: 4 * n)))


@given(shapes, st.sampled_from(PAIRS), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_exponentials_are_the_references(
    shape: tuple[int, int], pair: tuple[torch.dtype, torch.dtype], plain: bool, in_place: bool
) -> None:
    dtype, target = pair
    ours, theirs = (running_there(shape[1], kernels.exact_dtype(dtype)) for _ in range(2))
    for seed in range(2):
        case = case_there(*shape, dtype, plain=plain, seed=seed)
        wanted = torch.empty(shape, dtype=target, device=DEVICE)
        by_reference = softmax_reference.add_exponentials(*case, *theirs, wanted)
        out = case.products if in_place and target == dtype else torch.empty_like(wanted)
        rescale = kernels.add_exponentials(*case, *ours, out)
        exact, rounded = TIMES * 5 * EXACT[case.exact], TIMES * ROUNDED[target]
        torch.testing.assert_close((rescale, *ours), (by_reference, *theirs), rtol=exact, atol=exact)
        torch.testing.assert_close(out, wanted, rtol=rounded, atol=rounded)


@given(shapes, st.sampled_from(PAIRS), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_probabilities_are_the_references(
    shape: tuple[int, int], pair: tuple[torch.dtype, torch.dtype], plain: bool, with_sums: bool
) -> None:
    dtype, target = pair
    case = case_there(*shape, dtype, plain=plain)
    maximum = (case.logits().amax(dim=0) if shape[0] else torch.zeros(shape[1], device=DEVICE)).to(case.exact)
    samples = maximum, torch.rand_like(maximum), (torch.arange(shape[1], device=DEVICE) % 5 > 0).to(case.exact)
    outs = [torch.empty(shape, dtype=target, device=DEVICE) for _ in range(2)]
    sums = [maximum.new_full((shape[0],), math.nan) if with_sums else None for _ in range(2)]
    kernels.to_probabilities(*case, *samples, outs[0], sums[0])
    softmax_reference.to_probabilities(*case, *samples, outs[1], sums[1])
    rounded, exact = TIMES * 2 * ROUNDED[target], TIMES * 20 * EXACT[case.exact]
    torch.testing.assert_close(*outs, rtol=rounded, atol=rounded)
    if with_sums:
        torch.testing.assert_close(*sums, rtol=exact, atol=exact)


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.integers(0, 300), st.one_of(st.integers(1, 70), st.sampled_from([128, 512, 1024, 1301])),
    st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_row_kernel_does_what_its_reference_does(
    kind: str, count: int, width: int, dtype: torch.dtype, product: torch.dtype, state: torch.dtype,
    normalized: bool, picked: bool,
) -> None:  # fmt: skip
    host = _rows(count, max(width, 4) if normalized else width, dtype, normalized=normalized, picked=picked)
    gradient = there(_gradient(host, product))
    states = [_state(host, state).to(DEVICE), _state(host, state, positive=True).to(DEVICE)]
    ours, theirs, twins = there(host), there(_twin(host)), [one.clone() for one in states]
    found = apply(kernels, kind, ours, gradient, states)
    wanted = apply(rows_reference, kind, theirs, gradient, twins)
    tolerance = TIMES * 10 * max(CLOSE[dtype], CLOSE[state], CLOSE[product] if kind == "load" else 0)
    for one, other in zip((*found, *states), (*wanted, *twins), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [6, 512, 700])
@pytest.mark.parametrize("picked", [False, True])
def test_rows_and_momenta_are_rounded_at_random_as_the_reference_does_bit_for_bit(picked: bool, width: int) -> None:
    """Linear rows: with no sum over a row, every product and sum is rounded as PyTorch's are."""
    host = _rows(90, width, torch.bfloat16, normalized=False, picked=picked)
    ours, theirs, gradient = there(host), there(_twin(host)), there(_gradient(host, torch.float32))
    before = ours.weight.clone()
    momenta = [torch.randn(host.weight.shape, generator=torch.Generator().manual_seed(1)).bfloat16() for _ in range(2)]
    momenta = [one.to(DEVICE) for one in momenta]
    rounding, policy = Rounding(True, 2**64 - 5), kernels.Sgd(0.1, 0.9, 0.01, True)
    kernels.step_sgd(ours, gradient, momenta[0], policy, rounding)
    rows_reference.step_sgd(theirs, gradient, momenta[1], policy, rounding)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(*momenta)
    assert not torch.equal(ours.weight, before)


def _step(case: Case, rows: Rows, momentum: Tensor, factor: Tensor) -> list[Tensor]:
    """All that a chunk of a step of the head launches, but for the products."""
    batch = case.products.shape[1]
    maximum = torch.full((batch,), -math.inf, device=DEVICE)
    total, out = torch.zeros_like(maximum), torch.empty_like(case.products, dtype=torch.bfloat16)
    rescale = kernels.add_exponentials(*case, maximum, total, out)
    sums, probabilities = torch.empty(len(case.products), device=DEVICE), torch.empty_like(out)
    kernels.to_probabilities(*case, maximum, total.log(), torch.ones_like(total), probabilities, sums)
    loaded = torch.empty((rows.size, rows.weight.shape[1]), dtype=torch.bfloat16, device=DEVICE)
    kernels.load_rows(rows, loaded)
    gradient = Gradient(loaded.float(), factor)
    kernels.step_sgd(rows, gradient, momentum, kernels.Sgd(0.1, 0.9, 0.01), Rounding(True, 3))
    return [maximum, total, out, rescale, probabilities, sums, loaded]


def _inputs() -> tuple[Case, Rows, Tensor, Tensor]:
    rows = there(_rows(200, 512, torch.bfloat16, picked=True))
    factor = torch.tensor(0.25, device=DEVICE)
    return case_there(200, 256, torch.float32), rows, torch.zeros_like(rows.weight), factor


def test_nothing_waits_for_the_device() -> None:
    inputs = _inputs()
    _step(*inputs)  # compiles
    with no_waiting():
        _step(*inputs)


def test_a_cuda_graph_does_what_it_was_made_of_and_again_with_the_same_bits() -> None:
    eager, captured = _inputs(), _inputs()
    wanted = [*_step(*eager), eager[1].weight, eager[1].inverse_norms, eager[2]]
    before = [captured[1].weight.clone(), captured[1].inverse_norms.clone()]  # type: ignore[union-attr]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = _step(*captured)
    for _ in range(2):
        captured[1].weight.copy_(before[0])
        captured[1].inverse_norms.copy_(before[1])  # type: ignore[union-attr]
        captured[2].zero_()
        graph.replay()
        for one, other in zip([*made, captured[1].weight, captured[1].inverse_norms, captured[2]], wanted, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


def test_work_is_ordered_on_the_current_stream() -> None:
    case, running = case_there(300, 128, torch.float32), running_there(128, torch.float32)
    wanted = kernels.add_exponentials(*case, *running, torch.empty_like(case.products)), *running
    products, out = case.products.clone(), torch.empty_like(case.products)
    later = Case(case.chunk._replace(products=torch.zeros_like(products)), case.own)
    fresh = running_there(128, torch.float32)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later.products.copy_(products)
        found = kernels.add_exponentials(*later, *fresh, out), *fresh
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("sampler", [None, hp.UniformSampler(rate=0.5)])
def test_a_step_waits_as_often_for_many_chunks_as_for_one(sampler: Any) -> None:
    waits = []
    for chunk_classes in (1000, 50):
        head = hp.ShardedClassifier(
            40, 1000, optimizer=hp.RowSGD(0.1, momentum=0.9), sampler=sampler, chunk_classes=chunk_classes,
            device=DEVICE, group=hp.Group.alone(),
        )  # fmt: skip
        features = torch.randn(36, 40, device=DEVICE, requires_grad=True)
        labels = torch.randint(1000, (36,), device=DEVICE)
        head(features, labels).backward()  # compiles, and measures the rows
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                head(features, labels).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(len(seen))
        head.close()
    assert waits[0] == waits[1] > 0


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("optimizer", [hp.RowSGD(0.5, momentum=0.9), hp.RowAdamW(0.01, eps=1e-3), hp.RowAdagrad(0.1)])
def test_a_head_trains_as_on_the_cpu(optimizer: Any, sampled: bool, compute_dtype: torch.dtype) -> None:
    rows, losses = [], []
    for device in ("cpu", DEVICE):
        head = hp.ShardedClassifier(
            40, 1000, optimizer=optimizer, compute_dtype=compute_dtype, device=device, chunk_classes=300,
            sampler=hp.UniformSampler(rate=0.3) if sampled else None, group=hp.Group.alone(),
        )  # fmt: skip
        random = torch.Generator().manual_seed(0)
        taken = []
        for _ in range(4):
            features = torch.randn(36, 40, generator=random).to(device).requires_grad_()
            loss = head(features, torch.randint(1000, (36,), generator=random).to(device))
            loss.backward()
            taken.append(loss.item())
        rows.append(head.weight.detach().cpu())
        losses.append(taken)
        head.close()
    # In bfloat16 the CPU rounds products, CUDA does not: rows then differ as those of float32 and bfloat16 products do.
    by_loss, by_rows = (1e-4, 1e-3) if compute_dtype == torch.float32 else (1e-2, 0.2)
    assert losses[1] == pytest.approx(losses[0], rel=by_loss)
    assert (rows[1] - rows[0]).norm() < by_rows * rows[0].norm()


def test_steps_without_a_gradient_are_rounded_to_the_nearest_where_asked() -> None:
    host = _rows(30, 64, torch.bfloat16)
    ours, theirs = there(host), there(_twin(host))
    matrices = torch.rand(30, 4, dtype=torch.float64, device=DEVICE)
    momenta = [torch.ones_like(ours.weight), torch.ones_like(ours.weight)]
    kernels.advance_rows(ours, momenta[0], matrices, NEAREST)
    rows_reference.advance_rows(theirs, momenta[1], matrices, NEAREST)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(*momenta)
