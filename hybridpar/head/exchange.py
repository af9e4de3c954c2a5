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

_HEADER = 3  # samples, whether this rank has an error, whether its features need a gradient


class Exchanged(NamedTuple):
    """Samples of each rank, labels [B] int64 and norms [B] of all ranks, and whether any rank wants a gradient."""

    sizes: list[int]
    labels_B: Tensor
    norms_B: Tensor | None
    wants_gradient: bool


class BatchExchange:
    """Gathers labels (and norms) of uneven batches whose sizes rarely change."""

    def __init__(self, group: Group, with_norms: bool) -> None:
        self._group = group
        self._columns = 2 if with_norms else 1
        self._sizes = [0] * group.size

    def __call__(
        self, labels_b: Tensor, norms_b: Tensor | None, wants_gradient: bool, error: Exception | None
    ) -> Exchanged:
        """Collective. ``labels_b`` int64 [b]; ``norms_b`` [b] where the margin uses them.

        Raises:
            Exception: the error of the first rank that has one, on every rank.
        """
        rank = self._group.rank
        columns = [labels_b] if norms_b is None else [labels_b, norms_b.double().view(torch.int64)]
        payload = torch.stack(columns).flatten()
        header = torch.tensor([len(labels_b), error is not None, wants_gradient], device=labels_b.device)
        room = self._columns * self._sizes[rank]
        known = payload if len(payload) == room else payload.new_zeros(room)
        messages = self._gather(torch.cat([header, known]), [_HEADER + self._columns * size for size in self._sizes])
        sizes, failed, wants = torch.stack([message[:_HEADER] for message in messages]).T.tolist()
        if any(failed):
            raise_together(self._group, error)
        payloads = [message[_HEADER:] for message in messages]
        if sizes != self._sizes:
            self._sizes = sizes
            payloads = self._gather(payload, [self._columns * size for size in sizes])
        everyone = torch.cat([part.view(self._columns, -1) for part in payloads], dim=1)
        norms_B = None if norms_b is None else everyone[1].contiguous().view(torch.float64).to(norms_b.dtype)
        return Exchanged(sizes, everyone[0], norms_B, any(wants))

    def _gather(self, message: Tensor, sizes: list[int]) -> list[Tensor]:
        return list(self._group.all_gather(message, sizes).split(sizes))
