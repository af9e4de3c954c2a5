"""The row kernels against torch.optim, autograd and their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar import kernels
from hybridpar.kernels import rows_reference as reference
from hybridpar.kernels.rows import Gradient, Rounding, Rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NEAREST = Rounding()


def _rows(
    count: int, width: int, dtype: torch.dtype, *, normalized: bool = True, picked: bool = False, seed: int = 0
) -> Rows:
    """Rows 3 to ``count`` + 3 of a head, or others in no order."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(count + 5, width, generator=random).to(dtype)
    indices = torch.randperm(count + 5, generator=random)[:count].contiguous() if picked else None
    inverse = None
    if normalized:
        inverse = torch.empty(count + 5, dtype=kernels.exact_dtype(dtype))
        kernels.measure_rows(Rows(weight, inverse, 0, count + 5))
    return Rows(weight, inverse, 3, count, indices)


def _twin(rows: Rows) -> Rows:
    return rows._replace(
        weight=rows.weight.clone(), inverse_norms=None if rows.inverse_norms is None else rows.inverse_norms.clone()
    )


def _gradient(rows: Rows, dtype: torch.dtype) -> Gradient:
    return Gradient(torch.randn(rows.size, rows.weight.shape[1]).to(dtype), 0.25)


def _state(rows: Rows, dtype: torch.dtype, *, positive: bool = False) -> Tensor:
    values = torch.randn(rows.weight.shape)
    return (values.abs() if positive else values).to(dtype)


sizes = st.tuples(st.integers(0, 150), st.integers(1, 70))
anything = given(
    sizes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip


@anything
@settings(max_examples=150, deadline=None)
def test_every_kernel_does_what_its_reference_does(
    size: tuple[int, int], dtype: torch.dtype, product: torch.dtype, state: torch.dtype,
    normalized: bool, picked: bool, threads: int,
) -> None:  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        count, width = size
        # Of a unit row with one element there is no gradient but rounding.
        ours = _rows(count, max(width, 4) if normalized else width, dtype, normalized=normalized, picked=picked)
        gradient = _gradient(ours, product)
        for kind in ("sgd", "sgd without momentum", "nesterov", "adamw", "adagrad", "advance", "project", "load"):
            theirs = _twin(ours)
            states = [_state(ours, state), _state(ours, state, positive=True)]
            twins = [one.clone() for one in states]
            found = _apply(kernels, kind, ours, gradient, states)
            wanted = _apply(reference, kind, theirs, gradient, twins)
            tolerance = max(CLOSE[dtype], CLOSE[state], CLOSE[product] if kind == "load" else 0)
            for one, other in zip((*found, *states), (*wanted, *twins), strict=True):
                torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance, msg=kind)
    finally:
        torch.set_num_threads(before)


def _apply(module: Any, kind: str, rows: Rows, gradient: Gradient, states: list[Tensor]) -> list[Tensor]:
    """What has changed, but for the states."""
    exact, device = kernels.exact_dtype(rows.weight.dtype), rows.weight.device
    random = torch.Generator().manual_seed(1)
    extra = []
    if kind == "sgd":
        module.step_sgd(rows, gradient, states[0], kernels.Sgd(0.1, 0.9, 0.01), NEAREST)
    elif kind == "sgd without momentum":
        module.step_sgd(rows, gradient, None, kernels.Sgd(0.1), NEAREST)
    elif kind == "nesterov":
        module.step_sgd(rows, gradient, states[0], kernels.Sgd(0.1, 0.9, 0.01, True), NEAREST)
    elif kind == "adamw":
        extra = [torch.arange(len(rows.weight), device=device)]
        module.step_adamw(rows, gradient, *states, extra[0], kernels.AdamW(0.01, epsilon=1e-3, decay=0.1), NEAREST)
    elif kind == "adagrad":
        extra = [torch.rand(len(rows.weight), generator=random).to(device, exact) + 0.1]
        module.step_adagrad(rows, gradient, extra[0], kernels.Adagrad(0.1, decay=0.01), NEAREST)
    elif kind == "advance":
        matrices = torch.rand(rows.size, 4, dtype=torch.float64, generator=random).to(device)
        module.advance_rows(rows, states[0], matrices, NEAREST)
    else:
        dtype = rows.weight.dtype if kind == "project" else gradient.values.dtype
        extra = [torch.empty(gradient.values.shape, dtype=dtype, device=device)]
        module.project_gradient(rows, gradient, extra[0]) if kind == "project" else module.load_rows(rows, extra[0])
    return [rows.weight, *extra, *([] if rows.inverse_norms is None else [rows.inverse_norms])]


