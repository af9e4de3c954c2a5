"""A step that is cut into micro-batches equals one of a dense oracle whose gradients add up, and of one large batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.head.cases import (
    MARGINS,
    ONE_OF_EACH,
    TOLERANCE,
    Case,
    Problem,
    assert_close,
    dense_rows,
    has_bias,
    local,
    make_head,
    make_problem,
    set_rows,
)
from tests.head.test_row_optimizers import OPTIMIZERS
from tests.ranks import run_threads

# Samples of each rank, micro-batch by micro-batch; some have none. Steps are of 3, 1 and 2 of them.
SIZES = {
    1: ((5,), (2,), (3,), (6,), (0,), (4,)),
    2: ((3, 5), (0, 2), (2, 1), (4, 4), (0, 0), (1, 6)),
    3: ((3, 5, 1), (0, 2, 0), (2, 1, 1), (1, 4, 4), (0, 0, 0), (1, 3, 2)),
}
CUTS = (3, 1, 2)
FACTORS = (0.5, 0.125, 1.5, 0.7, 2.0, -0.25)

Make = Callable[[Any], torch.optim.Optimizer]


def steps(cuts: Sequence[int] = CUTS) -> Iterator[tuple[int, bool]]:
    """Numbers of the micro-batches, and whether each is the last one of its step."""
    ends = [sum(cuts[: place + 1]) - 1 for place in range(len(cuts))]
    return ((number, number in ends) for number in range(sum(cuts)))


def backward(head: Any, last: bool, features: Tensor, labels: Tensor, factor: float = 1.0) -> Tensor:
    with contextlib.nullcontext() if last else head.no_step():
        loss: Tensor = head(features, labels)
        (loss * factor).backward()
    return loss.detach()


def _accumulate(group: Any, case: Case, problem: Problem) -> dict[str, Any]:
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    drawn, features_grads, losses = [], [], []
    for number, last in steps():
        (features, labels), sizes = problem.batches[number], case.steps[number]
        before = head.weight.detach().clone()
        mine = local(features, sizes, group.rank).requires_grad_()
        drawn.append(_replay(head, labels, group.rank))
        losses.append(backward(head, last, mine, local(labels, sizes, group.rank), FACTORS[number]))
        features_grads.append(mine.grad)
        assert head.weight.grad is None
        assert last or case.head["optimizer"].lazy_decay or torch.equal(head.weight.detach(), before)
    assert head.row_optimizer.param_groups[0]["steps"] == len(CUTS)
    head.settle()
    bias = None if head.bias is None else head.bias.detach()
    return {
        "ids": ids, "weight": head.weight.detach(), "bias": bias, "losses": torch.stack(losses),
        "features": features_grads, "drawn": [None if rows is None else (ids[rows], shift) for rows, shift in drawn],
    }  # fmt: skip


def _replay(head: Any, labels: Tensor, rank: int) -> tuple[Tensor | None, Tensor | None]:
    """Rows that the next forward pass draws, and what is added to their logits."""
    sampler = head._problem.sampler
    if sampler is None:
        return None, None
    ranks, rows = head.layout.locate(labels[labels >= 0])
    positives = torch.unique(rows[ranks == rank])
    return tuple(sampler.draw(positives, len(head.weight), head.num_classes, int(head.draws), rank))


def _dense(case: Case, problem: Problem, make: Make, drawn: list[tuple[Tensor, Tensor]] | None) -> dict[str, Any]:
    """The oracle, whose gradients add up under autograd; losses over the drawn classes only, with their shifts."""
    weight = problem.weight.double().clone().requires_grad_()
    bias = None if problem.bias is None else problem.bias.double().clone().requires_grad_()
    optimizer = make([weight] if bias is None else [weight, bias])
    state, losses, features_grads = initial_state(case.margin), [], []
    for number, last in steps():
        features, labels = problem.batches[number]
        features = features.double().clone().requires_grad_()
        rows, biases = weight, bias
        if drawn is not None:
            chosen, shifts = drawn[number]
            rows, labels = weight[chosen], torch.where(labels < 0, -1, torch.searchsorted(chosen, labels))
            biases = shifts if bias is None else bias[chosen] + shifts
        loss, state = dense_loss(features, rows, labels, case.margin, biases, state)
        (loss * FACTORS[number]).backward()
        losses.append(loss.detach())
        features_grads.append(torch.zeros_like(features) if features.grad is None else features.grad)
        if last:
            for parameter in [weight] if bias is None else [weight, bias]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return {"weight": weight.detach(), "bias": bias, "losses": torch.stack(losses), "features": features_grads}


def _check(case: Case, policy: hp.RowPolicy, make: Make, tolerance: float | None = None) -> None:
    case = replace(case, sizes=SIZES[case.ranks], head=case.head | {"optimizer": policy})
    problem = make_problem(case)
    ranks = run_threads(case.ranks, _accumulate, case, problem)
    drawn = None
    if "sampler" in case.head:
        drawn = [_merged([rank["drawn"][number] for rank in ranks]) for number in range(sum(CUTS))]
    oracle = _dense(case, problem, make, drawn)
    allowed = TOLERANCE[case.dtype] if tolerance is None else tolerance
    weight = dense_rows([(rank["ids"], rank["weight"]) for rank in ranks], case.classes)
    assert_close(weight, oracle["weight"], allowed, "rows")
    if has_bias(case.margin):
        bias = dense_rows([(rank["ids"], rank["bias"]) for rank in ranks], case.classes)
        assert_close(bias, oracle["bias"], allowed, "biases")
    for rank in ranks:
        assert_close(rank["losses"], oracle["losses"], allowed, "losses")
    for number, expected in enumerate(oracle["features"]):
        got = torch.cat([rank["features"][number] for rank in ranks])
        assert_close(got, expected, allowed, f"features of micro-batch {number}")


def _merged(drawn: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Classes that any rank drew, ascending, and their shifts."""
    classes, order = torch.cat([ids for ids, _ in drawn]).sort()
    shifts = torch.cat([torch.zeros(len(ids)) if shift is None else shift for ids, shift in drawn])
    return classes, shifts.double()[order]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("margin", ["softmax-bias", "arcface-small-scale"])
