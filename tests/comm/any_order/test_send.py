"""Submissions without futures: they say themselves when they are done, and whoever is told is told of many at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

import hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
from hybridpar.comm.any_order.submission import Submission, tell
from tests.ranks import run_threads


def _sums_and_notes(group: hp.Group) -> tuple[list[float], list[int], bool]:
    engine = AnyOrderEngine(group)
    indices = engine.register([str(i) for i in range(50)], [torch.zeros(3)] * 50)
    told: list[int] = []
    last = threading.Event()

    def tell_us(submissions: Sequence[Submission]) -> None:
        told.extend(one.note for one in submissions)
        if len(told) == 50:
            last.set()

    tensors = [torch.full((3,), float(i + group.rank)) for i in indices]
    sent = engine.send(indices, tensors, told=tell_us, notes=[10 * i for i in indices])
    sums = [float(one.result()[0]) for one in sent]
    assert last.wait(10)
    engine.wait_all()
    done = all(one.done() for one in sent)
    engine.close()
    return sums, sorted(told), done


def test_results_are_waited_for_and_every_note_is_told_once() -> None:
    expected = [2.0 * i + 1 for i in range(50)], [10 * i for i in range(50)], True
    assert run_threads(2, _sums_and_notes) == [expected] * 2


def _without_the_other(group: hp.Group) -> list[str]:
    engine = AnyOrderEngine(group, timeout=60)
    engine.register(["a", "b"], [torch.zeros(1)] * 2)
    errors: list[str] = []
    if group.rank == 0:
        told: list[Submission] = []
        sent = engine.send([0, 1], [torch.zeros(1)] * 2, told=told.extend)
        threading.Timer(0.2, engine.close).start()
        for one in sent:
            with pytest.raises(hp.CommunicationError) as raised:
                one.result()
            errors.append(str(raised.value))
        assert [one.error is not None and one.done() for one in told] == [True, True] and told == sent
    else:
        engine.close()
    return errors


def test_what_cannot_arrive_raises_its_own_error() -> None:
    errors = run_threads(2, _without_the_other)[0]
    assert ["of a failed" in errors[0], "of b failed" in errors[1]] == [True, True]


def test_one_that_fails_to_listen_does_not_keep_others_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def fails(submissions: Sequence[Submission]) -> None:
        raise ValueError("no")

    def hears(submissions: Sequence[Submission]) -> None:
        heard.append(len(submissions))

    def submission(told: object) -> Submission:
        return Submission(0, torch.zeros(1), None, 1.0, 0.0, None, told, lambda _: None)  # type: ignore[arg-type]

    tell([submission(one) for one in (fails, hears, hears, None, hears)])
    assert heard == [2, 1] and "ValueError: no" in caplog.text
