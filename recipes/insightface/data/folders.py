"""Images in folders, one folder per identity; the tree may lie in a .zip file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.insightface.data.dataset import Batch, IdentityDataset, Indices, checked_indices
from recipes.insightface.data.decode import check_image_shape, decode_image
from recipes.insightface.data.pairs import VerificationPairs, pairs_from_dataset, split_identities
from recipes.insightface.data.sources import FileSource, is_image, open_source


class FolderDataset(IdentityDataset):
    """All images below a folder or in a .zip file.

    An identity is a folder that holds images, named by its path; identities and the images in one are numbered in the
    order of their names. Files that are no images by their suffix, and hidden ones, are passed over.

    Args:
        path: a folder or a .zip file.
        image_shape: (1 or 3, height, width); images of another size are resized.

    Raises:
        ValueError: no images, a folder with neither images nor folders, or an image outside any identity folder.
            An unreadable image is reported, with its path, when it is fetched.
    """

    def __init__(self, path: str | Path, *, image_shape: tuple[int, int, int] = (3, 112, 112)) -> None:
        source = open_source(path)
        identities = find_identities(source)
        names = [name for images in identities.values() for name in images]
        counts = [len(images) for images in identities.values()]
        labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        self._fill(source, names, labels, list(identities), check_image_shape(image_shape))

    def __len__(self) -> int:
        return len(self._names)

    def labels(self, indices: Indices) -> Tensor:
        return torch.from_numpy(self._labels[checked_indices(indices, len(self))])

    def __getitems__(self, indices: Indices) -> Batch:
        rows = checked_indices(indices, len(self))
        images = np.empty((len(rows), *self.image_shape), dtype=np.uint8)
        for place, row in enumerate(rows.tolist()):
            name = self._names[row]
            data = self._source.read(name)
            images[place] = decode_image(data, self.image_shape, origin=self._source.describe(name))
        return torch.from_numpy(images), torch.from_numpy(self._labels[rows])

    def class_name(self, label: int) -> str:
        return self._class_names[label]

    def subset(self, identities: Sequence[int] | npt.NDArray[np.int64]) -> FolderDataset:
        """The images of the given identities (ascending), numbered anew from 0."""
        chosen = np.asarray(identities, dtype=np.int64)
        rows = np.flatnonzero(np.isin(self._labels, chosen))
        part = FolderDataset.__new__(FolderDataset)
        part._fill(
            self._source,
            [self._names[row] for row in rows],
            np.searchsorted(chosen, self._labels[rows]).astype(np.int64),
            [self._class_names[identity] for identity in chosen],
            self.image_shape,
        )
        return part

    def _fill(
        self,
        source: FileSource,
        names: list[str],
        labels: npt.NDArray[np.int64],
        class_names: list[str],
        image_shape: tuple[int, int, int],
    ) -> None:
        self._source = source
        self._names = names
        self._labels = labels
        self._class_names = class_names
        self.num_classes = len(class_names)
        self.image_shape = image_shape


def folder_datasets(
    path: str | Path,
    *,
    image_shape: tuple[int, int, int] = (3, 112, 112),
    verification_identities: float,
    pairs: int = 6000,
    seed: int = 0,
) -> tuple[FolderDataset, VerificationPairs]:
    """Split the identities below a folder into a training set and verification pairs.

    Args:
        path, image_shape: as for `FolderDataset`, which is the whole set, without a split.
        verification_identities: identities that are never trained; below 1 a fraction, else a count.
        pairs: verification pairs at most, half same and half different.
        seed: of the split and of the pairs.

    Raises:
        ValueError: as `FolderDataset`; or too few identities or images for the split; or an unreadable image among
            the verification pairs.
    """
    everything = FolderDataset(path, image_shape=image_shape)
    train, kept = split_identities(everything.num_classes, verification_identities, seed=seed)
    labels = everything.labels(range(len(everything))).numpy()
    held_out = np.flatnonzero(np.isin(labels, kept))
    name = Path(path).stem
    return everything.subset(train), pairs_from_dataset(everything, held_out, pairs, seed=seed, name=name)


def find_identities(source: FileSource) -> dict[str, list[str]]:
    """Identity folder -> names of its images, both sorted. Raises ValueError as `FolderDataset` says."""
    names = source.names()
    identities: dict[str, list[str]] = {}
    for name in names:
        if name.endswith("/") or not is_image(name):
            continue
        folder = str(PurePosixPath(name).parent)
        if folder == ".":
            raise ValueError(
                f"{source.describe(name)}: expected every image inside a folder of its identity, got one outside"
            )
        identities.setdefault(folder, []).append(name)
    parents = {str(PurePosixPath(name).parent) for name in names if name.endswith("/")}
    for name in names:
        folder = name.rstrip("/")
        if name.endswith("/") and folder not in identities and folder not in parents:
            raise ValueError(f"{source.describe(folder)}: expected images in this identity folder, got none")
    if not identities:
        raise ValueError(f"{source.path}: expected one folder of images per identity, got no images")
    return {folder: identities[folder] for folder in sorted(identities)}
