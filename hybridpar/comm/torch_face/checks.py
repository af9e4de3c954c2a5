"""What torch's callers may pass, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def one_each(operation: str, parts: Sequence[Tensor], ranks: int, name: str) -> None:
    """Raises ValueError if there is not a tensor for each rank."""
    if len(parts) != ranks:
        raise ValueError(f"{operation}: expected one {name} for each of {ranks} ranks, got {len(parts)}")


def own_size(operation: str, listed: Tensor, own: Tensor, name: str) -> None:
    """Raises ValueError if this rank's part of a list has not as many values as what it stands for."""
    if (expected := listed.numel()) != own.numel():
        raise ValueError(f"{operation}: expected {expected} values of {name} as in the list, got {own.numel()}")


def whole(operation: str, tensor: Tensor, name: str, part: Tensor, part_name: str, ranks: int) -> None:
    """Raises ValueError or TypeError if ``tensor`` is not made of a part like ``part`` for each rank."""
    if tensor.numel() != part.numel() * ranks:
        raise ValueError(
            f"{operation}: expected {name} of {ranks} x {part.numel()} values, {ranks} times {part_name}, got "
            f"{tensor.numel()}"
        )
    if tensor.dtype != part.dtype:
        raise TypeError(f"{operation}: expected {name} and {part_name} of one dtype, got {tensor.dtype}, {part.dtype}")


def one_dtype(operation: str, tensors: Sequence[Tensor]) -> None:
    """Raises TypeError for a dtype that is not that of the first tensor."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"{operation}: expected tensors of one dtype, got {tensors[0].dtype}, {tensor.dtype}")


def splits(tensor: Tensor, sizes: Sequence[int], ranks: int, name: str) -> list[int]:
    """The rows of ``tensor`` that are for or from each rank; no sizes stand for equal ones.

    Raises:
        ValueError: that are not its rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if tensor.dim() == 0 or rows % ranks:
            raise ValueError(
                f"all_to_all: expected {name} of rows that {ranks} ranks can share evenly, got shape "
                f"{list(tensor.shape)}; pass {name}_split_sizes"
            )
        return [rows // ranks] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}_split_sizes: expected {ranks} sizes that add up to the {rows} rows of {name}, got {list(sizes)}"
        )
    return list(sizes)
