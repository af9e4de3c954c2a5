"""Problems for the head tests: inputs, a run on N thread ranks, the same run on the oracle, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hybridpar as hp
from tests.dense import dense_loss, initial_state
from tests.ranks import run_threads

MARGINS: dict[str, Any] = {
    "softmax": hp.Softmax(bias=False),
    "softmax-bias": hp.Softmax(bias=True),
    "arcface": hp.ArcFace(),
    "arcface-small-scale": hp.ArcFace(scale=8.0, margin=0.3),
    "arcface-wide": hp.ArcFace(scale=16.0, margin=1.2),
    "arcface-easy": hp.ArcFace(scale=16.0, margin=0.5, easy_margin=True),
    "arcface-zero": hp.ArcFace(scale=16.0, margin=0.0),
    "cosface": hp.CosFace(),
    "cosface-small-scale": hp.CosFace(scale=8.0, margin=0.1),
    "sphereface": hp.SphereFace(),
    "sphereface-4": hp.SphereFace(scale=16.0, margin=4.0),
    "combined": hp.CombinedMargin(),
    "combined-angle-only": hp.CombinedMargin(scale=16.0, m1=1.0, m2=0.5, m3=0.0),
    "combined-cosine-only": hp.CombinedMargin(scale=16.0, m1=1.0, m2=0.0, m3=0.35),
    "combined-m1-below-one": hp.CombinedMargin(scale=16.0, m1=0.9, m2=0.4, m3=0.15),
    "combined-m1-two": hp.CombinedMargin(scale=16.0, m1=2.0, m2=0.2, m3=0.1),
    "adaface": hp.AdaFace(),
    "adaface-quick": hp.AdaFace(scale=16.0, margin=0.6, h=0.5, t_alpha=0.5),
    "curricularface": hp.CurricularFace(),
    "curricularface-quick": hp.CurricularFace(scale=16.0, margin=0.7, momentum=0.3),
    "magface": hp.MagFace(),
    "magface-narrow": hp.MagFace(scale=16.0, l_a=2.0, u_a=12.0, l_m=0.2, u_m=1.0, lambda_g=5.0),
}
ONE_OF_EACH = (
    "softmax-bias",
    "arcface",
    "cosface",
    "sphereface",
    "combined",
    "adaface-quick",
    "curricularface-quick",
    "magface",
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

# Rows of each rank, step by step: uneven, changing, and a rank with no sample at all.
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((5,), (8,), (1,)),
    2: ((3, 5), (0, 6), (4, 1)),
    3: ((3, 5, 1), (0, 4, 3), (2, 0, 0)),
    4: ((2, 5, 1, 3), (4, 0, 2, 6), (0, 1, 0, 2)),
}


@dataclass(frozen=True)
class Case:
    """One head on `ranks` thread ranks, and the rows of each rank at every step."""

    ranks: int
    classes: int
    margin: Any
    rule: Any = "even"
    chunk: int | None = None
    dtype: torch.dtype = torch.float64
    embedding: int = 6
    sizes: tuple[tuple[int, ...], ...] = ()
    ignored_share: float = 0.2
    head: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        return self.sizes or SIZES[self.ranks]


@dataclass
class Problem:
    """The dense inputs: weight [K, D], bias [K] or None, and (features [B, D], labels [B]) of every step."""

    weight: Tensor
    bias: Tensor | None
    batches: list[tuple[Tensor, Tensor]]


@dataclass
class Step:
    """What one step gave, in dense class order."""

    loss: Tensor
    features_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None
    state: Tensor | None
    norms: Tensor


def has_bias(margin: Any) -> bool:
    return type(margin).__name__ == "Softmax" and bool(margin.bias)


def make_problem(case: Case) -> Problem:
    """Random directions; norms spread over a range that crosses every clip of the margins that read them."""
    draw = torch.Generator().manual_seed(1000 + case.seed)
    kind = {"dtype": torch.float64, "generator": draw}
    plain = type(case.margin).__name__ == "Softmax"
    weight = torch.randn(case.classes, case.embedding, **kind) * torch.rand(case.classes, 1, **kind).add(0.2)
    bias = torch.randn(case.classes, **kind) if has_bias(case.margin) else None
    batches = []
    for sizes in case.steps:
        features = torch.randn(sum(sizes), case.embedding, **kind)
        if not plain:
            reach = torch.rand(sum(sizes), 1, **kind) * math.log(400.0) - math.log(2.0)
            features = torch.nn.functional.normalize(features) * reach.exp()
        labels = torch.randint(case.classes, (sum(sizes),), generator=draw)
        ignored = torch.rand(sum(sizes), generator=draw) < case.ignored_share
        labels[ignored] = int(case.head.get("ignore_index", -1))
        batches.append((features.to(case.dtype), labels))
    return Problem(weight.to(case.dtype), None if bias is None else bias.to(case.dtype), batches)


def make_head(group: Any, case: Case) -> Any:
    return hp.ShardedClassifier(
        case.embedding,
        case.classes,
        margin=case.margin,
        rule=case.rule,
        dtype=case.dtype,
        chunk_classes=case.chunk,
        group=group,
        **case.head,
    )


def set_rows(head: Any, group: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Copies this rank's rows of the dense weight (and bias) into the head; returns their class ids."""
    ids = torch.as_tensor(head.layout.class_ids(group.rank))
    head.weight.data.copy_(weight[ids])
    if bias is not None:
        head.bias.data.copy_(bias[ids])
    return ids


