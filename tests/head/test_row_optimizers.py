"""Rows that step in the backward pass equal those of a dense oracle under the optimizer of torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.head.cases import (
    MARGINS,
    TOLERANCE,
    Case,
    Problem,
    assert_close,
    dense_rows,
    errors_of,
    has_bias,
    local,
    make_head,
    make_problem,
    set_rows,
)
from tests.head.rowwise_adamw import RowwiseAdamW
from tests.ranks import run_program, run_threads


class RowwiseAdagrad(torch.optim.Optimizer):
    """From the definition: each row's rate is divided by the root of its summed mean squares."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            grad = (parameter.grad + self.param_groups[0]["weight_decay"] * parameter).view(len(parameter), -1)
            sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter), 1, dtype=parameter.dtype))
            sums += grad.square().mean(dim=1, keepdim=True)
            step = self.param_groups[0]["lr"] * grad / (sums.sqrt() + 1e-10)
            parameter -= step.view_as(parameter)


OPTIMIZERS: dict[str, tuple[hp.RowPolicy, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (hp.RowSGD(0.3), lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": (
        hp.RowSGD(0.3, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        hp.RowSGD(0.3, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.3, momentum=0.8, nesterov=True),
    ),
    "adamw": (
        hp.RowAdamW(0.05, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
        lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.9), 1e-3, 0.1),
    ),
    "adagrad": (hp.RowAdagrad(0.1, weight_decay=0.01), lambda p: RowwiseAdagrad(p, 0.1, 0.01)),
}


def _train_sharded(group: Any, case: Case, problem: Problem, decay: float = 1.0) -> tuple[Tensor, ...]:
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(head.row_optimizer, decay)
    losses = []
    for sizes, (features, labels) in zip(case.steps, problem.batches, strict=True):
        mine = local(features, sizes, group.rank).requires_grad_()
        loss = head(mine, local(labels, sizes, group.rank))
        loss.backward()
        assert head.weight.grad is None and mine.grad is not None
        head.row_optimizer.step()
        head.row_optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach())
    bias = torch.zeros(len(ids)) if head.bias is None else head.bias.detach()
    return ids, head.weight.detach(), bias, torch.stack(losses)


def _train_dense(
    case: Case, problem: Problem, make: Callable[[Any], torch.optim.Optimizer], decay: float = 1.0
) -> tuple[Tensor, ...]:
    weight = problem.weight.double().clone().requires_grad_()
    bias = None if problem.bias is None else problem.bias.double().clone().requires_grad_()
    optimizer = make([weight] if bias is None else [weight, bias])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    state, losses = initial_state(case.margin), []
    for features, labels in problem.batches:
        optimizer.zero_grad(set_to_none=False)
        loss, state = dense_loss(features.double(), weight, labels, case.margin, bias, state)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    biases = torch.zeros(case.classes) if bias is None else bias.detach()
    return weight.detach(), biases, torch.stack(losses)


def _check(case: Case, name: str, decay: float = 1.0, tolerance: float | None = None) -> None:
    policy, make = OPTIMIZERS[name]
    case = replace(case, head=case.head | {"optimizer": policy})
    problem = make_problem(case)
    ranks = run_threads(case.ranks, _train_sharded, case, problem, decay)
    weight, bias, losses = _train_dense(case, problem, make, decay)
    allowed = TOLERANCE[case.dtype] if tolerance is None else tolerance
    assert_close(dense_rows([(ids, rows) for ids, rows, *_ in ranks], case.classes), weight, allowed, "rows")
    if has_bias(case.margin):
        assert_close(dense_rows([(ids, rows) for ids, _, rows, _ in ranks], case.classes), bias, allowed, "biases")
    for rank in ranks:
        assert_close(rank[3], losses, allowed, "losses")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("margin", ["softmax-bias", "arcface-small-scale", "curricularface-quick"])
