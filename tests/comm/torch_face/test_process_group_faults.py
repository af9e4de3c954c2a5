"""torch's face when something goes wrong: ranks that die or do not come, and what is left behind."""

from __future__ import annotations

import pytest

from tests.comm.torch_face.torch_scripts import fault_checks
from tests.comm.torch_face.torch_scripts.launch import run
from tests.ranks import free_port


@pytest.mark.parametrize(
    ("kind", "victim", "delay"), [("blocking", 1, 0.07), ("in flight", 2, 0.11), ("all-to-all", 0, 0.05)]
)
def test_survivors_name_the_rank_that_died_and_end_in_peace(kind: str, victim: int, delay: float) -> None:
    answers = run(3, fault_checks.work_until_someone_dies, kind, victim, delay, timeout=60, survivors=2)
    assert sorted(answers) == [rank for rank in range(3) if rank != victim]
    for rank, seen in answers.items():
        assert isinstance(seen, dict), seen
        assert f"rank {rank}: all_" in seen["first"]
        assert f"rank {victim} " in seen["first"]
        assert seen["after"] < 15
        assert seen["next"]
        assert seen["destroy"] < 10


def test_calls_have_time_outs_of_their_own() -> None:
    answers = run(2, fault_checks.tell_of_a_rank_that_does_not_come, timeout=60)
    waited, barred, refused = answers[0]
    assert "rank 0: all_reduce of float32[3] failed: it has not ended within 0.3 s" in waited
    assert "rank 0: barrier of nothing failed: it has not ended within 0.3 s" in barred
    assert "because an earlier barrier failed" in refused


def test_an_aborted_group_lets_go_of_those_that_wait() -> None:
    answers = run(2, fault_checks.wait_until_the_group_is_aborted, timeout=30)
    reducing, dealing = answers[0]
    assert "rank 0: all_reduce of float32[3] failed" in reducing
    assert "rank 0: all_to_all of float32[4] in 2 parts failed" in dealing


def test_a_process_may_end_and_begin_again() -> None:
    answers = run(2, fault_checks.end_and_begin_again, [free_port() for _ in range(3)], timeout=90)
    for seen in answers.values():
        assert seen["totals"] == [3, 3, 3]
        first, *later = seen["left"]
        assert later == [first, first], "threads, files, segments"
        assert first[2] == []
