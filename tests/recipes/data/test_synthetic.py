"""Synthetic images: any number of identities without a table, the same image wherever it is asked for, learnable."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.insightface.data import SyntheticDataset, collate


def test_hundred_million_identities_need_no_table() -> None:
    dataset = SyntheticDataset(10**8, images_per_identity=50, image_shape=(1, 32, 32))
    assert len(dataset) == 5 * 10**9
    images, labels = dataset.__getitems__([0, 49, 50, 5 * 10**9 - 1])
    assert labels.tolist() == [0, 0, 1, 10**8 - 1] and labels.dtype == torch.int64
    assert images.shape == (4, 1, 32, 32) and images.dtype == torch.uint8
    assert torch.equal(dataset.labels([5 * 10**9 - 1]), torch.tensor([10**8 - 1]))
    assert len(pickle.dumps(dataset)) < 2**20


def test_an_image_does_not_depend_on_its_batch_or_object() -> None:
    dataset = SyntheticDataset(1000, image_shape=(3, 33, 20), seed=5)
    indices = [17, 3, 19_999, 17, 512]
    whole, _ = dataset.__getitems__(indices)
    for place, index in enumerate(indices):
        assert torch.equal(SyntheticDataset(1000, image_shape=(3, 33, 20), seed=5)[index][0], whole[place])
    assert not torch.equal(SyntheticDataset(1000, image_shape=(3, 33, 20), seed=6)[17][0], whole[0])


def test_growing_the_class_count_keeps_the_images() -> None:
    small, large = (SyntheticDataset(count, image_shape=(1, 16, 16)) for count in (10, 10**7))
    assert torch.equal(small.__getitems__(range(200))[0], large.__getitems__(range(200))[0])


def test_nearest_identity_centre_tells_unseen_images() -> None:
    """Learnable: centres from half of the images of 200 identities classify the other half."""
    dataset = SyntheticDataset(200, images_per_identity=20, image_shape=(1, 32, 32))
    images, labels = dataset.__getitems__(range(len(dataset)))
    features = images.flatten(1).double().numpy() - 128
    features = features.reshape(200, 20, -1)
    centres, rest = features[:, :10].mean(1), features[:, 10:].reshape(2000, -1)
    guess = np.argmax(rest @ centres.T / np.linalg.norm(centres, axis=1), axis=1)
    assert (guess == np.repeat(np.arange(200), 10)).mean() > 0.95
    assert labels.tolist() == np.repeat(np.arange(200), 20).tolist()


def test_identities_differ_and_images_of_one_differ() -> None:
    dataset = SyntheticDataset(500, images_per_identity=2, image_shape=(1, 16, 16), noise=0)
    images, _ = dataset.__getitems__(range(1000))
    assert len({image.numpy().tobytes() for image in images}) == 1000
    assert 40 < float(images.float().std()) < 80
    quiet = SyntheticDataset(500, images_per_identity=2, image_shape=(1, 16, 16), noise=0, variation=0)
    same, _ = quiet.__getitems__([0, 1, 2])
    assert torch.equal(same[0], same[1]) and not torch.equal(same[1], same[2])


def test_data_loader_workers_give_what_one_process_gives() -> None:
    dataset = SyntheticDataset(50, images_per_identity=2, image_shape=(1, 8, 8))
    alone = list(DataLoader(dataset, batch_size=32, collate_fn=collate))
    split = list(DataLoader(dataset, batch_size=32, collate_fn=collate, num_workers=2))
    assert [len(labels) for _, labels in alone] == [32, 32, 32, 4]
    for (one, labels), (other, other_labels) in zip(alone, split, strict=True):
        assert torch.equal(one, other) and torch.equal(labels, other_labels)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one identity"):
        SyntheticDataset(0)
    with pytest.raises(ValueError, match="image shape"):
        SyntheticDataset(5, image_shape=(2, 8, 8))
    with pytest.raises(ValueError, match="variation"):
        SyntheticDataset(5, variation=2)
    with pytest.raises(IndexError, match=r"\[0, 100\)"):
        SyntheticDataset(5, images_per_identity=20)[100]


def test_identities_that_are_shown_are_spread_evenly_over_all() -> None:
    whole = SyntheticDataset(103, images_per_identity=2, image_shape=(1, 16, 16))
    some = SyntheticDataset(103, images_per_identity=2, image_shape=(1, 16, 16), shown=10)
    assert len(some) == 20 and some.num_classes == 103
    expected = [place * 103 // 10 for place in range(10) for _ in range(2)]
    assert some.labels(np.arange(20)).tolist() == expected
    images, labels = some.__getitems__(np.arange(20))
    assert labels.tolist() == expected and images.shape == (20, 1, 16, 16)
    every = SyntheticDataset(103, images_per_identity=2, image_shape=(1, 16, 16), shown=103)
    assert torch.equal(every.labels(np.arange(206)), whole.labels(np.arange(206)))
    last = SyntheticDataset(2**61, images_per_identity=1, shown=2**40).labels(np.array([2**40 - 1]))
    assert last.tolist() == [(2**40 - 1) * 2**21]
    with pytest.raises(ValueError, match="expected 1 to 103 identities that are shown, got 104"):
        SyntheticDataset(103, shown=104)
