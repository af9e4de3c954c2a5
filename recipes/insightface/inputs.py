"""From the configuration to batches and verification pairs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hybridpar as hp
from recipes.insightface.config import DataConfig, TrainConfig, glyph_options
from recipes.insightface.data import (
    FolderDataset,
    IdentityDataset,
    InMemoryDataset,
    RecordSetDataset,
    SyntheticDataset,
    VerificationPairs,
    augment,
    collate,
    folder_datasets,
    glyph_datasets,
    load_bin,
    load_into_memory,
    load_pair_list,
)
from recipes.insightface.verification import FOLDS


class Batch(NamedTuple):
    """One rank's part of a (micro-)batch: float32 images [b, C, H, W] in [-1, 1] and int64 identity numbers [b]."""

    images: Tensor
    labels: Tensor


def open_data(config: TrainConfig) -> tuple[IdentityDataset, list[VerificationPairs]]:
    """The training set, and every set of verification pairs.

    Raises:
        ValueError: a path is missing or what lies there is no data set.
    """
    data = config.data
    dataset, sets = _open_training_set(config)
    sets += [load_bin(path, image_shape=data.image_shape) for path in data.bins]
    if (data.pairs is None) != (data.pairs_root is None):
        raise ValueError("--data.pairs and --data.pairs-root belong together; give both or neither")
    if data.pairs is not None and data.pairs_root is not None:
        sets.append(load_pair_list(data.pairs, data.pairs_root, image_shape=data.image_shape))
    _check_pairs(sets)
    if not isinstance(dataset, InMemoryDataset) and _decoded_mib(dataset) <= data.cache_mib:
        dataset = load_into_memory(dataset)
    return dataset, sets


def _open_training_set(config: TrainConfig) -> tuple[IdentityDataset, list[VerificationPairs]]:
    data = config.data
    shape = data.image_shape
    if data.kind == "glyphs":
        glyphs, pairs = glyph_datasets(image_shape=shape, **glyph_options(config))
        return glyphs, [pairs]
    if data.kind == "synthetic":
        count, images = data.identities, data.images_per_identity
        shown = data.shown or None
        synthetic = SyntheticDataset(
            count, images_per_identity=images, image_shape=shape, seed=config.seed, shown=shown
        )
        return synthetic, []
    path = data.path
    if path is None:
        raise ValueError(f"data of kind {data.kind} lie somewhere: expected --data.path, got none")
    if data.kind == "records":
        return RecordSetDataset(path, image_shape=shape), []
    if data.verification_identities == 0:
        return FolderDataset(path, image_shape=shape), []
    folders, pairs = folder_datasets(
        path,
        image_shape=shape,
        verification_identities=data.verification_identities,
        pairs=data.verification_pairs,
        seed=config.seed,
    )
    return folders, [pairs]


def _check_pairs(sets: list[VerificationPairs]) -> None:
    """What would fail at the first verification, after hours, fails now."""
    names = [pairs.name for pairs in sets]
    for pairs in sets:
        kinds = int(pairs.same.sum()), int((~pairs.same).sum())
        if len(pairs) < FOLDS or min(kinds) == 0:
            raise ValueError(
                f"{pairs.name}: expected at least {FOLDS} pairs, of both kinds, got {kinds[0]} of the same and "
                f"{kinds[1]} of different identities"
            )
        if names.count(pairs.name) > 1:
            raise ValueError(f"expected verification sets of different names, got {pairs.name} twice; rename the file")


def _decoded_mib(dataset: IdentityDataset) -> float:
    return len(dataset) * float(np.prod(dataset.image_shape)) / 2**20


class Batches:
    """This rank's batches from a position of the global order on.

    Args:
        dataset: what to draw from.
        order: the global order of its samples.
        data: augmentation and worker processes.
        micro_batch: samples of one forward pass, over all ranks.
        group: the ranks.
    """

    def __init__(
        self, dataset: IdentityDataset, order: hp.GlobalOrder, data: DataConfig, micro_batch: int, group: hp.Group
    ) -> None:
        self._dataset, self._order, self._data = dataset, order, data
        self._micro_batch, self._group = micro_batch, group

    def between(self, first: int, last: int) -> Iterator[Batch]:
        """Batches of the samples at positions [first, last) of the global order."""
        positions = range(first, last, self._micro_batch)
        loader = DataLoader(
            self._dataset,
            batch_sampler=_IndexBatches(self, positions),
            collate_fn=collate,
            num_workers=self._data.workers,
            # A forked child would inherit the communicators of its rank.
            multiprocessing_context="spawn" if self._data.workers else None,
            worker_init_fn=_ignore_signals,
        )
        for position, (images, labels) in zip(positions, loader, strict=True):
            indices, epochs = self.indices(position)
            yield Batch(self._augmented(images, indices, epochs), labels)

    def indices(self, position: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        """This rank's sample indices and their epochs in the micro-batch at ``position``."""
        return self._order.take_local(position, self._micro_batch, self._group)

    def _augmented(self, images: Tensor, indices: np.ndarray, epochs: np.ndarray) -> Tensor:  # type: ignore[type-arg]
        result = torch.empty(images.shape, dtype=torch.float32)
        ids = torch.from_numpy(indices)
        for epoch in np.unique(epochs):  # a batch may span the end of an epoch
            chosen = torch.from_numpy(epochs == epoch)
            result[chosen] = augment(
                images[chosen], ids[chosen], seed=self._order.seed, epoch=int(epoch), policy=self._data.augment
            )
        return result


def _ignore_signals(_: int) -> None:
    """Launchers signal whole process groups; a rank that checkpoints on SIGTERM needs its workers until it is done."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _IndexBatches:
    """The batch sampler that a DataLoader wants: index lists of one rank."""

    def __init__(self, batches: Batches, positions: range) -> None:
        self._batches, self._positions = batches, positions

    def __iter__(self) -> Iterator[list[int]]:
        return (self._batches.indices(position)[0].tolist() for position in self._positions)

    def __len__(self) -> int:
        return len(self._positions)