def test_rows_step_as_the_dense_optimizer_steps_them(margin: str, ranks: int, name: str) -> None:
    _check(Case(ranks, 23, MARGINS[margin], chunk=4), name, decay=0.7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_single_precision_to_its_rounding(name: str) -> None:
    _check(Case(2, 50, hp.CosFace(scale=8.0, margin=0.1), dtype=torch.float32, embedding=16), name, tolerance=3e-5)


@pytest.mark.parametrize("budget", [0, 10 * 8 * 8, 1 << 20])
def test_kept_products_change_nothing(budget: int) -> None:
    case = Case(2, 50, hp.ArcFace(8.0, 0.3), chunk=7, head={"logits_budget": budget})
    _check(case, "momentum")


def test_a_second_backward_pass_is_refused() -> None:
    """Its gradient is that of rows that are no more."""
    head = hp.ShardedClassifier(4, 9, optimizer=hp.RowSGD(0.1), group=hp.Group.alone())
    features = torch.randn(3, 4, requires_grad=True)
    loss = head(features, torch.tensor([0, 1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
def test_moments_may_be_bfloat16(rows: torch.dtype) -> None:
    """Each of 60 steps is rounded, at random: the way stays that of float32."""
    case = Case(2, 60, hp.CosFace(8.0, 0.1), dtype=torch.float32, embedding=32, sizes=((8, 8),) * 60, ignored_share=0)
    problem = make_problem(case)
    found = []
    for dtype, state in ((torch.float32, None), (rows, torch.bfloat16)):
        policy = hp.RowSGD(0.1, momentum=0.9, state_dtype=state)
        run = replace(case, dtype=dtype, head={"optimizer": policy, "compute_dtype": torch.float32})
        ranks = run_threads(2, _train_sharded, run, problem)
        found.append(dense_rows([(ids, weight.float()) for ids, weight, *_ in ranks], 60))
    moved = (found[0] - problem.weight).norm()
    assert (found[1] - found[0]).norm() < 0.1 * moved
    assert not torch.equal(*found)


def test_bfloat16_rows_move_by_steps_that_rounding_to_the_nearest_would_lose() -> None:
    def moved(stochastic: bool) -> float:
        policy = hp.RowSGD(1e-3, stochastic_rounding=stochastic)
        head = hp.ShardedClassifier(
            32, 50, margin=hp.Softmax(bias=False), optimizer=policy, dtype=torch.bfloat16,
            compute_dtype=torch.float32, initial_std=1.0, group=hp.Group.alone(),
        )  # fmt: skip
        before = head.weight.detach().float().clone()
        for step in range(40):
            features = torch.randn(20, 32, generator=torch.Generator().manual_seed(step))
            head(features, torch.arange(20)).backward()
        return float((head.weight.detach().float() - before).norm())

    assert moved(True) > 3 * moved(False)


def test_a_run_repeats_bit_for_bit_and_another_seed_rounds_otherwise() -> None:
    def rows(seed: int) -> Tensor:
        head = hp.ShardedClassifier(
            8, 30, optimizer=hp.RowAdamW(0.01, seed=seed), dtype=torch.bfloat16, group=hp.Group.alone()
        )
        for step in range(3):
            head(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)), torch.arange(6)).backward()
        return head.weight.detach().clone()

    assert torch.equal(rows(0), rows(0)) and not torch.equal(rows(0), rows(1))


def test_another_group_of_parameters_is_refused() -> None:
    head = hp.ShardedClassifier(4, 9, optimizer=hp.RowSGD(0.1), group=hp.Group.alone())
    with pytest.raises(ValueError, match="RowOptimizer: expected one group"):
        head.row_optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert len(head.row_optimizer.param_groups) == 1


def test_training_rows_does_not_load_the_compiler_of_torch() -> None:
    """70 MB in each rank, which optimizers of torch load."""
    program = """
import sys, torch, hybridpar as hp
sampler = hp.UniformSampler(rate=0.5)
head = hp.ShardedClassifier(4, 9, optimizer=hp.RowAdamW(0.1), sampler=sampler, group=hp.Group.alone())
with head.no_step():
    head(torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])).backward()
head(torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])).backward()
head.row_optimizer.step()
assert "torch._dynamo" not in sys.modules
"""
    statuses, outputs = run_program(program, 1)
    assert statuses == [0], outputs


def test_a_parameter_put_in_later_takes_its_state_over() -> None:
    head = hp.ShardedClassifier(4, 9, optimizer=hp.RowSGD(0.1, momentum=0.9), group=hp.Group.alone())
    features, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
    head(features, labels).backward()
    momentum = head.row_optimizer.state[head.weight]["momentum_buffer"]
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    before = head.weight.detach().clone()
    head(features, labels).backward()
    assert head.row_optimizer.state[head.weight]["momentum_buffer"] is momentum
    assert not torch.equal(head.weight.detach(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hp.RowSGD(-1.0), r"RowSGD.lr: expected a finite number >= 0, got -1.0"),
        (lambda: hp.RowSGD(math.nan), r"RowSGD.lr: expected a finite number"),
        (lambda: hp.RowSGD(0.1, weight_decay=-1), r"RowSGD.weight_decay: expected"),
        (lambda: hp.RowSGD(0.1, momentum=1.0), r"RowSGD.momentum: expected a number in \[0, 1\), got 1.0"),
        (lambda: hp.RowSGD(0.1, nesterov=True), r"RowSGD.nesterov: expected a momentum above 0"),
        (lambda: hp.RowAdamW(0.1, betas=(0.9, 1.0)), r"RowAdamW.betas: expected a number in \[0, 1\)"),
        (lambda: hp.RowAdamW(0.1, eps=0.0), r"RowAdamW.eps: expected a number above 0, got 0.0"),
        (lambda: hp.RowAdagrad(0.1, initial_accumulator_value=-1.0), r"RowAdagrad: expected eps above 0"),
        (lambda: hp.RowSGD(0.1, state_dtype=torch.float16), r"RowSGD.state_dtype: expected float32, bfloat16 or None"),
    ],
)
def test_policies_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_hyperparameters_that_a_scheduler_spoils_are_refused_before_any_row_is_touched() -> None:
    head = hp.ShardedClassifier(4, 9, optimizer=hp.RowSGD(0.1), group=hp.Group.alone())
    before = head.weight.detach().clone()
    head.row_optimizer.param_groups[0]["lr"] = math.nan
    loss = head(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"RowSGD\.lr: expected a finite number >= 0, got nan"):
        loss.backward()
    assert torch.equal(head.weight.detach(), before)


def test_a_copy_steps_rows_of_its_own_by_the_same_policy() -> None:
    def work(group: Any) -> None:
        policy = hp.RowSGD(0.1, momentum=0.9, weight_decay=0.1, lazy_decay=True)
        head = hp.ShardedClassifier(
            4, 20, optimizer=policy, sampler=hp.UniformSampler(rate=0.3), dtype=torch.float64, group=group
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(head.row_optimizer, 0.5)
        features, labels = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 12])
        head(features, labels).backward()
        scheduler.step()
        twin = copy.deepcopy(head)
        before = head.weight.detach().clone()
        twin(features, labels).backward()
        assert torch.equal(head.weight.detach(), before) and not torch.equal(twin.weight.detach(), before)
        assert twin.row_optimizer is not head.row_optimizer and twin.row_optimizer.param_groups[0]["lr"] == 0.05
        head(features, labels).backward()
        assert torch.equal(head.state_dict()["weight"], twin.state_dict()["weight"])

    run_threads(2, work)


