"""The lane contract on each kind of lane, and what lanes do when a rank fails."""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hybridpar as hp
from hybridpar.comm.lanes.lane import AloneLane, Lane
from hybridpar.comm.lanes.torch_lane import TorchLane
from tests.comm.lanes.lane_contract import CHECKS, PROMPTLY, Check, LaneContract
from tests.ranks import run_processes, run_threads


def _verdict(check: Callable[[Any], None], subject: Lane | hp.Group) -> str | None:
    try:
        check(subject)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


class TestAloneLane(LaneContract):
    sizes = (1,)

    def verdict(self, check: Check, size: int) -> str | None:
        return _verdict(check, AloneLane())


class TestThreadLane(LaneContract):
    sizes = (1, 2, 3, 4, 5)

    def verdict(self, check: Check, size: int) -> str | None:
        verdicts = run_threads(size, lambda group: _verdict(check, group.new_lane()), timeout=20)
        return next((text for text in verdicts if text), None)


def one_ranks_abort_ends_the_waits_of_all(group: hp.Group) -> None:
    """All but the last wait, which computes meanwhile. Rank 0 aborts, and waits itself."""
    lane = group.new_lane()
    started = time.monotonic()
    if group.rank == 0:
        threading.Timer(0.3, lane.abort, ["a test ends it"]).start()
    if group.rank < group.size - 1:
        with pytest.raises(hp.CommunicationError):
            lane.all_gather([torch.empty(1000) for _ in range(lane.size)], torch.ones(1000))
        assert 0.2 < time.monotonic() - started < PROMPTLY
    group.barrier()
    with pytest.raises(hp.CommunicationError):
        lane.barrier()
    group.barrier()


def threads_that_make_lanes_at_the_same_time_do_not_meet_in_one(group: hp.Group) -> None:
    """Two groups of the same ranks. Rank 0 makes a lane of the first one first, rank 1 of the second one."""
    if group.rank < 2:
        members = {1.0: group.split([0, 1]), 100.0: group.split([0, 1])}
        values = list(members) if group.rank == 0 else list(members)[::-1]
        sums: dict[float, float | str] = {}

        def work(value: float, delay: float) -> None:
            time.sleep(delay)
            try:
                tensor = torch.full((4,), value)
                members[value].new_lane().all_reduce(tensor, "sum")
                sums[value] = float(tensor[0])
            except Exception as error:
                sums[value] = str(error)

        started = time.monotonic()
        threads = [threading.Thread(target=work, args=(value, 0.4 * place)) for place, value in enumerate(values)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == {1.0: 2.0, 100.0: 200.0}
        # Whoever waits for the others must not keep its own threads from the store.
        assert time.monotonic() - started < 10
    group.barrier()


def what_has_no_sum_is_refused_before_it_is_sent(group: hp.Group) -> None:
    lane = group.new_lane()
    for dtype in (torch.bool, torch.int16):
        tensor = torch.tensor([group.rank, 1]).to(dtype)
        before, total = tensor.clone(), torch.ones(2)
        parts = [torch.ones(1, dtype=dtype) for _ in range(group.size)]
        calls: list[Callable[[], Any]] = [
            *(functools.partial(lane.all_reduce, tensor, op) for op in ("sum", "max", "min")),
            *(functools.partial(group.all_reduce, tensor, op) for op in ("sum", "max", "min")),
            functools.partial(lane.reduce_scatter, parts[group.rank], parts),
            functools.partial(group.reduce_scatter, torch.cat(parts)),
        ]
        for call in calls:
            if group.rank == 0:  # alone: nobody else hears of it
                with pytest.raises(TypeError, match=f"float32.*got {str(dtype).removeprefix('torch.')}"):
                    call()
        assert torch.equal(tensor, before)
        lane.all_reduce(total, "sum")
        group.all_reduce(total)
        assert total.tolist() == [group.size**2] * 2


GROUP_CHECKS = (
    one_ranks_abort_ends_the_waits_of_all,
    threads_that_make_lanes_at_the_same_time_do_not_meet_in_one,
    what_has_no_sum_is_refused_before_it_is_sent,
)


def _every_check(group: hp.Group) -> dict[str, str | None]:
    assert isinstance(group.new_lane(), TorchLane)
    found = {check.__name__: _verdict(check, group) for check in GROUP_CHECKS}
    return found | {check.__name__: _verdict(check, group.new_lane()) for check in CHECKS}


@functools.cache
def _gloo_verdicts(size: int) -> list[dict[str, str | None]]:
    return run_processes(size, _every_check, shared_memory=False)


class TestGlooLane(LaneContract):
    sizes = (3,)

    def verdict(self, check: Check, size: int) -> str | None:
        return next((found[check.__name__] for found in _gloo_verdicts(size) if found[check.__name__]), None)

    @pytest.mark.parametrize("check", GROUP_CHECKS, ids=lambda check: check.__name__)
    def test_between_processes(self, check: Callable[[hp.Group], None]) -> None:
        assert [found[check.__name__] for found in _gloo_verdicts(3)] == [None] * 3


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


def test_thread_ranks_that_mean_different_sizes_all_raise() -> None:
    def work(group: hp.Group) -> None:
        inputs = [torch.ones(1 + (group.rank == 2)) for _ in range(group.size)]
        group.new_lane().all_to_all([torch.zeros(3) if rank == 2 else torch.zeros(1) for rank in range(3)], inputs)

    errors = run_threads(3, work, return_exceptions=True)
    assert all(isinstance(error, hp.CommunicationError) and error.operation == "all_to_all" for error in errors)
    assert any("expected 12 bytes from rank 2, got 8; give the same sizes on both ranks" in str(e) for e in errors)


def test_one_threads_abort_ends_the_waits_of_all() -> None:
    run_threads(3, one_ranks_abort_ends_the_waits_of_all)


def test_a_wait_ends_at_the_timeout() -> None:
    def work(group: hp.Group) -> None:
        if group.rank == 0:
            group.all_gather(torch.ones(2, 2))
        else:
            time.sleep(2)

    errors = run_threads(2, work, timeout=0.5, return_exceptions=True)
    assert isinstance(errors[0], hp.CommunicationError)
    assert "0.5 s" in str(errors[0])


def _leave_early(group: hp.Group) -> list[str]:
    lane = group.new_lane()
    if group.rank == 1:
        return ["left"]
    parts = torch.ones(6, dtype=torch.bfloat16).split(3)
    calls: list[Callable[[], Any]] = [
        lambda: group.all_reduce(torch.ones(3)),
        lambda: lane.all_to_all([torch.ones_like(part) for part in parts], parts),
    ]
    found = []
    for call in calls:
        started = time.monotonic()
        with pytest.raises(hp.CommunicationError) as caught:
            call()
        assert time.monotonic() - started < 30
        found.append(f"{caught.value.rank} {caught.value.operation} {caught.value.tensor}")
    return found


def test_gloo_ranks_raise_when_one_of_them_leaves() -> None:
    found = run_processes(2, _leave_early, shared_memory=False)
    assert found == [["0 all_reduce float32[3]", "0 all_to_all bfloat16[6] in 2 parts"], ["left"]]
