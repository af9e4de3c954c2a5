"""BERT as Hugging Face has it, under torch's own DistributedDataParallel, as a peer.

`BertForMaskedLM` computes the logits of all positions, masked or not, and leaves it to the loss to ignore the others.
Nothing of hybridpar is used; the weights are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from peers.ddp_step import ddp, ddp_bf16
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertModel

# What the loss of BertForMaskedLM takes for a position that was not masked.
IGNORED = -100


class MaskedLoss(nn.Module):
    """Ids int64 [b, S] and labels int64 [b, S], IGNORED where nothing was masked, to the mean loss of the local batch.

    Args:
        bert: the layers.
        transform: what precedes the output layer.
        rows: [V, D] of the output layer; None ties it to the input table, as transformers does by default.
        dtype: of autocast; None for none.
    """

    def __init__(self, bert: BertModel, transform: nn.Module, rows: Tensor | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = BertForMaskedLM(bert.config)
        predictions = self.model.cls.predictions
        self.model.bert, predictions.transform = bert, transform
        table = bert.embeddings.word_embeddings.weight
        predictions.decoder.weight = table if rows is None else nn.Parameter(rows)
        # Two names of one bias in transformers, too, where the model is tied.
        predictions.bias = predictions.decoder.bias = nn.Parameter(torch.zeros(len(table)))
        self._dtype = dtype

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype is not None):
            loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def step_under_ddp(
    model: MaskedLoss, ids: Tensor, labels: Tensor, optimizer: Callable[[Any], torch.optim.Optimizer], *, bf16: bool
) -> Callable[[], float]:
    """One optimizer step at each call, on the same batch; returns the mean loss of the local batch.

    Gradients are views of DDP's buckets, which saves copies and memory. Their norm is taken, without a limit to it.

    Args:
        bf16: gradients travel in bfloat16, by torch's hook.
    """
    wrap = ddp_bf16 if bf16 else ddp
    wrapped = wrap(model, gradient_as_bucket_view=True)
    stepper = optimizer(wrapped.parameters())

    def step() -> float:
        stepper.zero_grad()
        loss = wrapped(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), math.inf, error_if_nonfinite=True)
        stepper.step()
        return float(loss.detach())

    return step