@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad"])
def test_a_checkpoint_continues_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    case = Case(2, 23, MARGINS["softmax-bias"], sizes=((3, 5), (2, 4), (6, 1), (2, 3)))
    case = replace(case, head={"optimizer": OPTIMIZERS[name][0]})
    problem = make_problem(case)

    def part(group: Any, begin: int, end: int, found: Path | None, saved: Path | None) -> tuple[Tensor, ...]:
        head = make_head(group, case)
        set_rows(head, group, problem.weight, problem.bias)
        if found is not None:
            hp.checkpoint.load(found, head=head, optimizer=head.row_optimizer, group=group)
        for features, labels in problem.batches[begin:end]:
            share = [len(labels) // group.size + (rank < len(labels) % group.size) for rank in range(group.size)]
            head(local(features, share, group.rank), local(labels, share, group.rank)).backward()
        assert head.row_optimizer.param_groups[0]["steps"] == end
        if saved is not None:
            hp.checkpoint.save(saved, step=end, head=head, optimizer=head.row_optimizer, group=group)
        return head.layout.class_ids(group.rank), head.weight.detach(), head.bias.detach()

    whole = run_threads(2, part, 0, 4, None, None)
    run_threads(2, part, 0, 2, None, tmp_path)
    resumed = run_threads(3, part, 2, 4, tmp_path, None)
    for place in (1, 2):
        rows = [dense_rows([(rank[0], rank[place]) for rank in ranks], 23) for ranks in (whole, resumed)]
        assert_close(rows[1], rows[0], 1e-10, "rows")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer: expected a RowPolicy, as"),
        ({"sampler": 0.1}, TypeError, "sampler: expected a Sampler, as"),
        ({"logits_budget": -1}, ValueError, "logits_budget: expected bytes, 0 or more, got -1"),
    ],
)
def test_wrong_settings_on_one_rank_are_refused_on_all(settings: Any, kind: type[Exception], message: str) -> None:
    def make(group: Any) -> None:
        hp.ShardedClassifier(4, 9, group=group, **(settings if group.rank == 1 else {}))

    for error in errors_of(2, make):
        assert isinstance(error, kind) and message in str(error)


