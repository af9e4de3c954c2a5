"""Bad input is named on every rank at once, and the next good step works on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from tests.head.cases import errors_of
from tests.head.rules import RandomRule
from tests.ranks import run_threads

CLASSES, EMBEDDING = 10, 4
SIZES = (5, 4, 3)

Spoil = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def _inputs(rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    features = torch.randn(SIZES[rank], EMBEDDING, generator=draw)
    return features, torch.randint(CLASSES, (SIZES[rank],), generator=draw)


def _step(group: Any, head: Any) -> tuple[float, Tensor, Tensor]:
    features, labels = _inputs(group.rank)
    features.requires_grad_()
    head.zero_grad()
    loss = head(features, labels)
    loss.backward()
    assert features.grad is not None
    return loss.item(), features.grad, head.weight.grad.clone()


def _good_bad_good(group: Any, spoil: Spoil, margin: Any) -> Any:
    """The error of a bad step between two good ones, and whether the second is as if the bad one had never been."""
    steps = []
    error: Exception | None = None
    for bad in (False, True):
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, margin=margin, group=group)
        _step(group, head)
        if bad:
            try:
                head(*spoil(group.rank, *_inputs(group.rank)))
            except Exception as raised:
                error = raised
        steps.append(_step(group, head))
    (loss, *gradients), (same_loss, *same_gradients) = steps
    same = all(torch.equal(one, other) for one, other in zip(gradients, same_gradients, strict=True))
    return error, loss == same_loss and same


def _errors(spoil: Spoil, kind: type[Exception], ranks: int = 3, margin: Any = None) -> list[Exception]:
    """The error of each rank; all of one kind, and the head still works afterwards."""
    results = run_threads(ranks, _good_bad_good, spoil, hp.ArcFace() if margin is None else margin, timeout=15.0)
    for error, unharmed in results:
        assert type(error) is kind, f"expected {kind.__name__}, got {error!r}"
        assert unharmed, "the bad step changed what the next good step gives"
    return [error for error, _ in results]


def _numbers(error: Exception) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", str(error))]


def _label(rank: int, position: int, value: int) -> Spoil:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == rank:
            labels[position] = value
        return features, labels

    return spoil


@pytest.mark.parametrize("value", [CLASSES, 1234567, -2, -100, 2**31, 2**40 + 1, -(2**62)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_label_out_of_range_is_named_with_its_position_and_the_class_count(rank: int, value: int) -> None:
    errors = _errors(_label(rank, 2, value), ValueError)
    for error in errors:
        numbers = _numbers(error)
        assert value in numbers and CLASSES in numbers
        assert 2 in numbers or sum(SIZES[:rank]) + 2 in numbers, error
    assert len({str(error) for error in errors}) == 1 or all(rank in _numbers(error) for error in errors)


def test_the_first_of_several_bad_labels_is_named() -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == 1:
            labels[1], labels[3] = 555, 777
        if own == 2:
            labels[0] = 999
        return features, labels

    for error in _errors(spoil, ValueError):
        assert 555 in _numbers(error) and 777 not in _numbers(error) and 999 not in _numbers(error)


def test_a_bad_label_does_not_count_as_ignored_for_another_ignore_index() -> None:
    def build(group: Any) -> None:
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, ignore_index=-100, group=group)
        head(torch.ones(2, EMBEDDING), torch.tensor([0, -1]))

    errors = errors_of(2, build)
    assert all(type(error) is ValueError and -1 in _numbers(error) for error in errors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.bool, torch.uint8])
@pytest.mark.parametrize("bad_ranks", [{0, 1, 2}, {1}, {0}])
def test_labels_of_another_dtype_are_refused_on_every_rank(dtype: torch.dtype, bad_ranks: set[int]) -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return features, labels.to(dtype) if own in bad_ranks else labels

    for error in _errors(spoil, TypeError):
        assert "int64" in str(error) and str(dtype).removeprefix("torch.") in str(error)


@pytest.mark.parametrize("shape", ["column", "scalar", "one-hot"])
def test_labels_of_another_shape_are_refused_on_every_rank(shape: str) -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == 2:
            one_hot = torch.nn.functional.one_hot(labels, CLASSES)
            labels = {"column": labels.unsqueeze(1), "scalar": labels[0], "one-hot": one_hot}[shape]
        return features, labels

    for error in _errors(spoil, ValueError):
        assert "label" in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("margin", [hp.ArcFace(), hp.Softmax(bias=True), hp.AdaFace(), hp.CurricularFace()])
def test_a_feature_that_is_not_finite_names_its_rank_on_every_rank(margin: Any, rank: int, value: float) -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == rank:
            features[1, 3] = value
        return features, labels

    for error in _errors(spoil, hp.NonFiniteError, margin=margin):
        assert "features" in str(error)
        assert getattr(error, "ranks", (rank,)) == (rank,)
        assert rank in _numbers(error)


def test_all_ranks_with_nan_features_are_named() -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (features * float("nan") if own != 1 else features), labels

    for error in _errors(spoil, hp.NonFiniteError):
        assert error.ranks == (0, 2), "the ranks do not tell the same story"  # type: ignore[attr-defined]


def test_a_row_that_is_not_finite_is_an_error_on_every_rank() -> None:
    """A broken row would turn every rank's loss to NaN: it is named instead."""

    def work(group: Any) -> None:
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, group=group)
        if group.rank == 1:
            head.weight.data[1, 2] = float("nan")
        head(*_inputs(group.rank))

    errors = errors_of(3, work)
    assert all(type(error) is hp.NonFiniteError and 1 in _numbers(error) for error in errors), errors


