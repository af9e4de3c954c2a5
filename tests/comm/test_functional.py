"""The differentiable collectives against autograd on the dense, concatenated computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.ranks import run_processes, run_threads

SIZES = {1: [3], 2: [3, 1], 3: [0, 4, 2], 4: [2, 0, 1, 5]}
RANKS = [1, 2, 3, 4]


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _gather(group: Any, parts: list[Tensor], coefficients: list[Tensor], sizes: list[int] | None) -> Any:
    mine = parts[group.rank].clone().requires_grad_()
    gathered = hp.functional.all_gather(mine, group, sizes)
    (gathered.sin() * coefficients[group.rank]).sum().backward()
    return gathered.detach(), mine.grad


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("uneven", [True, False])
def test_all_gather_concatenates_and_sums_the_gradients_back(ranks: int, uneven: bool) -> None:
    sizes = SIZES[ranks] if uneven else [2] * ranks
    parts = [_draw(size, 3, seed=rank) for rank, size in enumerate(sizes)]
    coefficients = [_draw(sum(sizes), 3, seed=10 + rank) for rank in range(ranks)]
    results = run_threads(ranks, _gather, parts, coefficients, sizes if uneven else None)
    whole = torch.cat(parts).requires_grad_()
    torch.stack([(whole.sin() * c).sum() for c in coefficients]).sum().backward()
    assert whole.grad is not None
    for rank, (gathered, grad) in enumerate(results):
        torch.testing.assert_close(gathered, whole.detach(), rtol=0, atol=0)
        torch.testing.assert_close(grad, whole.grad.split(sizes)[rank], rtol=1e-13, atol=1e-13)


def _scatter(group: Any, parts: list[Tensor], coefficients: list[Tensor], sizes: list[int] | None) -> Any:
    mine = parts[group.rank].clone().requires_grad_()
    received = hp.functional.reduce_scatter(mine, group, sizes)
    (received.sin() * coefficients[group.rank]).sum().backward()
    return received.detach(), mine.grad


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("uneven", [True, False])
def test_reduce_scatter_sums_and_gathers_the_gradients_back(ranks: int, uneven: bool) -> None:
    sizes = SIZES[ranks] if uneven else [2] * ranks
    parts = [_draw(sum(sizes), 3, seed=rank) for rank in range(ranks)]
    coefficients = [_draw(size, 3, seed=10 + rank) for rank, size in enumerate(sizes)]
    results = run_threads(ranks, _scatter, parts, coefficients, sizes if uneven else None)
    inputs = [part.clone().requires_grad_() for part in parts]
    total = torch.stack(inputs).sum(dim=0)
    (total.sin() * torch.cat(coefficients)).sum().backward()
    for rank, (received, grad) in enumerate(results):
        torch.testing.assert_close(received, total.detach().split(sizes)[rank], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, inputs[rank].grad, rtol=1e-13, atol=1e-13)


def _reduce(group: Any, parts: list[Tensor], coefficients: list[Tensor]) -> Any:
    mine = parts[group.rank].clone().requires_grad_()
    total = hp.functional.all_reduce(mine, group)
    (total.sin() * coefficients[group.rank]).sum().backward()
    return total.detach(), mine.grad, mine.detach()


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_sums_both_ways_and_leaves_its_input(ranks: int) -> None:
    parts = [_draw(2, 3, seed=rank) for rank in range(ranks)]
    coefficients = [_draw(2, 3, seed=10 + rank) for rank in range(ranks)]
    inputs = [part.clone().requires_grad_() for part in parts]
    total = torch.stack(inputs).sum(dim=0)
    torch.stack([(total.sin() * c).sum() for c in coefficients]).sum().backward()
    for rank, (received, grad, untouched) in enumerate(run_threads(ranks, _reduce, parts, coefficients)):
        torch.testing.assert_close(received, total.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, inputs[rank].grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(untouched, parts[rank], rtol=0, atol=0)


def _second_order(group: Any, parts: list[Tensor], sizes: list[int]) -> Any:
    mine = parts[group.rank].clone().requires_grad_()
    gathered = hp.functional.all_gather(mine, group, sizes)
    (grad,) = torch.autograd.grad(gathered.pow(3).sum(), mine, create_graph=True)
    grad.pow(2).sum().backward()
    return mine.grad


def test_gradients_of_gradients_cross_the_ranks() -> None:
    sizes = [2, 1, 3]
    parts = [_draw(size, 2, seed=rank) for rank, size in enumerate(sizes)]
    whole = torch.cat(parts).requires_grad_()
    (grad,) = torch.autograd.grad(3 * whole.pow(3).sum(), whole, create_graph=True)
    grad.pow(2).sum().backward()
    assert whole.grad is not None
    for rank, second in enumerate(run_threads(3, _second_order, parts, sizes)):
        torch.testing.assert_close(second, whole.grad.split(sizes)[rank], rtol=1e-13, atol=1e-13)


def _mean(group: Any, values: list[Tensor], masks: list[Tensor] | None) -> Any:
    mine = values[group.rank].clone().requires_grad_()
    mean = hp.global_mean(mine.square(), None if masks is None else masks[group.rank], group=group)
    (3 * mean).backward()
    return mean.detach(), mine.grad


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("masked", [True, False])
def test_global_mean_is_the_mean_over_all_ranks(ranks: int, masked: bool) -> None:
    sizes = SIZES[ranks]
    values = [_draw(size, 2, seed=rank) for rank, size in enumerate(sizes)]
    masks = [_draw(size, 2, seed=20 + rank) > 0 for rank, size in enumerate(sizes)]
    if masked:
        for value, mask in zip(values, masks, strict=True):
            value[~mask] = float("nan")  # what is masked out must not be looked at
    whole = torch.cat(values).requires_grad_()
    kept = whole[torch.cat(masks)] if masked else whole
    (3 * kept.square().mean()).backward()
    assert whole.grad is not None
    for rank, (mean, grad) in enumerate(run_threads(ranks, _mean, values, masks if masked else None)):
        assert mean.shape == ()
        torch.testing.assert_close(mean, kept.detach().square().mean(), rtol=1e-13, atol=0)
        expected = whole.grad.split(sizes)[rank]
        if masked:
            assert (grad[~masks[rank]].nan_to_num() == 0).all()
            grad, expected = grad[masks[rank]], expected[masks[rank]]
        torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-13)


def test_global_mean_of_nothing_is_zero_with_zero_gradient() -> None:
    values = [_draw(2, seed=0), _draw(3, seed=1)]
    masks = [torch.zeros(2, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)]
    for mean, grad in run_threads(2, _mean, values, masks):
        assert mean == 0
        assert (grad == 0).all()


def _bad_mask(group: Any, mask: Tensor) -> None:
    hp.global_mean(torch.ones(3), mask, group=group)


@pytest.mark.parametrize("mask", [torch.ones(2, dtype=torch.bool), torch.ones(3)], ids=["shape", "dtype"])
def test_global_mean_refuses_a_mask_that_does_not_fit(mask: Tensor) -> None:
    errors = run_threads(2, _bad_mask, mask, return_exceptions=True)
    assert all(isinstance(error, ValueError) and "mask" in str(error) for error in errors)


def _in_processes(group: Any, parts: list[Tensor], coefficients: list[Tensor], sizes: list[int]) -> Any:
    gathered = _gather(group, parts, coefficients, sizes)
    mine = [part.new_ones(sum(sizes), 2) * (rank + 1) for rank, part in enumerate(parts)]
    scattered = _scatter(group, mine, [c[:size, :2] for c, size in zip(coefficients, sizes, strict=True)], sizes)
    return [tensor.numpy() for tensor in (*gathered, *scattered)]


def test_gloo_processes_give_what_threads_give() -> None:
    sizes = [3, 1]
    parts = [_draw(size, 3, seed=rank) for rank, size in enumerate(sizes)]
    coefficients = [_draw(4, 3, seed=10 + rank) for rank in range(2)]
    whole = torch.cat(parts).requires_grad_()
    torch.stack([(whole.sin() * c).sum() for c in coefficients]).sum().backward()
    assert whole.grad is not None
    results = run_processes(2, _in_processes, parts, coefficients, sizes)
    for rank, (gathered, grad, scattered, scattered_grad) in enumerate(results):
        torch.testing.assert_close(torch.from_numpy(gathered), whole.detach(), rtol=0, atol=0)
        torch.testing.assert_close(torch.from_numpy(grad), whole.grad.split(sizes)[rank], rtol=1e-13, atol=1e-13)
        assert (scattered == 3).all()
        sines = torch.cat([c[:size, :2] for c, size in zip(coefficients, sizes, strict=True)])
        slope = torch.cos(torch.tensor(3.0, dtype=torch.float64))
        torch.testing.assert_close(torch.from_numpy(scattered_grad), sines * slope, rtol=1e-13, atol=1e-13)