def test_ranks_with_different_policies_are_refused() -> None:
    def make(group: Any) -> None:
        hp.ShardedClassifier(4, 9, optimizer=hp.RowSGD(0.1 * (1 + group.rank)), group=group)

    for error in errors_of(2, make):
        assert isinstance(error, ValueError) and "optimizer" in str(error)


def _lazily(group: Any, case: Case, problem: Problem) -> tuple[Tensor, ...]:
    """Trained with draws, and which classes took part in each step."""
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(head.row_optimizer, 0.8)
    active = []
    for step, (sizes, (features, labels)) in enumerate(zip(case.steps, problem.batches, strict=True)):
        ranks, rows = head.layout.locate(labels[labels >= 0])
        positives = torch.unique(rows[ranks == group.rank])
        drawn = case.head["sampler"].draw(positives, len(ids), case.classes, step, group.rank)
        active.append(torch.zeros(case.classes, dtype=torch.bool).index_fill_(0, ids[drawn.rows], True))
        head(local(features, sizes, group.rank), local(labels, sizes, group.rank)).backward()
        scheduler.step()
    rows = head.state_dict()["weight"]
    assert torch.equal(rows, head.weight.detach())
    return ids, rows, torch.zeros(len(ids)) if head.bias is None else head.bias.detach(), torch.stack(active)


@pytest.mark.parametrize("most", [1024, 3])
@pytest.mark.parametrize("name", ["momentum", "nesterov-decay", "plain-decay", "adamw"])
@pytest.mark.parametrize("margin", ["softmax-bias", "cosface-small-scale"])
def test_lazily_decayed_rows_are_where_dense_steps_would_have_brought_them(
    margin: str, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense optimizer takes every step, with no gradient for rows that took no part."""
    monkeypatch.setattr("hybridpar.head.row_optimizers._MOST_MISSED", most)
    policy, make = LAZY[name]
    sampler = hp.UniformSampler(rate=0.3, correct_logits=False)
    head = {"optimizer": replace(policy, lazy_decay=True), "sampler": sampler}
    case = Case(2, 40, MARGINS[margin], chunk=4, sizes=((2, 3),) * 9, head=head, ignored_share=0.0)
    problem = make_problem(case)
    results = run_threads(2, _lazily, case, problem)
    active = results[0][3] | results[1][3]
    assert (active.sum(dim=0) < 9).all() and (active.sum(dim=0) > 0).any()

    weight = problem.weight.clone().requires_grad_()
    bias = None if problem.bias is None else problem.bias.clone().requires_grad_()
    optimizer = make([weight] if bias is None else [weight, bias])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for (features, labels), taking in zip(problem.batches, active, strict=True):
        chosen = taking.nonzero().flatten()
        optimizer.zero_grad(set_to_none=False)
        among = torch.searchsorted(chosen, labels)
        loss, _ = dense_loss(features, weight[chosen], among, case.margin, None if bias is None else bias[chosen])
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert_close(dense_rows([result[:2] for result in results], 40), weight, 1e-10, "rows")
    if bias is not None:
        assert_close(dense_rows([(result[0], result[2]) for result in results], 40), bias, 1e-10, "biases")


LAZY: dict[str, tuple[hp.RowPolicy, Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": OPTIMIZERS["momentum"],
    "nesterov-decay": (
        hp.RowSGD(0.3, momentum=0.8, weight_decay=0.02, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.3, momentum=0.8, weight_decay=0.02, nesterov=True),
    ),
    "plain-decay": (hp.RowSGD(0.3, weight_decay=0.02), lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.02)),
    # Moments and their corrections count a row's own steps: only the decay is dense.
    "adamw": (
        hp.RowAdamW(0.05, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
        lambda p: RowwiseAdamW(p, 0.05, (0.8, 0.9), 1e-3, 0.1),
    ),
}


def test_lazy_decay_needs_a_linear_one() -> None:
    with pytest.raises(ValueError, match=r"RowAdagrad\.lazy_decay: expected RowSGD or RowAdamW"):
        hp.RowAdagrad(0.1, lazy_decay=True)
