"""Several tensors submitted at once: the same sums as one by one, and one agreement for all of them."""

from __future__ import annotations

import pytest
import torch

import hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.readiness import Readiness
from tests.ranks import run_threads

TENSORS = 20


def test_submitted_together_they_are_agreed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed: list[int] = []
    agree = Readiness.agree

    def noted(self: Readiness, *args: object, **options: object) -> object:
        found = agree(self, *args, **options)  # type: ignore[arg-type]
        agreed.append(len(found.indices))
        return found

    monkeypatch.setattr(Readiness, "agree", noted)

    def work(group: hp.Group) -> None:
        engine = AnyOrderEngine(group)
        tensors = [torch.full((3,), float(group.rank + index)) for index in range(TENSORS)]
        indices = engine.register([f"t{index}" for index in range(TENSORS)], tensors)
        futures = engine.submit_many(indices, tensors, scale=2.0)
        for index, (tensor, future) in enumerate(zip(tensors, futures, strict=True)):
            assert future.result(30) is tensor
            assert tensor.tolist() == [2.0 * (2 * index + 1)] * 3
        engine.close()

    run_threads(2, work)
    assert {count for count in agreed if count} == {TENSORS}


def test_one_that_does_not_fit_keeps_all_from_being_submitted() -> None:
    def work(group: hp.Group) -> None:
        engine = AnyOrderEngine(group)
        right, wrong = torch.ones(3), torch.ones(4)
        indices = engine.register(["right", "wrong"], [right, right])
        with pytest.raises(ValueError, match="wrong: expected"):
            engine.submit_many(indices, [right, wrong])
        # Had the first been submitted, this would be its second, and the sum that of ones.
        assert engine.submit(indices[0], torch.full((3,), 2.0)).result(30).tolist() == [4.0] * 3
        engine.close()

    run_threads(2, work)
