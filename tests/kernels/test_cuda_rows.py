"""The CUDA kernels of the rows, run on the host, against their references, torch.optim and the compiled CPU kernels."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import kernels
from hybridpar.kernels import cuda, rows_cuda
from hybridpar.kernels import rows as doors
from hybridpar.kernels import rows_reference as reference
from hybridpar.kernels.rows import Gradient, Rounding, Rows
from tests.kernels.cuda_host import HostLauncher
from tests.kernels.test_rows import CLOSE, DTYPES, NEAREST, _apply, _gradient, _rows, _state, _twin

LAUNCHERS = st.builds(
    HostLauncher,
    blocks=st.integers(1, 4),
    threads=st.sampled_from([32, 64, 256]),
    step=st.integers(1, 99),
    source=st.just("row_update"),
)
# A strip is 512 elements of float32, or 256 of float64: shorter rows, a few longer ones, multiples of four among both.
WIDTHS = st.one_of(st.integers(1, 70), st.integers(1, 40).map(lambda n: 4 * n), st.sampled_from([255, 512, 516, 1301]))
KINDS = ("sgd", "sgd without momentum", "nesterov", "adamw", "adagrad", "advance", "project", "load", "measure")


class OnDevice:
    """The doors as for a CUDA device, whose place ``host`` takes."""

    def __init__(self, host: HostLauncher) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            with mock.patch.object(doors, "_module", return_value=self.host):
                getattr(doors, name)(*arguments)

        return call


def launcher(**options: int) -> HostLauncher:
    return HostLauncher(source="row_update", **options)


def apply(module: Any, kind: str, rows: Rows, gradient: Gradient, states: list[Tensor]) -> list[Tensor]:
    if kind != "measure":
        return _apply(module, kind, rows, gradient, states)
    if rows.inverse_norms is not None:
        rows.inverse_norms[rows.selection] = -1.0
        module.measure_rows(rows)
    return [rows.weight, *([] if rows.inverse_norms is None else [rows.inverse_norms])]


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.integers(0, 12), WIDTHS, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.booleans(), st.booleans(), LAUNCHERS,
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_kernel_does_what_its_reference_does(
    kind: str, count: int, width: int, dtype: torch.dtype, product: torch.dtype, state: torch.dtype,
    normalized: bool, picked: bool, host: HostLauncher,
) -> None:  # fmt: skip
    # Of a unit row with one element there is no gradient but rounding.
    ours = _rows(count, max(width, 4) if normalized else width, dtype, normalized=normalized, picked=picked)
    theirs, gradient = _twin(ours), _gradient(ours, product)
    states = [_state(ours, state), _state(ours, state, positive=True)]
    twins = [one.clone() for one in states]
    found = apply(OnDevice(host), kind, ours, gradient, states)
    wanted = apply(reference, kind, theirs, gradient, twins)
    tolerance = 10 * max(CLOSE[dtype], CLOSE[state], CLOSE[product] if kind == "load" else 0)
    for one, other in zip((*found, *states), (*wanted, *twins), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [6, 128, 516])
@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adagrad", "advance"])
def test_rows_and_momenta_are_rounded_at_random_as_the_reference_does_bit_for_bit(
    kind: str, picked: bool, width: int
) -> None:
    """Linear rows: with no sum over a row, every product and sum is rounded as PyTorch's are."""
    ours = _rows(40, width, torch.bfloat16, normalized=False, picked=picked)
    theirs, gradient = _twin(ours), _gradient(ours, torch.float32)
    rounding = Rounding(True, 2**64 - 5)
    momenta = [torch.randn(ours.weight.shape).bfloat16() for _ in range(1)]
    momenta.append(momenta[0].clone())
    matrices = torch.rand(40, 4, dtype=torch.float64)
    for module, rows, momentum in ((OnDevice(launcher()), ours, momenta[0]), (reference, theirs, momenta[1])):
        if kind == "advance":
            module.advance_rows(rows, momentum, matrices, rounding)
        elif kind == "adagrad":
            # So large that what the gradient adds is lost: its sum over a row may be added up in another order.
            module.step_adagrad(rows, gradient, torch.full((45,), 1e12), kernels.Adagrad(1e5), rounding)
        else:
            policy = kernels.Sgd(0.1, 0.9, 0.01, kind == "nesterov")
            module.step_sgd(rows, gradient, momentum, policy, rounding)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(momenta[0], momenta[1])
    nearest = _rows(40, width, torch.bfloat16, normalized=False, picked=picked)
    assert not torch.equal(ours.weight, nearest.weight)


