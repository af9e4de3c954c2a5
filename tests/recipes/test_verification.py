"""Verification figures against scikit-learn, SciPy and brute force."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import Tensor, nn

from recipes.insightface.data.glyphs import glyph_datasets
from recipes.insightface.data.pairs import VerificationPairs
from recipes.insightface.models import build_model
from recipes.insightface.verification import best_threshold, embed, raw_pixel_result, verify


def make_pairs(same: npt.ArrayLike, *, images: Tensor | None = None) -> VerificationPairs:
    """Pairs (0, 1), (2, 3), ... of blank or given images."""
    kinds = torch.as_tensor(np.asarray(same, dtype=bool))
    if images is None:
        images = torch.zeros(2 * len(kinds), 1, 8, 8, dtype=torch.uint8)
    first = torch.arange(0, 2 * len(kinds), 2)
    return VerificationPairs(images=images, first=first, second=first + 1, same=kinds, name="made up")


def embeddings_with_scores(scores: npt.ArrayLike) -> Tensor:
    """Embeddings [2 P, 2] whose pair i has the cosine similarity scores[i]."""
    angles = torch.arccos(torch.as_tensor(np.asarray(scores), dtype=torch.float64))
    second = torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)
    first = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand_as(second)
    return torch.stack([first, second], dim=1).reshape(-1, 2).float()


def noisy_scores(pairs: int, seed: int, *, gap: float = 0.4) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    same = np.arange(pairs) % 2 == 0
    return np.clip(rng.normal(0, 0.2, pairs) + gap * same, -1, 1), same


class FirstPixels(nn.Module):
    """Embeds an image as the first pixels of its first row: asymmetric under mirroring, with modes to disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(images))[:, 0, 0, :3]
        return out


