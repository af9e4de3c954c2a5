"""The head's door: what it accepts, and what it says otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.comm.errors import NonFiniteError
from hybridpar.head.margins import Margin
from hybridpar.head.row_optimizers import RowPolicy
from hybridpar.head.samplers import Sampler

ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def settings_error(
    embedding_size: int,
    num_classes: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    ignore_index: int,
    backbone_reduction: str,
    chunk_classes: int | None,
    logits_budget: int,
) -> ValueError | None:
    """What is wrong with settings that no head can have. Returned, for all ranks to raise it together."""
    if embedding_size < 1:
        return ValueError(f"embedding_size: expected at least 1, got {embedding_size}")
    if num_classes < 1:
        return ValueError(f"num_classes: expected at least 1, got {num_classes}")
    if dtype not in ROW_DTYPES or compute_dtype not in (None, *ROW_DTYPES):
        names = ", ".join(str(known).removeprefix("torch.") for known in ROW_DTYPES)
        return ValueError(f"dtype and compute_dtype: expected one of {names}, got {dtype} and {compute_dtype}")
    if 0 <= ignore_index < num_classes:
        return ValueError(
            f"ignore_index: expected a number that is no class, got {ignore_index} with {num_classes} classes; use -1"
        )
    if backbone_reduction not in ("sum", "mean"):
        return ValueError(f"backbone_reduction: expected 'sum' or 'mean', got {backbone_reduction!r}")
    if chunk_classes is not None and chunk_classes < 1:
        return ValueError(f"chunk_classes: expected at least 1, or None, got {chunk_classes}")
    if logits_budget < 0:
        return ValueError(f"logits_budget: expected bytes, 0 or more, got {logits_budget}")
    return None


def policies_error(margin: Margin, sampler: object, optimizer: object) -> Exception | None:
    """What is wrong with how rows are drawn and stepped. Returned, as above."""
    if sampler is not None and not isinstance(sampler, Sampler):
        return TypeError(f"sampler: expected a Sampler, as hp.UniformSampler(rate=0.1), or None, got {sampler!r}")
    if optimizer is not None and not isinstance(optimizer, RowPolicy):
        return TypeError(
            f"optimizer: expected a RowPolicy, as hp.RowSGD(0.1), or None, got {type(optimizer).__name__}; an "
            "optimizer of torch takes head.parameters() instead"
        )
    if sampler is not None and sampler.graph is not None and (missing := sampler.graph.unavailable()) is not None:
        return missing
    if sampler is not None and not margin.scale > 0:
        return ValueError(f"sampler: expected a margin whose scale is above 0, got {margin}")
    return None


def check_features(features: Tensor, embedding_size: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless features are floating point [b, embedding_size] on ``device``."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = getattr(features, "dtype", type(features).__name__)
        raise TypeError(f"features: expected a floating-point tensor, got {got}")
    if features.ndim != 2 or features.shape[1] != embedding_size:
        raise ValueError(
            f"features: expected shape [batch, {embedding_size}], got {list(features.shape)}; "
            "the backbone's output width must equal the head's embedding_size"
        )
    if features.device != device:
        raise ValueError(f"features: expected them on {device} like the head's rows, got {features.device}")


def check_labels(
    labels: Tensor, features: Tensor, num_classes: int, ignore_index: int | None, *, name: str = "labels"
) -> None:
    """Raises TypeError or ValueError unless labels are int64 [b] class ids, or ``ignore_index``."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = getattr(labels, "dtype", type(labels).__name__)
        raise TypeError(
            f"{name}: expected int64, got {got}; convert where they are read "
            "(float32 holds class ids exactly only up to 16,777,216)"
        )
    if labels.ndim != 1 or len(labels) != len(features):
        wanted = len(features) if features.ndim else "number of ids"
        raise ValueError(f"{name}: expected shape [{wanted}], one-dimensional, got {list(labels.shape)}")
    if labels.device != features.device:
        raise ValueError(f"{name}: expected them on {features.device} like the features, got {labels.device}")
    bad = (labels < 0) | (labels >= num_classes)
    if ignore_index is not None:
        bad &= labels != ignore_index
    if bad.any():
        position = int(bad.nonzero()[0])
        ignored = "" if ignore_index is None else f", or {ignore_index} to ignore a sample"
        raise ValueError(
            f"{name}: expected class ids in [0, {num_classes}){ignored}, got {int(labels[position])} "
            f"at position {position} ({int(bad.sum())} of {len(labels)} are out of range)"
        )


def check_finite(features: Tensor, rank: int) -> None:
    """Raises NonFiniteError where features hold NaN or Inf."""
    finite = torch.isfinite(features.detach())
    if not bool(finite.all()):
        bad = torch.nonzero(~finite)
        raise NonFiniteError(
            "features", (rank,), f"{len(bad)} of {features.numel()} values, the first in sample {int(bad[0, 0])}"
        )