@pytest.mark.parametrize("width", [130, 512])
def test_unit_rows_are_rounded_at_random_as_the_reference_does(width: int) -> None:
    ours = _rows(70, width, torch.bfloat16)
    theirs, gradient = _twin(ours), _gradient(ours, torch.float32)
    moments = [[torch.zeros_like(ours.weight) for _ in range(2)] for _ in range(2)]
    counts = [torch.zeros(75, dtype=torch.int64) for _ in range(2)]
    policy, rounding = kernels.AdamW(0.01, epsilon=1e-3, decay=0.1), Rounding(True, 7)
    OnDevice(launcher()).step_adamw(ours, gradient, *moments[0], counts[0], policy, rounding)
    reference.step_adamw(theirs, gradient, *moments[1], counts[1], policy, rounding)
    # The arithmetic before may differ in the last bit of a float, which decides one time in 2^16.
    for one, other in zip((ours.weight, *moments[0]), (theirs.weight, *moments[1]), strict=True):
        assert (one != other).float().mean() < 1e-3
    assert torch.equal(*counts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_grid_and_any_order_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    results = []
    for blocks, threads, step in ((1, 32, 1), (3, 256, 5), (20, 64, 77)):
        rows = _rows(21, 700, dtype, picked=True)
        gradient = Gradient(torch.ones(21, 700) * torch.arange(700), 0.01)
        states = [torch.zeros(26, 700) for _ in range(2)]
        host = launcher(blocks=blocks, threads=threads, step=step)
        results.append([*_apply(OnDevice(host), "adamw", rows, gradient, states), *states])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("step", [1, 2, 1000, 10**7])
@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.0), (0.5, 0.99999)])
def test_bias_correction_holds_for_any_number_of_steps(betas: tuple[float, float], step: int) -> None:
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        weight = torch.zeros(1, 4, dtype=dtype)
        mean, square = torch.full((1, 4), 0.5, dtype=dtype), torch.full((1, 4), 0.25, dtype=dtype)
        steps, gradient = torch.tensor([step - 1]), Gradient(torch.ones(1, 4, dtype=dtype), 1.0)
        policy = kernels.AdamW(1.0, *betas, epsilon=1e-20)
        OnDevice(launcher()).step_adamw(Rows(weight, None, 0, 1), gradient, mean, square, steps, policy, NEAREST)
        by_formula = (0.5 * betas[0] + 1 - betas[0]) / (1 - betas[0] ** step)
        by_formula /= ((0.25 * betas[1] + 1 - betas[1]) / (1 - betas[1] ** step)) ** 0.5
        torch.testing.assert_close(weight, torch.full_like(weight, -by_formula), rtol=close, atol=0.0)
        assert steps.item() == step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_is_read_where_it_lies(dtype: torch.dtype) -> None:
    for rows_dtype in (torch.float32, torch.float64):
        ours = _rows(5, 8, rows_dtype)
        theirs, gradient = _twin(ours), _gradient(ours, torch.float32)
        there = gradient._replace(factor=torch.tensor(0.25, dtype=dtype))
        OnDevice(launcher()).step_sgd(ours, there, None, kernels.Sgd(0.1), NEAREST)
        OnDevice(launcher()).step_sgd(theirs, gradient, None, kernels.Sgd(0.1), NEAREST)
        assert torch.equal(ours.weight, theirs.weight)
    half = gradient._replace(factor=torch.tensor(0.25, dtype=torch.float16))
    with pytest.raises(TypeError, match="expected a factor of float32 or float64"):
        OnDevice(launcher()).step_sgd(ours, half, None, kernels.Sgd(0.1), NEAREST)


def test_other_rows_stay_as_they_are() -> None:
    for picked in (False, True):
        rows, momentum = _rows(10, 40, torch.float32, picked=picked), torch.zeros(15, 40)
        before = rows.weight.clone()
        gradient = _gradient(rows, torch.float32)
        OnDevice(launcher()).step_sgd(rows, gradient, momentum, kernels.Sgd(0.1, 0.9), NEAREST)
        touched = torch.zeros(15, dtype=torch.bool)
        touched[rows.selection] = True
        assert torch.equal((rows.weight != before).any(dim=1), touched)
        assert torch.equal(momentum.ne(0).any(dim=1), touched)


def test_short_rows_are_divided_by_a_constant_and_nan_stays() -> None:
    weight = torch.zeros(2, 4, dtype=torch.float64)
    weight[0, 1] = 3e-13  # nothing is projected out of its gradient
    weight[1, 2] = torch.nan
    rows = Rows(weight, torch.empty(2, dtype=torch.float64), 0, 2)
    device = OnDevice(launcher())
    device.measure_rows(rows)
    assert rows.inverse_norms is not None
    assert rows.inverse_norms[0] == 1e12 and rows.inverse_norms[1].isnan()
    out = torch.empty(2, 4, dtype=torch.float64)
    device.project_gradient(rows, Gradient(torch.ones(2, 4), 1.0), out)
    assert out[0].tolist() == [1e12] * 4 and out[1].isnan().all()


def test_what_is_not_finite_stays_so_when_rounded_at_random() -> None:
    weight = torch.zeros(1, 3, dtype=torch.bfloat16)
    gradient = Gradient(torch.tensor([[torch.inf, -torch.inf, torch.nan]]), -1.0)
    OnDevice(launcher()).step_sgd(Rows(weight, None, 0, 1), gradient, None, kernels.Sgd(1.0), Rounding(True, 1))
    assert weight.float().nan_to_num(7, 8, 9).tolist() == [[8, 9, 7]]


def test_vectors_are_taken_only_where_everything_is_aligned() -> None:
    for width, begin, wanted in ((128, 0, 4), (128, 1, 1), (128, 4, 4), (126, 0, 1)):
        host, rows = launcher(), Rows(torch.randn(3 * width + begin)[begin:].view(3, width), None, 0, 3)
        OnDevice(host).step_sgd(rows, _gradient(rows, torch.float32), None, kernels.Sgd(0.1), NEAREST)
        assert host.launched == [f"sgd_float32_{wanted}"]


def test_every_kernel_that_can_be_asked_for_is_in_the_source() -> None:
    text = cuda.source("row_update")
    suffixes = set(re.findall(r"^HYBRIDPAR_ROW_KERNELS\((\w+)", text, re.MULTILINE))
    assert suffixes == {f"{exact}_{width}" for exact in ("float32", "float64") for width in (1, rows_cuda._WIDE)}
    names = set(re.findall(r"(\w+)_##suffix", text))
    assert names == {"load", "measure", "project", "sgd", "adamw", "adagrad", "advance"}


def test_tensors_of_another_device_are_refused() -> None:
    rows = _rows(4, 6, torch.float32)
    with pytest.raises(ValueError, match="expected all tensors on one device, got cpu, meta"):
        OnDevice(launcher()).load_rows(rows, torch.empty(4, 6, device="meta"))