@pytest.mark.parametrize("bad_ranks", [{0, 1, 2}, {2}])
def test_another_embedding_size_is_refused_on_every_rank(bad_ranks: set[int]) -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.ones(len(labels), EMBEDDING + 3) if own in bad_ranks else features), labels

    for error in _errors(spoil, ValueError):
        assert EMBEDDING in _numbers(error) and EMBEDDING + 3 in _numbers(error)


def test_features_that_are_no_matrix_are_refused_on_every_rank() -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (features.unsqueeze(2) if own == 0 else features), labels

    for error in _errors(spoil, ValueError):
        assert "features" in str(error)


def test_integer_features_are_refused_on_every_rank() -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (features.long() if own == 1 else features), labels

    for error in _errors(spoil, TypeError):
        assert "features" in str(error)


@pytest.mark.parametrize("change", [-1, 1])
def test_features_and_labels_of_different_length_are_refused_on_every_rank(change: int) -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == 1:
            labels = torch.zeros(SIZES[1] + change, dtype=torch.int64)
        return features, labels

    for error in _errors(spoil, ValueError):
        assert SIZES[1] in _numbers(error) and SIZES[1] + change in _numbers(error)


def test_different_mistakes_on_different_ranks_still_raise_everywhere() -> None:
    def spoil(own: int, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if own == 0:
            labels[0] = 999
        if own == 1:
            labels = labels.float()
        if own == 2:
            features = features * float("nan")
        return features, labels

    for error, unharmed in run_threads(3, _good_bad_good, spoil, hp.ArcFace(), timeout=15.0):
        assert isinstance(error, ValueError | TypeError | hp.NonFiniteError)
        assert unharmed


# Construction


def _build(group: Any, settings: list[dict[str, Any]]) -> None:
    mine = {"embedding_size": EMBEDDING, "num_classes": CLASSES} | settings[group.rank]
    hp.ShardedClassifier(mine.pop("embedding_size"), mine.pop("num_classes"), group=group, **mine)


def _build_errors(settings: list[dict[str, Any]]) -> list[Any]:
    return errors_of(len(settings), _build, settings)


def test_fewer_classes_than_ranks_are_refused_on_every_rank() -> None:
    errors = _build_errors([{"num_classes": 2}] * 3)
    assert all(type(error) is ValueError and {2, 3} <= set(_numbers(error)) for error in errors), errors


@pytest.mark.parametrize("settings", [{"num_classes": 0}, {"num_classes": -5}, {"embedding_size": 0}])
def test_empty_heads_are_refused(settings: dict[str, Any]) -> None:
    assert all(type(error) is ValueError for error in _build_errors([settings] * 2))


@pytest.mark.parametrize(
    "settings", [{"chunk_classes": 0}, {"backbone_reduction": "average"}, {"rule": "no-such-rule"}]
)
def test_unknown_settings_are_refused_with_their_name(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    for error in _build_errors([settings] * 2):
        assert type(error) is ValueError and str(value) in str(error), (name, error)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("num_classes", 10, 11),
        ("num_classes", 4, 2),  # the second rank alone has fewer classes than ranks
        ("embedding_size", 4, 5),
        ("margin", hp.ArcFace(margin=0.5), hp.ArcFace(margin=0.4)),
        ("margin", hp.ArcFace(), hp.CosFace()),
        ("rule", "even", "striped"),
        ("rule", RandomRule(seed=1), RandomRule(seed=2)),
        ("dtype", torch.float32, torch.float64),
        ("compute_dtype", None, torch.bfloat16),
        ("ignore_index", -1, -100),
        ("seed", 0, 1),
        ("backbone_reduction", "sum", "mean"),
    ],
)
def test_heads_that_differ_between_ranks_are_refused_naming_what_differs(name: str, one: Any, other: Any) -> None:
    errors = _build_errors([{name: one}, {name: one}, {name: other}])
    for error in errors:
        assert isinstance(error, ValueError | hp.CommunicationError), error
        word = {"rule": "rule|layout"}.get(name, name)
        assert re.search(word, str(error)), error
    assert not any("another rank left" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ArcFace", {"scale": -1.0}),
        ("ArcFace", {"scale": float("nan")}),
        ("ArcFace", {"margin": float("inf")}),
        ("CosFace", {"margin": -0.1}),
        ("SphereFace", {"margin": 0.0}),
        ("AdaFace", {"t_alpha": 1.5}),
        ("CurricularFace", {"momentum": -0.1}),
        ("MagFace", {"l_a": 110.0, "u_a": 10.0}),
    ],
)
def test_margins_refuse_values_without_a_meaning(name: str, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(values)):
        getattr(hp, name)(**values)
