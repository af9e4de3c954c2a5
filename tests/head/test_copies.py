"""Copied heads, replaced parameters, refused steps: what must not come loose."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hybridpar as hp
from tests.ranks import run_threads


def _head(group: hp.Group, margin: hp.Margin | None = None) -> hp.ShardedClassifier:
    return hp.ShardedClassifier(4, 7, margin=margin, dtype=torch.float64, initial_std=1.0, group=group)


def _norm(head: hp.ShardedClassifier) -> float:
    head.weight.grad = torch.ones_like(head.weight)
    return float(hp.clip_grad_norm_(head.parameters(), 1e9))


def test_parameters_put_in_later_are_known_to_be_sharded() -> None:
    def work(group: hp.Group) -> None:
        expected = (7 * 4) ** 0.5
        head = _head(group)
        assert _norm(head) == pytest.approx(expected)
        head.load_state_dict({name: tensor.clone() for name, tensor in head.state_dict().items()}, assign=True)
        assert _norm(head) == pytest.approx(expected)
        head.weight = nn.Parameter(torch.zeros_like(head.weight))
        assert _norm(head) == pytest.approx(expected)
        assert _norm(copy.deepcopy(head)) == pytest.approx(expected)

    run_threads(2, work)


def test_a_copy_computes_the_same_and_has_rows_of_its_own() -> None:
    def work(group: hp.Group) -> None:
        head = _head(group, hp.CurricularFace(scale=8.0))
        features = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
        labels = torch.tensor([0, 3, 6])
        head(features, labels)
        twin = copy.deepcopy(head)
        assert torch.equal(head(features, labels), twin(features, labels))
        with torch.no_grad():
            twin.weight += 1.0
        assert not torch.equal(head(features, labels), twin(features, labels))
        assert not torch.equal(head.weight, twin.weight)

    run_threads(2, work)


def test_pickling_a_head_says_what_to_do_instead() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(_head(hp.Group.alone()), io.BytesIO())


def test_a_refused_step_leaves_the_margins_memory_as_it_was() -> None:
    def work(group: hp.Group) -> None:
        head = _head(group, hp.CurricularFace(scale=8.0))
        features, labels = torch.eye(4, dtype=torch.float64)[:2], torch.tensor([1, 5])
        head(features, labels)
        state, rows = head.margin_state.clone(), head.weight.detach().clone()
        with torch.no_grad():
            head.weight[0] = torch.nan
        with pytest.raises(hp.NonFiniteError, match="rows of the head"):
            head(features, labels)
        assert torch.equal(head.margin_state, state)
        with torch.no_grad():
            head.weight.copy_(rows)
        assert torch.isfinite(head(features, labels))

    run_threads(2, work)


def test_backward_frees_what_forward_kept() -> None:
    head = _head(hp.Group.alone())
    features = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    loss = head(features, torch.zeros(50, dtype=torch.int64))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_closed_head_says_so() -> None:
    head = _head(hp.Group.alone())
    head.close()
    with pytest.raises(RuntimeError, match="closed"):
        head(torch.randn(2, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1]))
