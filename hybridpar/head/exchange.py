"""What the ranks tell each other before the features travel: sizes, labels, norms, and whether anyone must stop.

Each rank's message is a header and its labels. Ranks know how long the others' messages were last time, so a step
with unchanged batch sizes needs one all-gather; when a size changed, the headers say so to all, and the labels
follow in a second one. Errors travel the same way: a rank that cannot go on says so in its header, and then every
rank raises the same error, at the same step, with no collective left half done.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.comm.agreement import raise_together
from hybridpar.comm.group import Group
from hybridpar.head.softmax import GlobalBatch

_HEADER = 6  # samples, has an error, wants a gradient, is training, class graph is due, dtype of products

# Their places in this tuple stand for them in the header.
PRODUCT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LocalBatch(NamedTuple):
    """What one rank brings.

    Attributes:
        labels_b: int64 [b], -1 where ignored.
        norms_b: feature norms [b] where the margin uses them.
        wants_gradient: whether its features need a gradient.
        training: whether its head is in training mode.
        graph_due: whether its class graph is to be built anew.
        dtype: of its matrix products.
        error: what keeps it from going on; its labels are then empty.
    """

    labels_b: Tensor
    norms_b: Tensor | None
    wants_gradient: bool
    training: bool
    graph_due: bool
    dtype: torch.dtype
    error: Exception | None


class BatchExchange:
    """Gathers labels (and norms) of uneven batches whose sizes rarely change."""

    def __init__(self, group: Group, with_norms: bool) -> None:
        self._group = group
        self._columns = 2 if with_norms else 1
        self._sizes = [0] * group.size

    def __call__(self, local: LocalBatch) -> GlobalBatch:
        """Collective.

        Raises:
            Exception: the error of the first rank that has one, on every rank.
            ValueError: some ranks train and others do not, or they compute in different dtypes; on every rank.
        """
        labels_b, norms_b = local.labels_b, local.norms_b
        columns = [labels_b] if norms_b is None else [labels_b, norms_b.double().view(torch.int64)]
        payload = torch.stack(columns).flatten()
        values = len(labels_b), local.error is not None, local.wants_gradient, local.training, local.graph_due
        header = torch.tensor([*values, PRODUCT_DTYPES.index(local.dtype)], device=labels_b.device)
        room = self._columns * self._sizes[self._group.rank]
        known = payload if len(payload) == room else payload.new_zeros(room)
        messages = self._gather(torch.cat([header, known]), [_HEADER + self._columns * size for size in self._sizes])
        headers = torch.stack([message[:_HEADER] for message in messages])
        sizes, failed, wants, training, due, dtypes = headers.T.tolist()
        if any(failed):
            raise_together(self._group, local.error)
        _check_agreed(training, [PRODUCT_DTYPES[code] for code in dtypes])
        payloads = [message[_HEADER:] for message in messages]
        if sizes != self._sizes:
            self._sizes = sizes
            payloads = self._gather(payload, [self._columns * size for size in sizes])
        everyone = torch.cat([part.view(self._columns, -1) for part in payloads], dim=1)
        norms_B = None if norms_b is None else everyone[1].contiguous().view(torch.float64).to(norms_b.dtype)
        return GlobalBatch(sizes, everyone[0], norms_B, any(wants), local.training, local.dtype, any(due))

    def _gather(self, message: Tensor, sizes: list[int]) -> list[Tensor]:
        return list(self._group.all_gather(message, sizes).split(sizes))


def _check_agreed(training: list[int], dtypes: list[torch.dtype]) -> None:
    """Every rank sees the same headers, so every rank raises."""
    if len(set(training)) > 1:
        on = [rank for rank, value in enumerate(training) if value]
        raise ValueError(f"head: expected training mode on every rank or on none, got it on ranks {on}")
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"head: expected one dtype of matrix products, got {', '.join(map(str, dtypes))} on ranks 0, 1, ...; "
            "use autocast on every rank or on none, or give compute_dtype"
        )
