"""Verification: do two images show the same identity? Embeddings, 10-fold accuracy, TAR at FAR, ROC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.insightface.data.augment import normalize
from recipes.insightface.data.pairs import VerificationPairs

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]

FALSE_ACCEPT_RATES = (1e-1, 1e-2, 1e-3, 1e-4)
"""The false accept rates at which the true accept rate is reported."""

FOLDS = 10
"""Folds over which the accuracy is averaged."""

# Elements compared at a time: raw pixels of large images would not fit twice as float32.
_CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class VerificationResult:
    """What one set of pairs says about one kind of embedding.

    Attributes:
        name: of the set of pairs.
        pairs: how many there are.
        accuracy: mean over the folds, in [0, 1]; each fold is judged at the threshold chosen on the others.
        accuracy_std: population standard deviation over the folds.
        threshold: cosine similarity that is most accurate on all pairs together.
        tar_at_far: true accept rate by false accept rate; None where fewer than 1 / FAR pairs are of different
            identities, so that the rate cannot be resolved.
        auc: area under the ROC curve.
        false_accept_rates, true_accept_rates: float64 [points], the ROC curve, both ascending.
    """

    name: str
    pairs: int
    accuracy: float
    accuracy_std: float
    threshold: float
    tar_at_far: dict[float, float | None]
    auc: float
    false_accept_rates: Floats = field(repr=False, compare=False)
    true_accept_rates: Floats = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The figures without the curve, as values that ``json`` can write."""
        return {
            "name": self.name,
            "pairs": self.pairs,
            "accuracy": self.accuracy,
            "accuracy_std": self.accuracy_std,
            "threshold": self.threshold,
            "auc": self.auc,
            "tar_at_far": {f"{rate:g}": value for rate, value in self.tar_at_far.items()},
        }


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; afterwards give every submodule back the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def embed(
    model: nn.Module, images: Tensor, *, batch_size: int = 256, flip: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """Embeddings of unit length, float32 [M, D] on the CPU, of images uint8 [M, C, H, W].

    The model sees the images without augmentation, in eval mode, whatever mode it is in before and after.

    Args:
        model: maps normalised images [B, C, H, W] to embeddings [B, D]; already on ``device``.
        images: at least one.
        batch_size: images per forward pass.
        flip: normalise the sum of the embeddings of the image and of its mirror image: for faces; a mirrored
            character is another character.
        device: where the model is.

    Raises:
        TypeError: images that are not uint8.
        ValueError: no images, or embeddings that are not finite.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"expected uint8 images, got {images.dtype}; convert pixels to 0..255 first")
    if images.ndim != 4 or len(images) == 0:
        raise ValueError(f"expected images [M, C, H, W] with M >= 1, got shape {tuple(images.shape)}")
    if batch_size < 1:
        raise ValueError(f"expected a positive batch_size, got {batch_size}")
    rows: list[Tensor] = []
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(images), batch_size):
            batch = normalize(images[start : start + batch_size].to(device))
            features = model(batch)
            if flip:
                features = features + model(batch.flip(3))
            rows.append(functional.normalize(features.float(), dim=1).cpu())
    embeddings = torch.cat(rows)
    finite = torch.isfinite(embeddings).all(dim=1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"{int((~finite).sum())} of {len(images)} embeddings are not finite, the first that of image {first}; "
            "the model has diverged: take an earlier checkpoint or a lower learning rate"
        )
    # A plain tensor: one made in inference mode could not be used where gradients are recorded.
    return embeddings.clone()


def pair_scores(embeddings: Tensor, pairs: VerificationPairs) -> Floats:
    """Cosine similarity of every pair, float64 [P], from embeddings [M, D] of any length and dtype."""
    if len(embeddings) != len(pairs.images):
        raise ValueError(f"{pairs.name}: expected {len(pairs.images)} embeddings, one per image, got {len(embeddings)}")
    rows = max(1, _CHUNK_ELEMENTS // embeddings.shape[1])
    scores = [
        functional.cosine_similarity(embeddings[first].float(), embeddings[second].float(), dim=1)
        for first, second in zip(torch.split(pairs.first, rows), torch.split(pairs.second, rows), strict=True)
    ]
    similarities: Floats = torch.cat(scores).double().numpy()
    return similarities


def best_threshold(scores: Floats, same: Booleans) -> tuple[float, float]:
    """The cosine threshold (accept where score >= threshold) with the fewest errors, and its accuracy.

    Candidates lie midway between neighbouring scores, and beyond both ends; of equals the lowest is taken.
    """
    order = np.argsort(scores, kind="stable")
    ordered, labels = scores[order], same[order]
    accepted_below = np.concatenate([[0], np.cumsum(labels)])
    rejected_below = np.concatenate([[0], np.cumsum(~labels)])
    right = rejected_below + (labels.sum() - accepted_below)
    # A threshold cannot separate equal scores.
    possible = np.concatenate([[True], ordered[1:] > ordered[:-1], [True]])
    best = int(np.argmax(np.where(possible, right, -1)))
    edges = np.concatenate([[ordered[0] - 1e-6], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1e-6]])
    return float(edges[best]), float(right[best] / len(scores))


def verify(embeddings: Tensor, pairs: VerificationPairs, *, folds: int = FOLDS) -> VerificationResult:
    """Judge embeddings [M, D] (any length; only angles count) of ``pairs.images`` on the pairs.

    Folds are consecutive stretches of the pairs in their given order, as the sets of the field are laid out; the
    threshold of a fold is the most accurate one on the other folds.

    Raises ``ValueError`` for fewer pairs than folds, pairs all of one kind, or a wrong number of embeddings.
    """
    # 70 MB with what they need, which a run without verification and the ranks that only embed do without.
    from sklearn.metrics import roc_auc_score, roc_curve
    from sklearn.model_selection import KFold

    scores = pair_scores(embeddings, pairs)
    same = pairs.same.numpy()
    positives, negatives = int(same.sum()), int((~same).sum())
    if folds < 2 or len(same) < folds:
        raise ValueError(f"expected at least 2 folds and a pair for each, got {len(same)} pairs in {folds} folds")
    if positives == 0 or negatives == 0:
        raise ValueError(
            f"expected pairs of the same and of different identities in {pairs.name}, got {positives} of the same and "
            f"{negatives} of different ones"
        )
    accuracies = []
    for others, fold in KFold(n_splits=folds, shuffle=False).split(scores):
        threshold, _ = best_threshold(scores[others], same[others])
        accuracies.append(float(np.mean((scores[fold] >= threshold) == same[fold])))
    false_accepts, true_accepts, _ = roc_curve(same, scores, drop_intermediate=False)
    return VerificationResult(
        name=pairs.name,
        pairs=len(same),
        accuracy=float(np.mean(accuracies)),
        accuracy_std=float(np.std(accuracies)),
        threshold=best_threshold(scores, same)[0],
        tar_at_far={
            rate: _true_accept_rate(false_accepts, true_accepts, rate, negatives) for rate in FALSE_ACCEPT_RATES
        },
        auc=float(roc_auc_score(same, scores)),
        false_accept_rates=false_accepts,
        true_accept_rates=true_accepts,
    )


def raw_pixel_result(pairs: VerificationPairs, *, folds: int = FOLDS) -> VerificationResult:
    """The result with the pixels 0..255 themselves as the embedding: the floor that a model must leave behind."""
    return verify(pairs.images.flatten(1), pairs, folds=folds)


def _true_accept_rate(false_accepts: Floats, true_accepts: Floats, rate: float, negatives: int) -> float | None:
    """The highest true accept rate whose false accept rate is at most ``rate``."""
    # The tolerance keeps 0.1 x 10 pairs = 1 pair from failing by a rounding error.
    if negatives * rate < 1 - 1e-9:
        return None
    return float(true_accepts[np.searchsorted(false_accepts, rate * (1 + 1e-9), side="right") - 1])
