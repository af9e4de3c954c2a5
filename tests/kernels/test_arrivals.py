"""Counting what has arrived of each bucket, and marking gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.kernels import _native


def test_arrivals_are_counted_by_bucket() -> None:
    arrivals = _native.Arrivals()
    arrivals.arrange([1, 0, 1])
    assert [arrivals.add(0), arrivals.add(1), arrivals.add(2)] == [False, True, True]
    assert [arrivals.count(0), arrivals.count(1)] == [1, 2]
    arrivals.clear(1)
    assert [tensor in arrivals for tensor in range(3)] == [False, True, False]
    assert [arrivals.count(0), arrivals.count(1)] == [1, 0]
    arrivals.arrange([0, 0])
    assert arrivals.count(0) == 0 and not arrivals.add(1) and arrivals.add(0)


def test_what_is_not_there_is_refused() -> None:
    arrivals = _native.Arrivals()
    with pytest.raises(ValueError, match="expected a tensor below 0, got 0"):
        arrivals.add(0)
    arrivals.arrange([0, 0])
    arrivals.add(1)
    with pytest.raises(ValueError, match="expected a tensor that has not arrived yet, got tensor 1"):
        arrivals.add(1)
    for tensor in (-1, 2):
        with pytest.raises(ValueError, match=f"expected a tensor below 2, got {tensor}"):
            _ = tensor in arrivals
    for bucket in (-1, 1):
        with pytest.raises(ValueError, match=f"expected a bucket below 1, got {bucket}"):
            arrivals.clear(bucket)
    with pytest.raises(ValueError, match="counted from 0, got 2 for tensor 1"):
        arrivals.arrange([0, 2])


def test_gradients_are_marked_unless_they_bear_something_else() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    for parameter in parameters[1:]:
        parameter.grad = torch.ones(2)
    parameters[2].grad.mark = True  # type: ignore[union-attr]
    parameters[3].grad.mark = "other"  # type: ignore[union-attr]
    others = _native.mark_gradients(parameters, "mark", True)  # type: ignore[arg-type]
    assert len(others) == 1 and others[0] is parameters[3]
    assert [getattr(parameter.grad, "mark", None) for parameter in parameters] == [None, True, True, "other"]
    with pytest.raises(AttributeError, match="grad"):
        _native.mark_gradients([object()], "mark", True)  # type: ignore[list-item]
