"""N ranks train as one: backbone, head and optimizer state equal the dense one-process run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.head.cases import MARGINS, ONE_OF_EACH, assert_close, dense_rows, has_bias, local, set_rows
from tests.head.rules import RandomRule
from tests.ranks import run_processes, run_threads

INPUTS, EMBEDDING, CLASSES = 5, 6, 11
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((7,), (5,), (9,), (2,), (6,)),
    2: ((3, 4), (5, 2), (0, 9), (1, 3), (6, 2)),
    3: ((3, 4, 1), (0, 5, 2), (2, 2, 2), (1, 0, 3), (4, 1, 1)),
    4: ((3, 4, 1, 2), (0, 5, 2, 1), (2, 2, 2, 2), (1, 0, 3, 0), (4, 1, 1, 5)),
}

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    # Small enough that five steps do not multiply float32 rounding beyond 1e-5 in the dense run either.
    "gentle-sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=5e-4),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.02),
}


@dataclass(frozen=True)
class Run:
    """A training run; `micro` batches are accumulated into each step."""

    ranks: int
    margin: Any
    optimizer: str = "sgd"
    batch_norm: bool = False
    dtype: torch.dtype = torch.float64
    rule: Any = "even"
    micro: int = 1
    chunk: int | None = 4
    reduction: str = "sum"
    bucket_bytes: int = 100  # smaller than most parameters: several buckets

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return SIZES[self.ranks] * self.micro


def _backbone(run: Run) -> nn.Module:
    """Not for threads: it seeds the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        # No bias before the batch norm: its gradient is exactly 0, and AdamW would blow up the rounding.
        first = nn.Linear(INPUTS, 8, bias=not run.batch_norm)
        norm = [nn.BatchNorm1d(8)] if run.batch_norm else []
        return nn.Sequential(first, *norm, nn.Tanh(), nn.Linear(8, EMBEDDING)).to(run.dtype)


def _data(run: Run) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    draw = torch.Generator().manual_seed(12)
    kind = {"dtype": torch.float64, "generator": draw}
    weight, bias = torch.randn(CLASSES, EMBEDDING, **kind), torch.randn(CLASSES, **kind)
    batches = []
    for sizes in run.sizes:
        images = torch.randn(sum(sizes), INPUTS, **kind)
        labels = torch.randint(CLASSES, (sum(sizes),), generator=draw)
        labels[torch.rand(sum(sizes), generator=draw) < 0.1] = -1
        batches.append((images.to(run.dtype), labels))
    return weight.to(run.dtype), bias.to(run.dtype), batches


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    state = optimizer.state[parameter]
    return {name: state[name] for name in ("momentum_buffer", "exp_avg", "exp_avg_sq") if name in state}


