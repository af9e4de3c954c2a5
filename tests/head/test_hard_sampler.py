"""Heads with hard negatives equal a dense softmax over what was drawn, and estimate that over all classes."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hybridpar as hp
from tests.head.cases import Case, assert_close, dense_rows, errors_of, local, make_head, make_problem, set_rows
from tests.head.test_class_graph import brute_force
from tests.ranks import run_threads

CLASSES, K, RATE = 60, 4, 0.4
SAMPLER = hp.HardSampler(rate=RATE, neighbors=K, every=2, uniform=0.3)


def _near(graph: Tensor, labels: Tensor) -> list[int]:
    """Neighbours of the batch's classes that are not in the batch, nearest first."""
    classes = sorted(set(labels.tolist()) - {-1})
    by_level = [int(graph[label, level]) for level in range(graph.shape[1]) for label in classes]
    return [label for label in dict.fromkeys(by_level) if label not in classes]


def _settled(head: Any) -> dict[str, Tensor]:
    """Rows that a sampler left out moved on: those of a copy, so that the head has that still before it."""
    state: dict[str, Tensor] = copy.deepcopy(head).state_dict()
    return state


def _train(group: Any, case: Case, problem: Any, row_policy: bool) -> list[dict[str, Any]]:
    """Every step's results, by SGD of the rows' optimizer or of torch."""
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    optimizer = None if row_policy else torch.optim.SGD(head.parameters(), lr=2.0, momentum=0.9)
    steps = []
    for sizes, (features, labels) in zip(case.steps, problem.batches, strict=True):
        mine = local(features, sizes, group.rank).requires_grad_()
        loss = head(mine, local(labels, sizes, group.rank))
        head.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        state, graph = _settled(head), head.class_graph.clone()
        step = {"loss": loss.detach(), "features": mine.grad, "ids": ids, "graph": graph}
        steps.append(step | {"rows": state["weight"], "bias": state.get("bias")})
    return steps


