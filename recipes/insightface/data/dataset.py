"""What every training set of the recipe is: images with identity numbers, fetched by the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor]
Indices = Sequence[int] | npt.NDArray[np.int64] | Tensor


class IdentityDataset(Dataset[Batch], ABC):
    """Images of `num_classes` identities, numbered 0 .. len - 1.

    Fetching is deterministic and free of augmentation; a batch comes back in the order in which it was asked for.
    torch's DataLoader calls `__getitems__` with the indices of a batch; give it `collate_fn=collate`.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    """(channels, height, width) of every image."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def labels(self, indices: Indices) -> Tensor:
        """Identity numbers (int64 [B]) of the given images, without decoding. Raises IndexError outside the set."""

    @abstractmethod
    def __getitems__(self, indices: Indices) -> Batch:
        """Images (uint8 [B, C, H, W]) and identity numbers (int64 [B]). Raises IndexError outside the set."""

    def __getitem__(self, index: int) -> Batch:
        """One image (uint8 [C, H, W]) and its identity number (int64 scalar)."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def class_name(self, label: int) -> str:
        """A readable name of an identity."""
        return str(label)


class InMemoryDataset(IdentityDataset):
    """A set whose decoded images lie in one tensor.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N], each in [0, num_classes).
        num_classes: number of identities.
        class_names: a name per identity, or empty.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes that do not belong together, or a label outside the range.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, num_classes: int, class_names: Sequence[str] = ()) -> None:
        if images.dtype != torch.uint8 or labels.dtype != torch.int64:
            raise TypeError(f"expected uint8 images and int64 labels, got {images.dtype} and {labels.dtype}")
        if images.dim() != 4 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"expected images [N, C, H, W] and labels [N], got {list(images.shape)} and {list(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(f"expected labels in [0, {num_classes}), got {int(labels.min())} .. {int(labels.max())}")
        if class_names and len(class_names) != num_classes:
            raise ValueError(f"expected {num_classes} class names or none, got {len(class_names)}")
        self.num_classes = num_classes
        self.image_shape = (images.shape[1], images.shape[2], images.shape[3])
        self._images = images
        self._labels = labels
        self._class_names = tuple(class_names)

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self, indices: Indices) -> Tensor:
        return self._labels[torch.from_numpy(checked_indices(indices, len(self)))]

    def __getitems__(self, indices: Indices) -> Batch:
        rows = torch.from_numpy(checked_indices(indices, len(self)))
        return self._images[rows], self._labels[rows]

    def class_name(self, label: int) -> str:
        return self._class_names[label] if self._class_names else str(label)


def load_into_memory(dataset: IdentityDataset, *, batch_size: int = 256) -> InMemoryDataset:
    """Decode a whole set once: len * C * H * W bytes. Worth it for small sets that are read for many epochs."""
    images = torch.empty((len(dataset), *dataset.image_shape), dtype=torch.uint8)
    labels = torch.empty(len(dataset), dtype=torch.int64)
    for start in range(0, len(dataset), batch_size):
        stop = min(start + batch_size, len(dataset))
        images[start:stop], labels[start:stop] = dataset.__getitems__(range(start, stop))
    # Of millions of identities without names, the numbers alone would take more memory than the images.
    named = type(dataset).class_name is not IdentityDataset.class_name
    names = [dataset.class_name(label) for label in range(dataset.num_classes)] if named else []
    return InMemoryDataset(images, labels, num_classes=dataset.num_classes, class_names=names)


def collate(batch: Any) -> Batch:
    """The DataLoader's collate function: what comes in is the batch that `__getitems__` has made."""
    made: Batch = batch
    return made


def checked_indices(indices: Indices, length: int) -> npt.NDArray[np.int64]:
    """The indices as int64 [B]. Raises IndexError when one lies outside [0, length), TypeError when not integers."""
    array = np.asarray(indices)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"expected a sequence of integer indices, got {array.dtype} with shape {array.shape}")
    outside = (array < 0) | (array >= length)
    if outside.any():
        raise IndexError(f"expected indices in [0, {length}), got {int(array[outside][0])}")
    return array.astype(np.int64)
