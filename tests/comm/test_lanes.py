"""The lane contract on each kind of lane, and what lanes do when a rank fails."""

from __future__ import annotations

import functools
import time
import traceback

import pytest
import torch

import hybridpar as hp
from hybridpar.comm.lanes import AloneLane
from hybridpar.comm.torch_lane import TorchLane
from tests.comm.lane_contract import CHECKS, Check, LaneContract
from tests.ranks import run_processes, run_threads


def _verdict(check: Check, lane: hp.comm.lanes.Lane) -> str | None:  # type: ignore[name-defined]
    try:
        check(lane)
    except Exception:
        return traceback.format_exc()
    return None


class TestAloneLane(LaneContract):
    sizes = (1,)

    def verdict(self, check: Check, size: int) -> str | None:
        return _verdict(check, AloneLane())


class TestThreadLane(LaneContract):
    sizes = (1, 2, 5)

    def verdict(self, check: Check, size: int) -> str | None:
        verdicts = run_threads(size, lambda group: _verdict(check, group.new_lane()), timeout=20)
        return next((text for text in verdicts if text), None)


def _every_check(group: hp.Group) -> dict[str, str | None]:
    assert isinstance(group.new_lane(), TorchLane)
    return {check.__name__: _verdict(check, group.new_lane()) for check in CHECKS}


@functools.cache
def _gloo_verdicts(size: int) -> list[dict[str, str | None]]:
    return run_processes(size, _every_check, shared_memory=False)


class TestGlooLane(LaneContract):
    sizes = (3,)

    def verdict(self, check: Check, size: int) -> str | None:
        return next((found[check.__name__] for found in _gloo_verdicts(size) if found[check.__name__]), None)


def test_thread_ranks_raise_at_once_when_one_of_them_dies() -> None:
    def work(group: hp.Group) -> None:
        if group.rank == 1:
            raise KeyError("this rank fails")
        group.all_reduce(torch.ones(3))

    started = time.monotonic()
    errors = run_threads(3, work, return_exceptions=True)
    assert time.monotonic() - started < 10
    assert isinstance(errors[1], KeyError)
    for rank in (0, 2):
        assert isinstance(errors[rank], hp.CommunicationError)
        assert (errors[rank].rank, errors[rank].operation, errors[rank].tensor) == (rank, "all_reduce", "float32[3]")


def test_a_wait_ends_at_the_timeout() -> None:
    def work(group: hp.Group) -> None:
        if group.rank == 0:
            group.all_gather(torch.ones(2, 2))
        else:
            time.sleep(2)

    errors = run_threads(2, work, timeout=0.5, return_exceptions=True)
    assert isinstance(errors[0], hp.CommunicationError)
    assert "0.5 s" in str(errors[0])


def _leave_early(group: hp.Group) -> str:
    if group.rank == 1:
        return "left"
    started = time.monotonic()
    with pytest.raises(hp.CommunicationError) as caught:
        group.all_reduce(torch.ones(3))
    assert time.monotonic() - started < 30
    return f"{caught.value.rank} {caught.value.operation} {caught.value.tensor}"


def test_gloo_ranks_raise_when_one_of_them_leaves() -> None:
    assert run_processes(2, _leave_early, shared_memory=False) == ["0 all_reduce float32[3]", "left"]
