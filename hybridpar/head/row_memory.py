"""Where rows of a head and what their optimizer remembers live: in memory, or in files that are mapped into it.

# Note [mapped files]
The system keeps of a mapped file what fits into memory, and reads and writes the rest as it is used. So rows and state
may be larger than memory, at the price of a disk's speed wherever they are. The files have no name any more once they
are mapped: they end with the process, however it ends. All of their blocks are reserved at once, because a disk that
turns out to be full at a later write would end the process by a signal.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


class RowMemory:
    """Plain memory.

    Attributes:
        device: of what it gives.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, to be filled. Raises OSError where there is no room."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of zeros. Raises OSError where there is no room."""
        return self.empty(shape, dtype).zero_()

    def report(self, rank: int) -> None:
        """Log what was given, where that is worth a line."""


class MappedMemory(RowMemory):
    """Files in a folder: Note [mapped files].

    Args:
        folder: is made where it is not there; on a file system that is a disk's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.device("cpu"))
        self._folder, self._bytes = folder, 0
        folder.mkdir(parents=True, exist_ok=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.zeros(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(shape, dtype=dtype)
        descriptor, path = tempfile.mkstemp(prefix="hybridpar-rows-", dir=self._folder)
        try:
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"state_dir: expected room for {nbytes / 1e9:.3g} GB more, got {error.strerror}; "
                    "free some, or name a folder on another disk",
                    str(self._folder),
                ) from error
            tensor = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(descriptor)
            Path(path).unlink()
        self._bytes += nbytes
        return tensor.view(shape)

    def report(self, rank: int) -> None:
        _LOG.info(
            "rank %d: %.3g GB of rows and optimizer state in files under %s; what does not fit into memory is read "
            "and written there in every step, which is slower than memory",
            rank, self._bytes / 1e9, self._folder,
        )  # fmt: skip


def row_memory(state_dir: str | os.PathLike[str] | None, device: torch.device) -> RowMemory:
    """Mapped files in ``state_dir``, or memory of the device.

    Raises:
        ValueError: there is a folder, but the rows do not live on the CPU.
        OSError: the folder cannot be made.
    """
    if state_dir is None:
        return RowMemory(device)
    if device.type != "cpu":
        raise ValueError(f"state_dir: expected rows on the CPU with it, got device {device}; leave one of them out")
    return MappedMemory(Path(state_dir))