def random_images(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def unit(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    out: npt.NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return out


def test_embed_normalises_the_models_output() -> None:
    images = random_images(7)
    pixels = images.numpy().astype(np.float64) / 127.5 - 1
    scale = 1 / np.sqrt(1 + 1e-5)  # a fresh batch normalisation in eval mode; it does not change the direction
    expected = unit(pixels[:, 0, 0, :3] * scale)
    np.testing.assert_allclose(embed(FirstPixels(), images, flip=False).numpy(), expected, atol=1e-6)


def test_embed_with_flip_normalises_the_sum_with_the_mirror_image() -> None:
    images = random_images(7)
    pixels = images.numpy().astype(np.float64) / 127.5 - 1
    expected = unit(pixels[:, 0, 0, :3] + pixels[:, 0, 0, ::-1][:, :3])
    np.testing.assert_allclose(embed(FirstPixels(), images, flip=True).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("flip", [False, True])
def test_embed_does_not_depend_on_the_batch_size(flip: bool) -> None:
    torch.manual_seed(0)
    model = build_model("convnet", image_shape=(1, 8, 8), embedding_size=16)
    images = random_images(11)
    whole = embed(model, images, batch_size=11, flip=flip)
    torch.testing.assert_close(embed(model, images, batch_size=4, flip=flip), whole)
    torch.testing.assert_close(embed(model, images, batch_size=1, flip=flip), whole)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(11))


def test_embed_gives_every_module_its_mode_back_and_leaves_statistics_alone() -> None:
    model = FirstPixels().train()
    model.norm.eval()
    before = model.norm.running_mean
    assert before is not None
    kept = before.clone()
    embed(model, random_images(4), flip=False)
    assert (model.training, model.dropout.training, model.norm.training) == (True, True, False)
    torch.testing.assert_close(before, kept)


def test_embed_gives_modes_back_when_the_model_fails() -> None:
    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ArithmeticError("no")

    model = Failing().train()
    with pytest.raises(ArithmeticError):
        embed(model, random_images(2), flip=False)
    assert model.training


def test_embeddings_can_be_used_where_gradients_are_recorded() -> None:
    weight = torch.ones(3, requires_grad=True)
    (embed(FirstPixels(), random_images(2), flip=False) @ weight).sum().backward()
    assert weight.grad is not None


def test_embed_refuses_embeddings_that_are_not_finite() -> None:
    model = FirstPixels()
    model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="5 of 5 embeddings are not finite, the first that of image 0"):
        embed(model, random_images(5), flip=False)


def test_embed_refuses_bad_images() -> None:
    with pytest.raises(TypeError, match=r"uint8 images, got torch\.float32"):
        embed(FirstPixels(), random_images(2).float(), flip=False)
    with pytest.raises(ValueError, match=r"M >= 1, got shape \(0, 1, 8, 8\)"):
        embed(FirstPixels(), random_images(0), flip=False)
    with pytest.raises(ValueError, match="positive batch_size"):
        embed(FirstPixels(), random_images(2), batch_size=0, flip=False)


@given(
    st.lists(st.tuples(st.sampled_from([-0.5, -0.1, 0.0, 0.2, 0.200001, 0.7]), st.booleans()), min_size=1, max_size=30)
)
def test_best_threshold_is_as_accurate_as_any_threshold_can_be(rows: list[tuple[float, bool]]) -> None:
    scores = np.array([score for score, _ in rows])
    same = np.array([kind for _, kind in rows])
    threshold, accuracy = best_threshold(scores, same)
    assert np.mean((scores >= threshold) == same) == pytest.approx(accuracy)
    everywhere = np.concatenate([scores, [scores.max() + 1]])
    assert accuracy == pytest.approx(max(float(np.mean((scores >= t) == same)) for t in everywhere))


def test_perfectly_separated_pairs_are_all_right() -> None:
    same = np.arange(40) % 2 == 0
    result = verify(embeddings_with_scores(np.where(same, 0.9, 0.1)), make_pairs(same))
    assert (result.accuracy, result.accuracy_std, result.auc) == (1.0, 0.0, 1.0)
    assert 0.1 < result.threshold <= 0.9


def test_accuracy_is_close_to_the_fields_protocol() -> None:
    """Ten consecutive folds, thresholds on a grid of squared distances from 0 to 4 in steps of 0.01."""
    scores, same = noisy_scores(3000, seed=1)
    distances = 2 - 2 * scores
    grid = np.arange(0, 4, 0.01)
    accuracies = []
    for fold in np.array_split(np.arange(3000), 10):
        others = np.setdiff1d(np.arange(3000), fold)
        right = [np.mean((distances[others] < t) == same[others]) for t in grid]
        accuracies.append(np.mean((distances[fold] < grid[int(np.argmax(right))]) == same[fold]))
    result = verify(embeddings_with_scores(scores), make_pairs(same))
    # The grid is coarser than our thresholds, so single pairs may fall on the other side.
    assert result.accuracy == pytest.approx(float(np.mean(accuracies)), abs=0.004)
    assert result.accuracy_std == pytest.approx(float(np.std(accuracies)), abs=0.004)


def test_a_fold_is_judged_at_the_threshold_of_the_others() -> None:
    # Two folds of two pairs. The second fold alone puts the threshold at 0.5, which is wrong for the same pair at 0.45
    # of the first; the first puts it at 0.275, which is right for the second. One threshold for all would be right.
    result = verify(embeddings_with_scores([0.45, 0.1, 0.8, 0.2]), make_pairs([True, False, True, False]), folds=2)
    assert result.accuracy == pytest.approx(0.75)
    assert result.accuracy_std == pytest.approx(0.25)
    assert 0.2 < result.threshold <= 0.45


def test_auc_is_the_probability_that_a_same_pair_scores_higher() -> None:
    scores, same = noisy_scores(500, seed=2, gap=0.2)
    statistic = mannwhitneyu(scores[same], scores[~same]).statistic
    result = verify(embeddings_with_scores(scores), make_pairs(same))
    assert result.auc == pytest.approx(statistic / (same.sum() * (~same).sum()), abs=1e-4)


def test_true_accept_rates_are_those_of_brute_force() -> None:
    scores, same = noisy_scores(4000, seed=3)
    result = verify(embeddings_with_scores(scores), make_pairs(same))
    for rate, got in result.tar_at_far.items():
        possible = [
            float(np.mean(scores[same] >= t)) for t in scores if np.mean(scores[~same] >= t) <= rate * (1 + 1e-9)
        ]
        if rate == 1e-4:
            assert got is None  # 2,000 pairs of different identities cannot show one in 10,000
        else:
            assert got == pytest.approx(max(possible))


def test_a_false_accept_rate_is_reported_from_one_over_rate_pairs_on() -> None:
    def resolved(negatives: int) -> list[float]:
        same = np.arange(2 * negatives) % 2 == 0
        result = verify(embeddings_with_scores(np.where(same, 0.9, 0.1)), make_pairs(same))
        return [rate for rate, value in result.tar_at_far.items() if value is not None]

    assert resolved(9) == []
    assert resolved(10) == [1e-1]
    assert resolved(99) == [1e-1]
    assert resolved(100) == [1e-1, 1e-2]
    assert resolved(1000) == [1e-1, 1e-2, 1e-3]


def test_random_embeddings_are_no_better_than_chance() -> None:
    same = np.arange(4000) % 2 == 0
    embeddings = torch.randn(8000, 32, generator=torch.Generator().manual_seed(0))
    result = verify(embeddings, make_pairs(same))
    assert result.accuracy == pytest.approx(0.5, abs=0.03)
    assert result.auc == pytest.approx(0.5, abs=0.03)


def test_lengths_of_embeddings_do_not_count() -> None:
    scores, same = noisy_scores(400, seed=4)
    embeddings = embeddings_with_scores(scores)
    lengths = torch.rand(len(embeddings), 1, generator=torch.Generator().manual_seed(0)) + 0.5
    assert verify(embeddings, make_pairs(same)).accuracy == verify(embeddings * lengths, make_pairs(same)).accuracy


def test_raw_pixels_are_compared_by_the_cosine_of_their_values() -> None:
    same = np.arange(60) % 2 == 0
    images = random_images(120, seed=5)
    pixels = images.flatten(1).numpy().astype(np.float64)
    scores = (unit(pixels[0::2]) * unit(pixels[1::2])).sum(axis=1)
    threshold = raw_pixel_result(make_pairs(same, images=images)).threshold
    accuracy = np.mean((scores >= threshold) == same)
    assert accuracy == max(np.mean((scores >= t) == same) for t in [*scores, 2.0])


def test_raw_pixels_verify_0_85_of_glyph_pairs() -> None:
    _, pairs = glyph_datasets()
    assert raw_pixel_result(pairs).accuracy == pytest.approx(0.85, abs=0.015)


@pytest.mark.parametrize(
    ("same", "folds", "message"),
    [
        ([True, False] * 4, 10, "8 pairs in 10 folds"),
        ([True, False] * 4, 1, "at least 2 folds"),
        ([True] * 20, 10, "20 of the same and 0 of different"),
        ([False] * 20, 10, "0 of the same and 20 of different"),
    ],
)
def test_pairs_that_cannot_be_judged_are_refused(same: list[bool], folds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(embeddings_with_scores(np.full(len(same), 0.5)), make_pairs(same), folds=folds)


def test_a_wrong_number_of_embeddings_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 40 embeddings, one per image, got 39"):
        verify(torch.ones(39, 4), make_pairs([True, False] * 10))


def test_results_can_be_written_as_json() -> None:
    scores, same = noisy_scores(60, seed=6)
    values = verify(embeddings_with_scores(scores), make_pairs(same)).to_json()
    assert values["name"] == "made up"
    assert values["pairs"] == 60
    assert values["tar_at_far"]["0.0001"] is None
    assert isinstance(values["tar_at_far"]["0.1"], float)