def local(tensor: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """The rows of `rank` in a tensor whose rows are cut by `sizes`."""
    return tensor.split(list(sizes))[rank].clone()


def run_sharded(case: Case, problem: Problem) -> list[Step]:
    """All steps on thread ranks; fails if ranks disagree about the loss or the state, or own a class twice."""
    per_rank = run_threads(case.ranks, _sharded_rank, case, problem)
    return [
        _assemble(case, [ranks[step] for ranks in per_rank], features.double().norm(dim=1, keepdim=True))
        for step, (features, _) in enumerate(problem.batches)
    ]


def _sharded_rank(group: Any, case: Case, problem: Problem) -> list[dict[str, Any]]:
    head = make_head(group, case)
    ids = set_rows(head, group, problem.weight, problem.bias)
    results = []
    for sizes, (features, labels) in zip(case.steps, problem.batches, strict=True):
        mine = local(features, sizes, group.rank).requires_grad_()
        head.zero_grad()
        loss = head(mine, local(labels, sizes, group.rank))
        loss.backward()
        state = head.margin_state
        results.append(
            {
                "ids": ids,
                "loss": loss.detach().clone(),
                "features": mine.grad,
                "weight": head.weight.grad.clone(),
                "bias": None if problem.bias is None else head.bias.grad.clone(),
                "state": None if state is None else state.clone(),
            }
        )
    return results


def _assemble(case: Case, ranks: list[dict[str, Any]], norms: Tensor) -> Step:
    for other in ranks[1:]:
        assert torch.equal(other["loss"], ranks[0]["loss"]), "the loss differs between ranks"
        if other["state"] is not None:
            assert torch.equal(other["state"], ranks[0]["state"]), "the margin state differs between ranks"
    bias = None if ranks[0]["bias"] is None else dense_rows([(r["ids"], r["bias"]) for r in ranks], case.classes)
    return Step(
        loss=ranks[0]["loss"],
        features_grad=torch.cat([r["features"] for r in ranks]),
        weight_grad=dense_rows([(r["ids"], r["weight"]) for r in ranks], case.classes),
        bias_grad=bias,
        state=ranks[0]["state"],
        norms=norms,
    )


def dense_rows(shards: Sequence[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """Rows of all ranks in class order; every class exactly once."""
    ids = torch.cat([ids for ids, _ in shards])
    assert torch.equal(ids.sort().values, torch.arange(classes)), "the ranks do not hold every class exactly once"
    rows = torch.cat([rows for _, rows in shards])
    dense = torch.empty_like(rows)
    dense[ids] = rows
    return dense


def run_dense(case: Case, problem: Problem) -> list[Step]:
    """The same steps on the oracle, in float64 whatever the case's dtype."""
    state = initial_state(case.margin)
    ignore_index = int(case.head.get("ignore_index", -1))
    results = []
    for features, labels in problem.batches:
        features = features.double().clone().requires_grad_()
        weight = problem.weight.double().clone().requires_grad_()
        bias = None if problem.bias is None else problem.bias.double().clone().requires_grad_()
        loss, state = dense_loss(features, weight, labels, case.margin, bias, state, ignore_index=ignore_index)
        loss.backward()
        bias_grad = None if bias is None else (torch.zeros_like(bias) if bias.grad is None else bias.grad)
        assert features.grad is not None and weight.grad is not None
        norms = features.detach().norm(dim=1, keepdim=True)
        results.append(Step(loss.detach(), features.grad, weight.grad, bias_grad, state, norms))
    return results


def errors_of(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Exception | None]:
    """What each rank raised by itself: no rank is cut short because another one raised first."""

    def attempt(group: Any) -> Exception | None:
        try:
            function(group, *arguments)
        except Exception as error:
            return error
        return None

    return run_threads(ranks, attempt, timeout=15.0)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str, floor: float = 0.0) -> None:
    """|actual - expected| <= tolerance x the largest |expected| (or `floor`); where all of it is zero, exactly zero."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    assert torch.isfinite(actual).all(), f"{what} is not finite: {actual}"
    largest = max(expected.abs().max().item(), floor)
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * largest, f"{what}: error {error:.3e}, largest {largest:.3e}, allowed {tolerance:.0e}"


def assert_steps_equal(
    actual: list[Step], expected: list[Step], tolerance: float, what: object = "", floor: float = 0.0
) -> None:
    """Every step's loss, gradients and state. `floor` is for losses of almost 0, whose rounding is that of 1 - p."""
    assert len(actual) == len(expected)
    for index, (ours, oracle) in enumerate(zip(actual, expected, strict=True)):
        at = f"{what} step {index}"
        assert_close(ours.loss, oracle.loss, tolerance, f"{at} loss", floor)
        assert_close(ours.features_grad, oracle.features_grad, tolerance, f"{at} feature gradient", floor)
        # A direction's gradient shrinks with 1 / norm; this looks at the samples of large norm too.
        turned, expected_turned = ours.features_grad * ours.norms, oracle.features_grad * oracle.norms
        assert_close(turned, expected_turned, tolerance, f"{at} feature gradient times norm", floor)
        assert_close(ours.weight_grad, oracle.weight_grad, tolerance, f"{at} weight gradient", floor)
        if oracle.bias_grad is not None:
            assert ours.bias_grad is not None
            assert_close(ours.bias_grad, oracle.bias_grad, tolerance, f"{at} bias gradient", floor)
        if oracle.state is not None:
            assert ours.state is not None
            assert_close(ours.state.reshape(-1), oracle.state, tolerance, f"{at} margin state", floor)


def check(case: Case) -> None:
    """Sharded equals dense, at every step, to the tolerance of the case's dtype."""
    problem = make_problem(case)
    assert_steps_equal(run_sharded(case, problem), run_dense(case, problem), TOLERANCE[case.dtype], case)
