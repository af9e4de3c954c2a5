"""Lamb: the published formula in NumPy, and parameters that are cut across ranks step as whole ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from tests.ranks import run_threads

Floats = npt.NDArray[np.float64]

CLASSES, EMBEDDING, STEPS = 11, 4, 5
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def lamb_formula(weight: Floats, gradients: list[Floats], *, scaled: bool = True) -> Floats:
    """Algorithm 2 of the paper, with phi the identity."""
    first = second = np.zeros_like(weight)
    one, two = OPTIONS["betas"]
    decay = OPTIONS["weight_decay"] if scaled else 0.0
    for step, gradient in enumerate(gradients, 1):
        first = one * first + (1 - one) * gradient
        second = two * second + (1 - two) * gradient**2
        ratio = (first / (1 - one**step)) / (np.sqrt(second / (1 - two**step)) + OPTIONS["eps"])
        direction = ratio + decay * weight
        norms = np.linalg.norm(weight), np.linalg.norm(direction)
        trust = norms[0] / norms[1] if scaled and min(norms) > 0 else 1.0
        weight = weight - OPTIONS["lr"] * trust * direction
    return weight


def _values(name: str, *shape: int) -> list[Tensor]:
    """An initial weight and the gradient of each step, the same in every process."""
    draw = torch.Generator().manual_seed(len(name))
    return [torch.randn(*shape, dtype=torch.float64, generator=draw) for _ in range(STEPS + 1)]


def _step_cut(group: hp.Group, folder: Path) -> dict[str, Tensor]:
    """A backbone and a head cut over the group; half of the steps after a checkpoint."""
    margin = hp.Softmax()

    def build() -> tuple[nn.Linear, hp.ShardedClassifier, hp.Lamb]:
        backbone = nn.Linear(5, 3).double()
        head = hp.ShardedClassifier(EMBEDDING, CLASSES, margin=margin, dtype=torch.float64, rule="striped", group=group)
        assert head.bias is not None
        plain = {"params": [backbone.bias, head.bias], "weight_decay": 0.0}
        return backbone, head, hp.Lamb([{"params": [backbone.weight, head.weight]}, plain], **OPTIONS)

    backbone, head, optimizer = build()
    ids = head.layout.class_ids(group.rank)
    values = {
        "backbone.weight": _values("backbone.weight", 3, 5), "backbone.bias": _values("backbone.bias", 3),
        "head.weight": [each[ids] for each in _values("head.weight", CLASSES, EMBEDDING)],
        "head.bias": [each[ids] for each in _values("head.bias", CLASSES)],
    }  # fmt: skip
    for step in range(STEPS + 1):
        named = {f"backbone.{name}": p for name, p in backbone.named_parameters()}
        named |= {f"head.{name}": p for name, p in head.named_parameters()}
        for name, parameter in named.items():
            if step == 0:
                with torch.no_grad():
                    parameter.copy_(values[name][0])
            else:
                parameter.grad = values[name][step].clone()
        if step:
            optimizer.step()
        if step == 2:
            hp.checkpoint.save(folder, step=step, model=backbone, head=head, optimizer=optimizer, group=group)
            backbone, head, optimizer = build()
            hp.checkpoint.load(folder, model=backbone, head=head, optimizer=optimizer, group=group)
    result = {name: p.detach() for name, p in backbone.named_parameters(prefix="backbone")}
    everyone = torch.arange(CLASSES)
    result["head.weight"] = head.class_centers(everyone)
    assert head.bias is not None
    sizes = [head.layout.rows(rank) for rank in range(group.size)]
    rows = group.all_gather(head.bias.detach()[:, None], sizes)[:, 0]
    order = torch.cat([head.layout.class_ids(rank) for rank in range(group.size)])
    result["head.bias"] = torch.empty_like(rows).index_copy_(0, order, rows)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_cut_across_ranks_step_as_the_formula_steps_whole_ones(ranks: int, tmp_path: Path) -> None:
    shapes = {"backbone.weight": (3, 5), "backbone.bias": (3,), "head.weight": (CLASSES, EMBEDDING),
              "head.bias": (CLASSES,)}  # fmt: skip
    for stepped in run_threads(ranks, _step_cut, tmp_path):
        for name, shape in shapes.items():
            weight, *gradients = (each.numpy() for each in _values(name, *shape))
            expected = lamb_formula(weight, gradients, scaled=name.endswith("weight"))
            np.testing.assert_allclose(stepped[name].numpy(), expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_weight_of_zeros_steps_without_scaling() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    weight.grad = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    hp.Lamb([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.1, 0.1, -0.1], dtype=torch.float64), rtol=1e-5, atol=0)


def test_the_loss_of_a_closure_is_returned_and_parameters_without_gradient_stay() -> None:
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hp.Lamb([used, idle])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert idle.tolist() == [1.0, 1.0]
    assert all(value < 1 for value in used.tolist())


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("lr", -1.0, "at least 0, got -1"),
        ("weight_decay", -0.1, "at least 0, got -0.1"),
        ("eps", 0.0, "above 0, got 0"),
        ("betas", (0.9, 1.0), r"in \[0, 1\), got \(0.9, 1.0\)"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"Lamb\.{option}: expected .*{expected}"):
        hp.Lamb([nn.Parameter(torch.zeros(1))], **{option: value})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="expected dense gradients"):
        hp.Lamb(table.parameters()).step()
