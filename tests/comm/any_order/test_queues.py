"""The queues of submissions: first come, first served, for each tensor."""

from __future__ import annotations

import torch

from hybridpar.comm.any_order.queues import Queues
from hybridpar.comm.any_order.readiness import Terms
from hybridpar.comm.any_order.submission import Submission


def _submission(index: int) -> Submission:
    return Submission(index, torch.zeros(1), Terms(), 1.0, 0.0, None, None, lambda _: None)


def test_submissions_of_a_tensor_leave_in_the_order_in_which_they_came() -> None:
    queues = Queues()
    first, second, third, other = _submission(4), _submission(4), _submission(4), _submission(2)
    assert [queues.put(one) for one in (first, second, other, third)] == [True, False, True, False]
    assert queues.heads == {4: first, 2: other}
    assert queues.pop(4) is first and queues.heads == {4: second, 2: other}
    fourth = _submission(4)
    assert not queues.put(fourth)
    assert set(queues.all()) == {second, third, fourth, other}
    assert [queues.pop(4) for _ in range(3)] == [second, third, fourth] and queues.heads == {2: other}
    assert queues.put(first)


def test_cleared_queues_are_empty_and_can_be_used_again() -> None:
    queues = Queues()
    given = [_submission(index) for index in (0, 0, 1)]
    for one in given:
        queues.put(one)
    assert set(queues.clear()) == set(given) and queues.all() == [] and not queues.heads
    assert queues.put(given[1]) and queues.pop(0) is given[1] and not queues.heads