def _unit_gradient(rows: Rows, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of a loss of unit rows: the gradient by the unit rows, and by autograd that by the rows."""
    weight = rows.weight.clone().requires_grad_()
    unit = weight / weight.norm(dim=1, keepdim=True)
    unit.retain_grad()
    loss(unit).backward()  # type: ignore[no-untyped-call]
    assert unit.grad is not None and weight.grad is not None
    return unit.grad, weight.grad


def test_gradients_are_projected_as_autograd_does() -> None:
    rows = _rows(30, 33, torch.float64)
    unit, wanted = _unit_gradient(rows, lambda values: values.sin().mul(torch.arange(33)).sum())
    out = torch.empty(30, 33, dtype=torch.float64)
    kernels.project_gradient(rows, Gradient(unit[3:33].contiguous(), 2.0), out)
    torch.testing.assert_close(out, 2 * wanted[3:33], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), kernels.Sgd(0.1)),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.02), kernels.Sgd(0.1, 0.9, 0.02)),
        (
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.02, nesterov=True),
            kernels.Sgd(0.1, 0.9, 0.02, True),
        ),
        (lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1), kernels.AdamW(0.01, decay=0.1)),
        (lambda p: torch.optim.AdamW(p, 0.01, (0.5, 0.8), 1e-3), kernels.AdamW(0.01, 0.5, 0.8, 1e-3, 0.01)),
    ],
)
def test_steps_are_those_of_torch(dtype: torch.dtype, optimizer: Any, policy: Any) -> None:
    """Linear rows, so that the gradient is torch's; every row in every step."""
    rows = _rows(20, 17, dtype, normalized=False)._replace(first=0, size=25)
    twin = rows.weight.clone().requires_grad_()
    theirs = optimizer([twin])
    first, second = torch.zeros_like(rows.weight), torch.zeros_like(rows.weight)
    steps = torch.zeros(25, dtype=torch.int64)
    for _ in range(7):
        gradient = torch.randn(25, 17).to(dtype)
        twin.grad = gradient * 0.5
        theirs.step()
        if isinstance(policy, kernels.Sgd):
            momentum = first if policy.momentum else None
            kernels.step_sgd(rows, Gradient(gradient, 0.5), momentum, policy, NEAREST)
        else:
            kernels.step_adamw(rows, Gradient(gradient, 0.5), first, second, steps, policy, NEAREST)
    torch.testing.assert_close(rows.weight, twin.detach(), rtol=10 * CLOSE[dtype], atol=10 * CLOSE[dtype])


def test_adagrad_divides_a_row_by_the_root_of_its_mean_squares() -> None:
    rows = _rows(4, 6, torch.float64, normalized=False)._replace(first=0, size=9)
    start, sums, expected = rows.weight.clone(), torch.zeros(9, dtype=torch.float64), torch.zeros(9, 6).double()
    squares = torch.zeros(9, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn(9, 6, dtype=torch.float64)
        squares += gradient.square().mean(dim=1)
        expected -= 0.3 * gradient / (squares.sqrt() + 1e-10)[:, None]
        kernels.step_adagrad(rows, Gradient(gradient, 1.0), sums, kernels.Adagrad(0.3), NEAREST)
    torch.testing.assert_close(rows.weight, start + expected)


def test_a_step_leaves_other_rows_alone_and_the_norms_right() -> None:
    for picked in (False, True):
        rows = _rows(10, 40, torch.float32, picked=picked)
        before, momentum = rows.weight.clone(), torch.zeros(15, 40)
        kernels.step_sgd(rows, _gradient(rows, torch.float32), momentum, kernels.Sgd(0.1, 0.9), NEAREST)
        touched = torch.zeros(15, dtype=torch.bool)
        touched[rows.selection] = True
        changed = (rows.weight != before).any(dim=1)
        assert torch.equal(changed, touched) and torch.equal(momentum.ne(0).any(dim=1), touched)
        assert rows.inverse_norms is not None
        torch.testing.assert_close(rows.inverse_norms, 1 / rows.weight.norm(dim=1))


def test_short_rows_are_divided_by_a_constant() -> None:
    weight, inverse = torch.zeros(1, 4, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    rows = Rows(weight, inverse, 0, 1)
    kernels.measure_rows(rows)
    assert inverse.item() == 1e12
    out = torch.empty(1, 4, dtype=torch.float64)
    kernels.project_gradient(rows, Gradient(torch.ones(1, 4), 1.0), out)
    assert out.tolist() == [[1e12] * 4]


@pytest.mark.parametrize("picked", [False, True])
def test_stochastic_rounding_is_the_references_bit_for_bit(picked: bool) -> None:
    ours = _rows(70, 130, torch.bfloat16, picked=picked)
    theirs, gradient = _twin(ours), _gradient(ours, torch.float32)
    rounding = Rounding(True, 2**64 - 5)
    momenta = [torch.zeros_like(ours.weight) for _ in range(2)]
    kernels.step_sgd(ours, gradient, momenta[0], kernels.Sgd(0.125, 0.5), rounding)
    reference.step_sgd(theirs, gradient, momenta[1], kernels.Sgd(0.125, 0.5), rounding)
    # The arithmetic before may differ in the last bit of a float, which decides one time in 2^16.
    assert (ours.weight != theirs.weight).float().mean() < 1e-3 and (momenta[0] != momenta[1]).float().mean() < 1e-3


def test_stochastic_rounding_keeps_on_average_what_the_nearest_loses() -> None:
    """1 + 1/1024 lies between 1 and 1 + 1/128."""
    for stochastic, low, high in ((True, 0.95, 1.05), (False, 0.0, 0.0)):
        weight = torch.ones(100, 512, dtype=torch.bfloat16)
        rows, gradient = Rows(weight, None, 0, 100), Gradient(torch.full((100, 512), -1 / 1024), 1.0)
        for seed in range(8):
            kernels.step_sgd(rows, gradient, None, kernels.Sgd(1.0), Rounding(stochastic, seed))
        assert low <= float(weight.float().mean() - 1) * 128 <= high
        assert stochastic == (len(weight.unique()) > 1)


def test_what_is_not_finite_stays_so_when_rounded_at_random() -> None:
    weight = torch.zeros(1, 3, dtype=torch.bfloat16)
    gradient = Gradient(torch.tensor([[torch.inf, -torch.inf, torch.nan]]), -1.0)
    kernels.step_sgd(Rows(weight, None, 0, 1), gradient, None, kernels.Sgd(1.0), Rounding(True, 1))
    assert weight.float().nan_to_num(7, 8, 9).tolist() == [[8, 9, 7]]


def test_steps_without_a_gradient_in_one() -> None:
    """Twenty dense steps of torch's SGD with no gradient but decay."""
    rows = _rows(8, 12, torch.float64, normalized=False)._replace(first=0, size=13)
    momentum = torch.randn(13, 12, dtype=torch.float64)
    twin = rows.weight.clone().requires_grad_()
    optimizer = torch.optim.SGD([twin], 0.1, momentum=0.9, weight_decay=0.05)
    optimizer.state[twin]["momentum_buffer"] = momentum.clone()
    step, passed = torch.tensor([[1 - 0.1 * 0.05, -0.1 * 0.9], [0.05, 0.9]], dtype=torch.float64), torch.eye(2).double()
    for _ in range(20):
        twin.grad = torch.zeros_like(twin)
        optimizer.step()
        passed = step @ passed
    kernels.advance_rows(rows, momentum, passed.flatten().expand(13, 4).contiguous(), NEAREST)
    torch.testing.assert_close(rows.weight, twin.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(momentum, optimizer.state[twin]["momentum_buffer"], rtol=1e-12, atol=1e-12)


def test_wrong_memory_is_refused() -> None:
    rows = _rows(4, 6, torch.float32)
    with pytest.raises(TypeError, match=r"expected contiguous floating point \[4, 6\] beside the rows"):
        kernels.load_rows(rows, torch.empty(5, 6))
    with pytest.raises(ValueError, match=r"expected rows within \[0, 9\), got 4 from 6 on"):
        kernels.load_rows(rows._replace(first=6), torch.empty(4, 6))
    with pytest.raises(TypeError, match=r"expected contiguous floating point \[9, 6\] beside the rows"):
        kernels.step_sgd(rows, _gradient(rows, torch.float32), torch.empty(4, 6), kernels.Sgd(0.1, 0.9), NEAREST)
    with pytest.raises(TypeError, match="expected contiguous floating-point rows"):
        kernels.measure_rows(rows._replace(weight=rows.weight.T))