def _expected_draw(ids: Tensor, graph: Tensor, labels: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Class ids of a rank that take part, and what is added to their logits, in terms of the definition."""
    here = ids.tolist()
    positives = [label for label in here if label in labels.tolist()]
    negatives = max(0, math.ceil(RATE * len(here)) - len(positives))
    near = [label for label in _near(graph, labels) if label in here]
    hard = near[: negatives - math.ceil(SAMPLER.uniform * negatives)]
    uniform = negatives - len(hard)
    others = len(here) - len(positives) - len(hard)

    def rows_of(chosen: list[int]) -> Tensor:
        return torch.tensor([here.index(label) for label in chosen], dtype=torch.int64)

    drawn = SAMPLER.draw(rows_of(positives), len(here), CLASSES, step, rank, rows_of(near))
    taking_part = ids[drawn.rows].tolist()
    assert set(positives) | set(hard) <= set(taking_part)
    assert len(set(taking_part)) == len(taking_part) == len(positives) + len(hard) + uniform
    certain = torch.tensor([label in positives or label in hard for label in taking_part])
    shift = math.log(others / uniform) if 0 < uniform < others else 0.0
    return ids[drawn.rows], shift * (~certain).double()


@pytest.mark.parametrize("row_policy", [False, True], ids=["torch", "rows"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("margin", [hp.CosFace(8.0, 0.2), hp.Softmax(bias=True)])
def test_training_is_that_of_a_dense_softmax_over_what_was_drawn(margin: Any, ranks: int, row_policy: bool) -> None:
    """Six steps, with a graph of every other one's rows; labels are ignored, ranks have no samples, rows miss steps."""
    head: dict[str, Any] = {"sampler": SAMPLER}
    if row_policy:
        head["optimizer"] = hp.RowSGD(2.0, momentum=0.9, lazy_decay=True)
    sizes = {1: (5,), 2: (0, 6), 3: (3, 0, 2)}[ranks]
    case = Case(ranks, CLASSES, margin, chunk=4, head=head, sizes=(sizes,) * 6)
    problem = make_problem(case)
    results = run_threads(ranks, _train, case, problem, row_policy)
    weight = problem.weight.clone().requires_grad_()
    bias = None if problem.bias is None else problem.bias.clone().requires_grad_()
    dense = torch.optim.SGD([weight] if bias is None else [weight, bias], lr=2.0, momentum=0.9)
    graph = torch.empty(0)
    hard = 0
    for step, (features, labels) in enumerate(problem.batches):
        if step % 2 == 0:
            graph = brute_force(weight.detach(), K)
        now = [rank[step] for rank in results]
        assert torch.equal(dense_rows([(rank["ids"], rank["graph"]) for rank in now], CLASSES).long(), graph)
        shifts = torch.full((CLASSES,), -math.inf).double()
        for rank, result in enumerate(now):
            drawn, added = _expected_draw(result["ids"], graph, labels, step, rank)
            shifts[drawn] = added
        hard += sum(bool(shifts[label] == 0) for label in _near(graph, labels))
        x = features.clone().requires_grad_()
        valid = labels >= 0
        own = F.one_hot(labels.clamp(min=0), CLASSES).double()
        logits = 8.0 * (F.normalize(x) @ F.normalize(weight).T - 0.2 * own) if bias is None else x @ weight.T + bias
        shifted = logits + torch.where(own.bool(), 0.0, shifts)
        loss = F.cross_entropy(shifted[valid], labels[valid])
        dense.zero_grad()
        loss.backward()
        dense.step()
        for rank in now:
            assert_close(rank["loss"], loss, 1e-10, "loss")
        assert_close(torch.cat([rank["features"] for rank in now]), x.grad, 1e-10, "feature gradient")
        assert_close(dense_rows([(rank["ids"], rank["rows"]) for rank in now], CLASSES), weight, 1e-10, "rows")
        if bias is not None:
            assert_close(dense_rows([(rank["ids"], rank["bias"]) for rank in now], CLASSES), bias, 1e-10, "biases")
    assert hard > 12  # hard negatives did take part


def test_the_sum_estimates_that_over_all_classes_without_bias_and_better_than_uniform_draws() -> None:
    """Over 400 draws the mean of exp(loss) comes near the exact one, within three of its own deviations."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(25, 8, generator=draw, dtype=torch.float64)
    weight = centres.repeat(20, 1) + 0.3 * torch.randn(500, 8, generator=draw, dtype=torch.float64)
    x, y = weight[7:8] + 0.3 * torch.randn(1, 8, generator=draw, dtype=torch.float64), torch.tensor([7])

    def draws(sampler: hp.Sampler | None, count: int) -> Tensor:
        head = hp.ShardedClassifier(
            8, 500, margin=hp.CosFace(10.0, 0.1), sampler=sampler, dtype=torch.float64, group=hp.Group.alone()
        )
        head.weight.data.copy_(weight)
        with torch.no_grad():
            return torch.stack([head(x, y).exp() for _ in range(count)])

    exact = draws(None, 1)
    hard = draws(hp.HardSampler(rate=0.1, neighbors=20, every=1000), 400)
    uniform = draws(hp.UniformSampler(rate=0.1), 400)
    assert 0 < abs(hard.mean() - exact) < 3 * hard.std() / 20
    assert abs(uniform.mean() - exact) < 3 * uniform.std() / 20
    assert hard.std() < 0.5 * uniform.std()
    plain = draws(hp.HardSampler(rate=0.1, neighbors=20, correct_logits=False), 20)
    assert (plain < exact).all()


@pytest.mark.parametrize(
    ("near", "uniform", "hard"),
    [(0, 0.5, 0), (10, 0.5, 10), (90, 0.5, 45), (90, 0.0, 90), (200, 0.0, 90), (90, 0.999, 0), (90, 0.27, 65)],
)
def test_the_quota_is_kept_whatever_there_is_of_neighbours(near: int, uniform: float, hard: int) -> None:
    sampler = hp.HardSampler(rate=0.1, uniform=uniform)
    positives = torch.arange(10) * 90
    drawn = sampler.draw(positives, 1000, 4000, 0, 0, torch.arange(near) * 2 + 1)
    assert len(drawn.rows) == 100 and torch.equal(drawn.rows, drawn.rows.unique())
    certain = torch.cat([positives, torch.arange(hard) * 2 + 1])
    assert torch.isin(certain, drawn.rows).all()
    if hard == 90:
        assert drawn.shifts is None
    else:
        assert drawn.shifts is not None
        assert (drawn.shifts[torch.isin(drawn.rows, certain)] == 0).all()
        rest = drawn.shifts[~torch.isin(drawn.rows, certain)]
        assert rest.tolist() == pytest.approx([math.log((990 - hard) / (90 - hard))] * (90 - hard))
    assert sampler.draw(positives, 1000, 4000, 0, 0, positives[:3]).rows.shape == (100,)
    assert hp.HardSampler(count=12).draw(positives, 1000, 4000, 0, 0, torch.arange(9)).rows.tolist() == [
        *positives.tolist()
    ]


def test_draws_repeat_and_differ_by_seed_step_and_rank() -> None:
    near = torch.arange(20)

    def rows(seed: int, step: int, rank: int) -> tuple[int, ...]:
        sampler = hp.HardSampler(rate=0.1, seed=seed)
        return tuple(sampler.draw(torch.tensor([700]), 1000, 2000, step, rank, near).rows.tolist())

    assert rows(1, 2, 3) == rows(1, 2, 3)
    assert len({rows(1, 2, 3), rows(2, 2, 3), rows(1, 3, 3), rows(1, 2, 4)}) == 4


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 6, dtype=torch.float64, generator=draw), torch.randint(CLASSES, (3,), generator=draw)


class _Run:
    """A head in training; the graph is built at steps 0, 3 and 6."""

    def __init__(
        self, group: Any, row_policy: bool, neighbors: int = K, sampler: Any = None, rule: Any = "even"
    ) -> None:
        sampler = hp.HardSampler(count=20, neighbors=neighbors, every=3) if sampler is None else sampler
        policy = hp.RowSGD(1.0, momentum=0.9) if row_policy else None
        self.head = hp.ShardedClassifier(
            6, CLASSES, margin=hp.CosFace(8.0, 0.2), sampler=sampler, optimizer=policy, rule=rule, initial_std=1.0,
            dtype=torch.float64, group=group,
        )  # fmt: skip
        self.group = group
        self.optimizer = self.head.row_optimizer or torch.optim.SGD(self.head.parameters(), lr=1.0, momentum=0.9)

    def train(self, first: int, last: int) -> list[Tensor]:
        losses = []
        for step in range(first, last):
            loss = self.head(*_batch(step, self.group.rank))
            self.head.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def graph(self) -> tuple[Tensor, Tensor]:
        return self.head.layout.class_ids(self.group.rank), self.head.class_graph.clone()


def test_the_graph_is_built_anew_after_so_many_steps_and_in_training_only() -> None:
    run = _Run(hp.Group.alone(), True)
    graphs = []
    assert int(run.head.graph_draw) == -1 and (run.head.class_graph == -1).all()
    for step in range(7):
        before = run.head.weight.detach().clone()
        run.train(step, step + 1)
        graphs.append(run.head.class_graph.clone())
        assert int(run.head.graph_draw) == step // 3 * 3
        if step % 3 == 0:
            assert torch.equal(graphs[-1].long(), brute_force(before, K))
        with torch.no_grad():
            run.head.eval()(*_batch(step, 0))
        run.head.train()
    assert torch.equal(graphs[0], graphs[2]) and not torch.equal(graphs[2], graphs[3])


@pytest.mark.parametrize("row_policy", [False, True], ids=["torch", "rows"])
def test_a_run_that_goes_on_from_a_checkpoint_draws_what_it_would_have_drawn(tmp_path: Path, row_policy: bool) -> None:
    """To the bit, although the graph of step 3 is of rows that step 4 no longer has."""

    def whole(group: Any) -> Any:
        run = _Run(group, row_policy)
        run.train(0, 4)
        hp.checkpoint.save(tmp_path, step=4, head=run.head, optimizer=run.optimizer, group=group)
        return run.graph(), run.train(4, 8), run.head.weight.detach().clone()

    def resumed(group: Any) -> Any:
        run = _Run(group, row_policy)
        run.train(0, 1)  # a graph that must not be used
        hp.checkpoint.load(tmp_path, head=run.head, optimizer=run.optimizer, group=group)
        return run.graph(), run.train(4, 8), run.head.weight.detach().clone()

    def elsewhere(group: Any) -> Any:
        run = _Run(group, row_policy, rule="striped")
        hp.checkpoint.load(tmp_path, head=run.head, optimizer=run.optimizer, group=group)
        graph = run.graph()
        run.train(4, 5)
        assert int(run.head.graph_draw) == 3
        return graph

    first, again = run_threads(2, whole), run_threads(2, resumed)
    for (_, losses, rows), (_, same_losses, same_rows) in zip(first, again, strict=True):
        assert losses == same_losses and torch.equal(rows, same_rows)
    graph = dense_rows([rank[0] for rank in first], CLASSES)
    assert torch.equal(graph, dense_rows([rank[0] for rank in again], CLASSES))
    assert torch.equal(graph, dense_rows(run_threads(3, elsewhere), CLASSES))


@pytest.mark.parametrize("saved", [{"neighbors": K + 1}, {"sampler": hp.UniformSampler(rate=0.5)}])
def test_without_a_graph_that_fits_it_is_built_from_the_loaded_rows(tmp_path: Path, saved: dict[str, Any]) -> None:
    def work(group: Any) -> None:
        before = _Run(group, False, **saved)
        before.train(0, 4)
        hp.checkpoint.save(tmp_path, step=4, head=before.head, group=group)
        run = _Run(group, False)
        run.train(0, 1)
        hp.checkpoint.load(tmp_path, head=run.head, group=group)
        assert int(run.head.graph_draw) == -1
        ids, rows = run.head.layout.class_ids(group.rank), run.head.weight.detach().clone()
        weight = dense_rows([(ids, rows)], CLASSES)
        run.train(4, 5)
        assert torch.equal(run.head.class_graph.long(), brute_force(weight, K)) and int(run.head.graph_draw) == 4
        # And the other way round: a head that keeps no graph reads the checkpoint of one that does.
        hp.checkpoint.save(tmp_path, step=5, head=run.head, group=group)
        plain = _Run(group, False, sampler=hp.UniformSampler(rate=0.5))
        hp.checkpoint.load(tmp_path, head=plain.head, group=group)
        assert torch.equal(plain.head.weight, run.head.weight)

    run_threads(1, work)


def test_state_dict_and_copies_carry_the_graph() -> None:
    def work(group: Any) -> None:
        run = _Run(group, False)
        run.train(0, 2)
        other = _Run(group, False)
        other.head.load_state_dict(run.head.state_dict())
        twin = copy.deepcopy(run.head)
        features, labels = _batch(2, group.rank)
        loss = run.head(features, labels)
        assert torch.equal(loss, other.head(features, labels)) and torch.equal(loss, twin(features, labels))
        twin.class_graph.fill_(-1)
        assert (run.head.class_graph >= 0).all()

    run_threads(2, work)


def test_a_rank_whose_graph_is_missing_makes_all_build_it() -> None:
    def work(group: Any) -> None:
        run = _Run(group, False)
        run.train(0, 2)
        if group.rank == 1:
            run.head.graph_draw.fill_(-1)
        run.train(2, 3)
        assert int(run.head.graph_draw) == 2

    run_threads(3, work)


@pytest.mark.parametrize("at", [0, 3])
def test_rows_that_are_not_finite_stop_every_rank_and_the_next_step_builds_again(at: int) -> None:
    """Half a graph, of step 0 or of its successor, is never drawn from."""

    def work(group: Any) -> None:
        run = _Run(group, True)
        run.train(0, at)
        healthy = run.head.weight.detach().clone()
        if group.rank == 1:
            run.head.weight.data[3, 2] = float("inf")
        with pytest.raises(hp.NonFiniteError, match="rows of the head") as caught:
            run.train(at, at + 1)
        assert caught.value.ranks == (1,) and int(run.head.draws) == at and int(run.head.graph_draw) == -1
        run.head.weight.data.copy_(healthy)
        run.train(at, at + 1)
        assert int(run.head.graph_draw) == at

    run_threads(3, work)


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_fewer_classes_than_neighbours(classes: int) -> None:
    def work(group: Any) -> None:
        head, exact = (
            hp.ShardedClassifier(4, classes, sampler=sampler, dtype=torch.float64, group=group)
            for sampler in (hp.HardSampler(rate=1.0, neighbors=9), None)
        )
        x, y = torch.ones(2, 4, dtype=torch.float64), torch.tensor([0, -1])
        assert_close(head(x, y), exact(x, y), 1e-12, "loss")

    run_threads(min(classes, 2), work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "HardSampler: expected rate or count, got rate=None and count=None"),
        ({"rate": 1.5}, r"HardSampler.rate: expected a share in \(0, 1\], got 1.5"),
        ({"count": 0}, "HardSampler.count: expected at least 1 class, got 0"),
        ({"rate": 0.1, "neighbors": 0}, "neighbors: expected a whole number of at least 1, got 0"),
        ({"rate": 0.1, "neighbors": 2.5}, "neighbors: expected a whole number of at least 1, got 2.5"),
        ({"rate": 0.1, "every": 0}, "every: expected a whole number of at least 1, got 0"),
        ({"rate": 0.1, "uniform": 1.0}, r"uniform: expected a share in \[0, 1\), got 1.0; use UniformSampler"),
        ({"rate": 0.1, "uniform": math.nan}, r"uniform: expected a share in \[0, 1\), got nan"),
        ({"rate": 0.1, "search": "hnsw"}, "search: expected 'exact' or 'faiss', got 'hnsw'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hp.HardSampler(**options)


def test_a_draw_without_a_graph_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="expected near"):
        hp.HardSampler(rate=0.1).draw(torch.tensor([1]), 10, 10, 0, 0)


def test_ranks_with_different_settings_are_refused_on_all() -> None:
    def make(group: Any) -> None:
        sampler = hp.HardSampler(rate=0.1, neighbors=8 + group.rank)
        hp.ShardedClassifier(4, 20, sampler=sampler, group=group)

    for error in errors_of(2, make):
        assert isinstance(error, ValueError) and "same sampler on every rank" in str(error)


def test_a_missing_faiss_is_an_error_on_every_rank_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)

    def make(group: Any) -> None:
        sampler = hp.HardSampler(rate=0.1, search="faiss" if group.rank == 1 else "exact")
        hp.ShardedClassifier(4, 20, sampler=sampler, group=group)

    first, second = errors_of(2, make)
    assert isinstance(second, ImportError) and isinstance(first, RuntimeError)
    for error in (first, second):
        assert "pip install 'hybridpar[faiss]', or use search='exact'" in str(error)


def test_a_head_trains_with_faiss() -> None:
    pytest.importorskip("faiss", reason="needs hybridpar[faiss]")

    def work(group: Any) -> tuple[Tensor, Tensor]:
        run = _Run(group, True, sampler=hp.HardSampler(count=20, neighbors=K, search="faiss"))
        weight = run.head.layout.class_ids(group.rank), run.head.weight.detach().clone()
        run.train(0, 2)
        return run.graph(), weight

    results = run_threads(2, work)
    weight = dense_rows([rank[1] for rank in results], CLASSES)
    assert torch.equal(dense_rows([rank[0] for rank in results], CLASSES).long(), brute_force(weight, K))