def _train_dense(run: Run, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Everything that training touches, by name; `grad/...` are those of every step."""
    weight, bias, batches = _data(run)
    weight, bias, batches = weight.to(dtype), bias.to(dtype), [(images.to(dtype), labels) for images, labels in batches]
    backbone = _backbone(run).to(dtype)
    rows, offsets = nn.Parameter(weight), nn.Parameter(bias)
    named = dict(backbone.named_parameters()) | {"head.weight": rows}
    if has_bias(run.margin):
        named["head.bias"] = offsets
    optimizer = OPTIMIZERS[run.optimizer](list(named.values()))
    state = initial_state(run.margin, dtype)
    trail: dict[str, Tensor] = {}
    for step in range(0, len(batches), run.micro):
        optimizer.zero_grad()
        for images, labels in batches[step : step + run.micro]:
            loss, state = dense_loss(
                backbone(images), rows, labels, run.margin, offsets if has_bias(run.margin) else None, state
            )
            loss.backward()
        trail[f"loss/{step}"] = loss.detach()
        for name, parameter in named.items():
            assert parameter.grad is not None
            trail[f"grad/{step}/{name}"] = parameter.grad.clone()
        optimizer.step()
    for name, parameter in named.items():
        trail[name] = parameter.detach()
        trail |= {f"{key}/{name}": value for key, value in _state_of(optimizer, parameter).items()}
    trail |= {f"buffer/{name}": buffer for name, buffer in backbone.named_buffers()}
    if state is not None:
        trail["margin_state"] = state
    return trail


def _train_rank(group: Any, run: Run, backbone: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    weight, bias, batches = _data(run)
    backbone = copy.deepcopy(backbone)
    if run.batch_norm:
        backbone = hp.SyncBatchNorm.convert(backbone, group)
    if group.rank > 0:
        for parameter in backbone.parameters():
            parameter.data.zero_()  # rank 0's start values must win
    model = hp.DataParallel(backbone, group=group, reduction=run.reduction, bucket_bytes=run.bucket_bytes)
    head = hp.ShardedClassifier(
        EMBEDDING,
        CLASSES,
        margin=run.margin,
        rule=run.rule,
        dtype=run.dtype,
        chunk_classes=run.chunk,
        backbone_reduction=run.reduction,
        group=group,
    )
    ids = set_rows(head, group, weight, bias if has_bias(run.margin) else None)
    named = dict(model.module.named_parameters()) | {f"head.{name}": p for name, p in head.named_parameters()}
    optimizer = OPTIMIZERS[run.optimizer](list(named.values()))
    trail: dict[str, Tensor] = {}
    for step in range(0, len(batches), run.micro):
        optimizer.zero_grad()
        for index in range(step, step + run.micro):
            own = [local(t, run.sizes[index], group.rank) for t in batches[index]]
            if index < step + run.micro - 1:
                with model.no_sync():
                    head(model(own[0]), own[1]).backward()
            else:
                loss = head(model(own[0]), own[1])
                loss.backward()
        trail[f"loss/{step}"] = loss.detach().clone()
        for name, parameter in named.items():
            assert parameter.grad is not None, f"no gradient for {name}"
            trail[f"grad/{step}/{name}"] = parameter.grad.clone()
        optimizer.step()
    for name, parameter in named.items():
        trail[name] = parameter.detach().clone()
        trail |= {f"{key}/{name}": value for key, value in _state_of(optimizer, parameter).items()}
    trail |= {f"buffer/{name}": buffer for name, buffer in model.module.named_buffers()}
    if head.margin_state is not None and initial_state(run.margin) is not None:
        trail["margin_state"] = head.margin_state.reshape(-1)
    return ids, trail


def _compare(run: Run, ranks: list[tuple[Tensor, dict[str, Tensor]]], least: float) -> None:
    """To `least`: losses, the first step's gradients, and the weights after the last step.

    What inherits the rounding of all earlier steps, the later steps' gradients and the optimizer's moments of them, may
    in float32 err three times as much, or three times as much as the dense float32 run where that strays further.
    """
    expected = _train_dense(run)
    same_dtype = _train_dense(run, run.dtype)
    for _, trail in ranks:
        assert set(trail) == set(expected)
    for name, value in expected.items():
        # The states are means of cosines (or of norms), of order 1.
        floor = float(name == "margin_state")
        unit = max(value.abs().max().item(), floor)
        tolerance = least
        if "/" in name and not name.startswith(("loss/", "grad/0/")) and run.dtype == torch.float32:
            tolerance = 3 * max(least, (same_dtype[name].double() - value.double()).abs().max().item() / unit)
        if "head." in name:
            rows = dense_rows([(ids, trail[name]) for ids, trail in ranks], CLASSES)
            assert_close(rows, value, tolerance, name)
            continue
        for rank, (_, trail) in enumerate(ranks):
            assert torch.equal(trail[name], ranks[0][1][name]), f"{name} of rank {rank} differs from rank 0"
        assert_close(ranks[0][1][name], value, tolerance, name, floor)


def _check(run: Run, tolerance: float = 1e-10) -> None:
    _compare(run, run_threads(run.ranks, _train_rank, run, _backbone(run)), tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_five_steps_of_training_equal_the_dense_run_in_float64(name: str, optimizer: str, ranks: int) -> None:
    _check(Run(ranks, MARGINS[name], optimizer, rule=["even", "striped", RandomRule(2)][ranks % 3]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["gentle-sgd", "adamw"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_five_steps_of_training_in_float32_equal_the_dense_run_in_float64(
    name: str, optimizer: str, ranks: int
) -> None:
    _check(Run(ranks, MARGINS[name], optimizer, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_backbone_with_batch_norm_equals_batch_norm_on_the_whole_batch(optimizer: str, ranks: int) -> None:
    for name in ("arcface-small-scale", "softmax-bias"):
        _check(Run(ranks, MARGINS[name], optimizer, batch_norm=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_accumulated_micro_batches_equal_the_sum_of_their_losses(batch_norm: bool, ranks: int) -> None:
    for name in ("arcface-small-scale", "softmax-bias", "adaface-quick", "magface"):
        _check(Run(ranks, MARGINS[name], micro=2, batch_norm=batch_norm))


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_averaging_backbone_and_a_head_that_knows_it_train_the_same(ranks: int) -> None:
    for micro in (1, 2):
        _check(Run(ranks, MARGINS["arcface-small-scale"], reduction="mean", micro=micro))


def test_one_large_bucket_and_many_small_ones_train_the_same() -> None:
    for size in (1, 64, 1 << 20):
        _check(Run(2, MARGINS["cosface"], bucket_bytes=size))


def test_other_gradients_taken_in_between_leave_those_of_the_parameters_alone() -> None:
    """torch.autograd.grad (a gradient penalty, a probe) accumulates nothing, so it may take nothing away."""

    def work(group: Any) -> Any:
        model = hp.DataParallel(nn.Linear(2, 2), group=group)
        model(torch.ones(3, 2)).sum().backward()
        summed = model.module.weight.grad.clone()
        torch.autograd.grad(model(torch.ones(3, 2)).square().sum(), list(model.module.parameters()))
        assert model.module.weight.grad is not None, "the gradient is gone"
        assert torch.equal(model.module.weight.grad, summed)

    run_threads(2, work)


class _Pause(torch.autograd.Function):
    """The identity, whose backward takes a while: long enough for gradients on their way to arrive."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.2)
        return grads[0]


class _LateOffset(nn.Module):
    """x * weight + offset. Of one sample, `offset` gets a view of the very gradient that `weight` still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Pause.apply(x * self.weight)
        return scaled + self.offset.view(1, -1)


def test_a_sum_may_not_be_written_into_memory_that_backward_still_reads() -> None:
    factors = torch.tensor([[1.0], [10.0]])

    def work(group: Any) -> Any:
        model = hp.DataParallel(_LateOffset(), group=group, bucket_bytes=1)
        (model(torch.ones(1, 4)) * factors[group.rank]).sum().backward()
        return model.module.offset.grad, model.module.weight.grad

    for offset, weight in run_threads(2, work):
        assert torch.equal(offset, torch.full((4,), 11.0))
        assert torch.equal(weight, torch.full((4,), 11.0))


def _in_process(group: Any, run: Run, averaged: Run) -> Any:
    ids, trail = _train_rank(group, run, _backbone(run))
    return ids.numpy(), {name: value.numpy() for name, value in trail.items()}, _ddp_gradients(group, averaged)


def _ddp_gradients(group: Any, run: Run) -> Any:
    """Of a backbone under torch's own DDP, which averages."""
    weight, _, batches = _data(run)
    model = nn.parallel.DistributedDataParallel(_backbone(run))
    head = hp.ShardedClassifier(
        EMBEDDING, CLASSES, margin=run.margin, dtype=run.dtype, backbone_reduction="mean", group=group
    )
    set_rows(head, group, weight)
    images, labels = (local(t, run.sizes[0], group.rank) for t in batches[0])
    head(model(images), labels).backward()
    return {name: p.grad.numpy() for name, p in model.module.named_parameters()}


def test_gloo_processes_train_as_one_with_our_data_parallel_and_with_torchs() -> None:
    run = Run(2, MARGINS["magface"], "sgd", batch_norm=True, micro=2)
    averaged = Run(2, MARGINS["arcface-small-scale"])
    results = run_processes(2, _in_process, run, averaged)
    ranks = [
        (torch.from_numpy(ids), {name: torch.as_tensor(value) for name, value in trail.items()})
        for ids, trail, _ in results
    ]
    _compare(run, ranks, 1e-10)
    expected = _train_dense(averaged)
    for _, _, gradients in results:
        for name, value in gradients.items():
            assert_close(torch.from_numpy(value), expected[f"grad/0/{name}"], 1e-10, name)
