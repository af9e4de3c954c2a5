"""SyncBatchNorm on N ranks is torch's BatchNorm on the concatenated batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from tests.head.cases import errors_of
from tests.ranks import run_threads

SIZES = {1: ((5,), (3,)), 2: ((3, 4), (0, 2)), 3: ((1, 4, 2), (2, 0, 1)), 4: ((1, 1, 3, 2), (0, 4, 0, 1))}
SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-sequence": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 3)),
}


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def _plain(kind: type[nn.Module], **settings: Any) -> nn.Module:
    norm = kind(3, **settings).double()
    for parameter in norm.parameters():
        parameter.data.copy_(_draw(3, seed=99 + len(parameter)))
    return norm


def _one_rank(group: Any, norm: nn.Module, steps: list[tuple[list[Tensor], list[Tensor]]]) -> Any:
    layer = hp.SyncBatchNorm.convert(copy.deepcopy(norm), group)
    assert type(layer) is hp.SyncBatchNorm
    results = []
    for inputs, coefficients in steps:
        x = inputs[group.rank].clone().requires_grad_()
        layer.zero_grad()
        out = layer(x)
        (out * coefficients[group.rank]).sum().backward()
        results.append((out.detach(), x.grad, {n: p.grad.clone() for n, p in layer.named_parameters()}))
    return results, {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _compare(ranks: int, norm: nn.Module, shape: tuple[int, ...], tolerance: float = 1e-12) -> None:
    steps = []
    for index, sizes in enumerate(SIZES[ranks]):
        inputs = [_draw(size, 3, *shape, seed=10 * index + rank) for rank, size in enumerate(sizes)]
        steps.append((inputs, [_draw(*x.shape, seed=50 + 10 * index + r) for r, x in enumerate(inputs)]))
    per_rank = run_threads(ranks, _one_rank, norm, steps)
    dense = copy.deepcopy(norm)
    for index, (inputs, coefficients) in enumerate(steps):
        x = torch.cat(inputs).requires_grad_()
        dense.zero_grad()
        out = dense(x)
        (out * torch.cat(coefficients)).sum().backward()
        results = [rank[0][index] for rank in per_rank]
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(torch.cat([r[0] for r in results]), out.detach(), **close)
        torch.testing.assert_close(torch.cat([r[1] for r in results]), x.grad, **close)
        for name, parameter in dense.named_parameters():
            # Each rank holds its own part, for the sum that DataParallel takes.
            torch.testing.assert_close(sum(r[2][name] for r in results), parameter.grad, **close)
    for _, buffers in per_rank:
        expected = dict(dense.named_buffers())
        assert buffers.keys() == expected.keys()
        for name, buffer in expected.items():
            torch.testing.assert_close(buffers[name], buffer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_gradients_and_statistics_equal_the_whole_batch(shape: str, ranks: int) -> None:
    kind, extra = SHAPES[shape]
    _compare(ranks, _plain(kind), extra)


@pytest.mark.parametrize(
    "settings",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_in_torch(settings: dict[str, Any]) -> None:
    _compare(3, _plain(nn.BatchNorm2d, **settings), (2, 2))
    if settings.get("track_running_stats", True):
        _compare(2, _plain(nn.BatchNorm1d, **settings).eval(), ())


def test_the_mean_of_a_large_offset_does_not_cancel() -> None:
    """Variance 1 around 1e6: a sum of squares would lose it in float32."""

    def work(group: Any, parts: list[Tensor]) -> Tensor:
        layer: Tensor = hp.SyncBatchNorm(3, group=group)(parts[group.rank])
        return layer

    whole = (torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4).float()
    expected = nn.BatchNorm1d(3).double()(whole.double())
    out = torch.cat(run_threads(2, work, list(whole.split([40, 24]))))
    assert (out.double() - expected).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_inputs_keep_their_dtype(dtype: torch.dtype) -> None:
    def work(group: Any, parts: list[Tensor]) -> Any:
        x = parts[group.rank].clone().requires_grad_()
        out = hp.SyncBatchNorm(3, group=group)(x)
        out.square().sum().backward()
        assert out.dtype == x.dtype and x.grad is not None and x.grad.dtype == x.dtype
        return out.detach()

    whole = _draw(12, 3, seed=1).to(dtype)
    expected = nn.BatchNorm1d(3)(whole.float())
    out = torch.cat(run_threads(3, work, list(whole.split([5, 1, 6]))))
    torch.testing.assert_close(out.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_one_value_a_channel_in_the_whole_batch_is_refused_on_every_rank() -> None:
    """As in torch: a variance of one value says nothing."""

    def work(group: Any) -> None:
        hp.SyncBatchNorm(3, group=group)(torch.ones(1 if group.rank == 0 else 0, 3))

    errors = errors_of(2, work)
    assert all(type(error) is ValueError for error in errors), errors


def test_one_value_on_each_rank_is_enough() -> None:
    def work(group: Any) -> Tensor:
        out: Tensor = hp.SyncBatchNorm(1, group=group)(torch.tensor([[float(group.rank)]]))
        return out

    low, high = run_threads(2, work)
    assert low.item() == pytest.approx(-1.0, abs=1e-4) and high.item() == pytest.approx(1.0, abs=1e-4)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2), nn.ReLU())
        self.blocks = nn.ModuleList([nn.BatchNorm1d(4, affine=False), nn.BatchNorm3d(2, track_running_stats=False)])
        self.other = nn.LayerNorm(4)


def test_convert_replaces_every_batch_norm_and_keeps_what_it_holds() -> None:
    def work(group: Any) -> None:
        module = _Nested()
        module.stem[1].weight.data.uniform_()
        module.stem[1].running_mean.uniform_()
        module.stem.eval()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        parameters = {name: id(value) for name, value in module.named_parameters()}
        converted = hp.SyncBatchNorm.convert(module, group)
        after = converted.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert {name: id(value) for name, value in converted.named_parameters()} == parameters
        norms = [converted.stem[1], *converted.blocks]
        assert all(type(norm) is hp.SyncBatchNorm for norm in norms)
        assert [(n.eps, n.momentum, n.affine, n.track_running_stats) for n in norms] == [
            (1e-3, 0.2, True, True),
            (1e-5, 0.1, False, True),
            (1e-5, 0.1, True, False),
        ]
        assert not converted.stem[1].training and converted.blocks[0].training
        assert type(converted.other) is nn.LayerNorm

    run_threads(2, work)


def _eval_alone(group: Any, norm: nn.Module, x: Tensor) -> Any:
    layer = hp.SyncBatchNorm.convert(copy.deepcopy(norm), group).eval()
    if group.rank == 1:
        return None  # evaluation is local: no rank waits for another
    out = layer(x)
    assert all(torch.equal(b, c) for b, c in zip(layer.buffers(), norm.buffers(), strict=True))
    return out


def test_eval_mode_is_plain_batch_norm_and_needs_no_other_rank() -> None:
    norm = _plain(nn.BatchNorm2d)
    norm(_draw(6, 3, 2, 2, seed=3))
    norm.eval()
    x = _draw(4, 3, 2, 2, seed=4)
    out, _ = run_threads(2, _eval_alone, norm, x)
    torch.testing.assert_close(out, norm(x), rtol=1e-13, atol=1e-13)


def test_eval_mode_without_running_statistics_is_local_too() -> None:
    norm = _plain(nn.BatchNorm1d, track_running_stats=False).eval()
    x = _draw(4, 3, seed=4)

    def work(group: Any) -> Any:
        layer = hp.SyncBatchNorm.convert(copy.deepcopy(norm), group).eval()
        return None if group.rank == 1 else layer(x)

    out, _ = run_threads(2, work, timeout=10.0)
    torch.testing.assert_close(out, norm(x), rtol=1e-12, atol=1e-12)


def test_a_converted_module_can_be_copied() -> None:
    """Averaged (EMA) models are deep copies; the copy works over the same ranks."""

    def work(group: Any, parts: list[Tensor]) -> Any:
        module = hp.SyncBatchNorm.convert(_plain(nn.BatchNorm1d), group)
        twin = copy.deepcopy(module)
        assert twin.weight is not module.weight
        return module(parts[group.rank]).detach(), twin(parts[group.rank]).detach()

    parts = [_draw(3, 3, seed=1), _draw(2, 3, seed=2)]
    for out, twins in run_threads(2, work, parts):
        assert torch.equal(out, twins)


@pytest.mark.parametrize("shape", [(2, 4), (2,), (2, 4, 3)], ids=str)
def test_another_channel_count_or_no_channels_is_refused(shape: tuple[int, ...]) -> None:
    def work(group: Any) -> None:
        hp.SyncBatchNorm(3, group=group)(torch.ones(shape))

    errors = errors_of(2, work)
    assert all(type(error) is ValueError for error in errors), errors


def test_weights_refuse_a_second_gradient_that_never_was() -> None:
    """Gradients of frozen affine parameters are None, and the input's stay right."""

    def work(group: Any, parts: list[Tensor]) -> Any:
        layer = hp.SyncBatchNorm(3, group=group).double()
        layer.weight.requires_grad_(False)
        layer.bias.requires_grad_(False)
        x = parts[group.rank].clone().requires_grad_()
        layer(x).pow(3).sum().backward()
        assert layer.weight.grad is None and layer.bias.grad is None
        return x.grad

    whole = _draw(7, 3, seed=6).requires_grad_()
    nn.BatchNorm1d(3).double()(whole).pow(3).sum().backward()
    grads = run_threads(2, work, list(whole.detach().split([2, 5])))
    torch.testing.assert_close(torch.cat(grads), whole.grad, rtol=1e-11, atol=1e-11)
