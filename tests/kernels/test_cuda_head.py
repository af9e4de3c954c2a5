"""A head whose chunks go through the CUDA kernels, run on the host, trains as with the kernels of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.head.chunks import Chunks
from hybridpar.kernels import rows, softmax
from tests.kernels.cuda_host import HostLauncher


@contextmanager
def cuda_kernels() -> Iterator[list[str]]:
    """What they launch, in order."""
    softmaxes, updates = (HostLauncher(threads=256, source=name) for name in ("margin_softmax", "row_update"))
    softmaxes.launched = updates.launched
    with (
        mock.patch.object(softmax, "_module", return_value=softmaxes),
        mock.patch.object(rows, "_module", return_value=updates),
    ):
        yield updates.launched


def trained(**options: Any) -> tuple[list[float], list[Tensor]]:
    """Losses, and what the last step has left: rows, biases, gradients."""
    head = hp.ShardedClassifier(
        20, 300, chunk_classes=128, group=hp.Group.alone(), **{"dtype": torch.float64} | options
    )
    random = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        head.zero_grad()
        features = torch.randn(37, 20, generator=random, dtype=head.weight.dtype).requires_grad_()
        labels = torch.randint(300, (37,), generator=random)
        labels[::7] = -1
        loss = head(features, labels)
        loss.backward()
        losses.append(loss.item())
    assert features.grad is not None
    head.close()
    left = [features.grad, *(one.detach() for one in head.parameters())]
    return losses, [*left, *(one.grad for one in head.parameters() if one.grad is not None)]


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": hp.RowSGD(0.5, momentum=0.9)},
        {"optimizer": hp.RowAdamW(0.01, eps=1e-3), "margin": hp.Softmax()},
        {
            "optimizer": hp.RowSGD(0.5, momentum=0.9, weight_decay=0.01, lazy_decay=True),
            "sampler": hp.UniformSampler(rate=0.3),
        },
        {"optimizer": hp.RowAdagrad(0.1), "margin": hp.CurricularFace()},
        {"margin": hp.Softmax()},
        {"sampler": hp.UniformSampler(rate=0.3)},
    ],
    ids=["sgd", "adamw with biases", "sampled, lazy decay", "margin that changes negatives", "biases", "sampled"],
)
def test_a_head_trains_as_with_the_kernels_of_the_cpu(options: dict[str, Any]) -> None:
    wanted = trained(**options)
    with cuda_kernels() as launched:
        found = trained(**options)
    stepped = (
        "project" if "optimizer" not in options else type(options["optimizer"]).__name__.removeprefix("Row").lower()
    )
    kinds = {name.split("_")[0] for name in launched}
    assert {"maxima", "exponentials", "finish", "probabilities", stepped} <= kinds
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for one, other in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_results_are_rounded_on_the_way_where_products_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: products of bfloat16 in float32, what is made of them in bfloat16 again. No worse than on the CPU."""
    options = {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "optimizer": hp.RowSGD(0.01, momentum=0.9)}
    wanted, usual = trained(**options | {"compute_dtype": torch.float32}), trained(**options)
    made = Chunks.__init__

    def make(self: Chunks, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        self.product_dtype, self.weight_dtype = torch.float32, torch.bfloat16

    monkeypatch.setattr(Chunks, "__init__", make)
    with cuda_kernels() as launched:
        found = trained(**options)
    assert {"exponentials_float32_to_bfloat16_1", "probabilities_float32_to_bfloat16_1"} <= set(launched)
    assert found[0] == pytest.approx(wanted[0], rel=1e-2)
    for one, other, on_cpu in zip(found[1], wanted[1], usual[1], strict=True):
        assert 0 < (one - other).norm() < 1.2 * (on_cpu - other).norm()
