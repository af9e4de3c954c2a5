"""The data-parallel head, as a peer: every rank holds all classes, for torch's own DistributedDataParallel.

Nothing of hybridpar is used. The margin is ArcFace with its true gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peers.dense_logits import arcface
from torch import Tensor, nn


class BackboneAndWholeHead(nn.Module):
    """Inputs and labels int64 [b] to the mean loss of the local batch.

    Args:
        rows: [K, D], a row for each class.
    """

    def __init__(self, backbone: nn.Module, rows: Tensor, *, scale: float = 64.0, margin: float = 0.5) -> None:
        super().__init__()
        self.backbone, self.weight = backbone, nn.Parameter(rows)
        self.scale, self.margin = scale, margin

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(self.backbone(inputs)), F.normalize(self.weight))
        samples = torch.arange(len(labels))
        cosines[samples, labels] = arcface(cosines[samples, labels], self.margin)
        return F.cross_entropy(cosines.mul_(self.scale), labels)