def test_rows_step_once_by_the_gradients_of_all_micro_batches(margin: str, ranks: int, name: str) -> None:
    _check(Case(ranks, 23, MARGINS[margin], chunk=4), *OPTIMIZERS[name])


@pytest.mark.parametrize("margin", ONE_OF_EACH)
def test_with_every_margin(margin: str) -> None:
    _check(Case(2, 23, MARGINS[margin], rule="striped", chunk=5), *OPTIMIZERS["momentum"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_single_precision_to_its_rounding(name: str) -> None:
    case = Case(2, 50, hp.CosFace(scale=8.0, margin=0.1), dtype=torch.float32, embedding=16)
    _check(case, *OPTIMIZERS[name])


@pytest.mark.parametrize("correct", [True, False], ids=["corrected", "plain"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_that_any_micro_batch_drew_take_part_and_no_others(ranks: int, correct: bool) -> None:
    sampler = hp.UniformSampler(rate=0.3, correct_logits=correct)
    _check(Case(ranks, 60, MARGINS["softmax-bias"], chunk=4, head={"sampler": sampler}), *OPTIMIZERS["sgd"])


@pytest.mark.parametrize("margin", ["cosface-small-scale", "curricularface-quick"])
def test_drawn_rows_with_a_margin(margin: str) -> None:
    sampler = hp.UniformSampler(rate=0.4, correct_logits=False)
    _check(Case(2, 60, MARGINS[margin], chunk=7, head={"sampler": sampler}), *OPTIMIZERS["sgd"])


def test_lazily_decayed_rows_are_where_dense_steps_would_have_brought_them() -> None:
    policy, make = OPTIMIZERS["momentum"]
    sampler = hp.UniformSampler(rate=0.2, correct_logits=False)
    case = Case(2, 60, MARGINS["cosface-small-scale"], chunk=4, head={"sampler": sampler})
    _check(case, replace(policy, lazy_decay=True), make)


def _cut(group: Any, case: Case, problem: Problem, cuts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """One step by samples of one batch, of which each micro-batch takes some; each weighs as they do in all."""
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    features, labels = problem.batches[0]
    counted = int((labels >= 0).sum())
    for number, samples in enumerate(cuts, 1):
        chosen = torch.tensor(samples)
        mine = slice(len(chosen) * group.rank // group.size, len(chosen) * (group.rank + 1) // group.size)
        share = int((labels[chosen] >= 0).sum()) / counted
        backward(head, number == len(cuts), features[chosen][mine], labels[chosen][mine], share)
    return ids, head.weight.detach()


@pytest.mark.parametrize("margin", ["softmax-bias", "arcface-small-scale", "magface-narrow"])
def test_micro_batches_equal_one_large_batch(margin: str) -> None:
    policy, make = OPTIMIZERS["adamw"]
    case = Case(2, 23, MARGINS[margin], chunk=4, sizes=((12, 0),), head={"optimizer": policy})
    problem = make_problem(case)
    ranks = run_threads(2, _cut, case, problem, [[3, 0, 1], [2], [11, 4, 5, 6, 7], [8, 9, 10]])
    weight = problem.weight.clone().requires_grad_()
    bias = None if problem.bias is None else problem.bias.clone().requires_grad_()
    loss, _ = dense_loss(problem.batches[0][0], weight, problem.batches[0][1], case.margin, bias)
    loss.backward()
    make([weight]).step()
    assert_close(dense_rows(ranks, 23), weight, 1e-10, "rows")


def alone(**options: Any) -> hp.ShardedClassifier:
    return hp.ShardedClassifier(4, 9, dtype=torch.float64, initial_std=1.0, group=hp.Group.alone(), **options)


def samples(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, dtype=torch.float64, generator=draw), torch.randint(9, (3,), generator=draw)


def one_step(head: hp.ShardedClassifier, seed: int) -> Tensor:
    """Rows after a step by one batch."""
    backward(head, True, *samples(seed))
    return head.weight.detach().clone()


def _one_is_not_finite(group: Any, place: int) -> tuple[Tensor, Tensor, Tensor]:
    policy = hp.RowSGD(0.1, momentum=0.9)
    head = hp.ShardedClassifier(4, 9, dtype=torch.float64, optimizer=policy, group=group)
    fresh = copy.deepcopy(head)
    before = head.weight.detach().clone()
    for number in range(place):
        backward(head, False, *samples(number))
    features, labels = samples(place)
    features[0, 0] = torch.nan if group.rank == 1 else 0.0
    with pytest.raises(hp.NonFiniteError, match="features") as caught:
        backward(head, place == 2, features, labels)
    assert caught.value.ranks == (1,)
    assert torch.equal(head.weight.detach(), before)
    for each in (head, fresh):
        backward(each, True, *samples(7))
    return before, head.weight.detach(), fresh.weight.detach()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_is_left_of_a_step_with_a_micro_batch_that_is_not_finite(place: int) -> None:
    for before, after, fresh in run_threads(2, _one_is_not_finite, place):
        assert torch.equal(after, fresh) and not torch.equal(after, before)


def _give_up_by_an_error(head: Any) -> None:
    def fail() -> None:
        with head.no_step():
            head(*samples(1)).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def _give_up_by_a_bad_label(head: Any) -> None:
    with head.no_step():
        head(*samples(1)).backward()
    with pytest.raises(ValueError, match="labels"):
        head(samples(1)[0], torch.tensor([0, 1, 9]))


def _give_up_by_zero_grad(head: Any) -> None:
    with head.no_step():
        head(*samples(1)).backward()
    head.row_optimizer.zero_grad()


def _give_up_by_changing_rows(head: Any) -> None:
    with head.no_step():
        head(*samples(1)).backward()
    with torch.no_grad():
        head.weight.add_(1.0)
    loss = head(*samples(1))
    with pytest.raises(RuntimeError, match="rows that stay as they are from the first micro-batch"):
        loss.backward()
    with torch.no_grad():
        head.weight.sub_(1.0)


@pytest.mark.parametrize(
    "give_up", [_give_up_by_an_error, _give_up_by_a_bad_label, _give_up_by_zero_grad, _give_up_by_changing_rows]
)
def test_a_step_that_is_given_up_leaves_nothing(give_up: Callable[[Any], None]) -> None:
    head = alone(optimizer=hp.RowSGD(0.1, momentum=0.9))
    expected = one_step(copy.deepcopy(head), 2)
    give_up(head)
    assert_close(one_step(head, 2), expected, 1e-14, "rows")


def test_a_copy_starts_without_micro_batches() -> None:
    head = alone(optimizer=hp.RowSGD(0.1))
    expected = one_step(copy.deepcopy(head), 2)
    with head.no_step():
        head(*samples(1)).backward()
        twin = copy.deepcopy(head)
        assert torch.equal(one_step(twin, 2), expected)
    assert not torch.equal(one_step(head, 2), expected)


def test_contexts_may_lie_in_each_other_and_what_is_outside_steps() -> None:
    head = alone(optimizer=hp.RowSGD(0.1))
    before = head.weight.detach().clone()
    with head.no_step():
        with head.no_step():
            head(*samples(0)).backward()
        head(*samples(1)).backward()
    assert torch.equal(head.weight.detach(), before)
    assert not torch.equal(one_step(head, 2), before)


def test_without_an_optimizer_of_rows_gradients_add_up_by_themselves() -> None:
    head, expected = alone(), alone()
    for seed in range(3):
        backward(head, seed == 2, *samples(seed))
        expected(*samples(seed)).backward()
    assert head.weight.grad is not None and torch.equal(head.weight.grad, expected.weight.grad)


def test_what_is_left_grows_with_the_samples_and_not_with_the_classes() -> None:
    def left(classes: int) -> int:
        head = hp.ShardedClassifier(4, classes, optimizer=hp.RowSGD(0.1), group=hp.Group.alone())
        with head.no_step():
            head(torch.randn(3, 4), torch.tensor([0, 1, 2])).backward()
            (batch,) = head.row_optimizer.micro_batches._batches
            chunks = batch.chunks
            values = [chunks.features, *batch.targets.owned, *batch.log_sum_exp, batch.target_B, batch.weights_B]
            assert chunks.kept is None and chunks.drawn is None and chunks.bias is None and not chunks._scratch
            assert chunks.weight.data_ptr() == head.weight.data_ptr()
            return sum(value.numel() for value in values)

    assert left(9) == left(9000)
