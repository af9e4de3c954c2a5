"""Communication that goes wrong under MXNet: scripts/fault_checks.py, and ranks that leave."""

from __future__ import annotations

import re
import sys

import pytest

from tests.comm.mxnet.running import SCRIPTS, checks_of, needs_mxnet, ranks_of_torchrun, run_checks, run_together
from tests.ranks import free_port

SCRIPT = "fault_checks.py"
pytestmark = needs_mxnet


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    return run_checks(SCRIPT, 2)


@pytest.mark.parametrize("name", [*checks_of(SCRIPT), "exit"])
def test_faults(problems: dict[str, str], name: str) -> None:
    assert not problems.get(name), problems[name]


def leave(how: str) -> list[tuple[int, str, str]]:
    port = free_port()
    command = [sys.executable, str(SCRIPTS / "leave.py"), how]
    return run_together([command] * 2, [ranks_of_torchrun(2, rank, port) for rank in range(2)])


@pytest.mark.parametrize(("how", "status"), [("killed", -9), ("exception", 1)])
def test_a_worker_that_leaves_early_is_named_at_the_waiting_call_within_seconds(how: str, status: int) -> None:
    (stays, leaves) = leave(how)
    assert leaves[0] == status, leaves
    assert stays[0] == 0, stays
    assert "error StoreError rank 0: all_reduce of key 'w' failed" in stays[1], stays
    assert re.search("error .*rank 1", stays[1]) and re.search("again .*rank 1", stays[1]), stays
    (seconds,) = re.findall(r"seconds (\d+)", stays[1])
    assert int(seconds) < 30


def test_the_last_pushes_of_a_script_that_ends_arrive() -> None:
    (stays, leaves) = leave("end")
    assert (stays[0], leaves[0]) == (0, 0), (stays, leaves)
    assert stays[1].count("sum [2.0, 2.0, 2.0]") == 5, stays
    assert "Traceback" not in stays[2] + leaves[2], (stays, leaves)


def test_the_last_pushes_of_rows_of_a_script_that_ends_arrive() -> None:
    (stays, leaves) = leave("rows")
    assert (stays[0], leaves[0]) == (0, 0), (stays, leaves)
    assert stays[1].splitlines() == ["sum [2.0, 0.0, 0.0]", "sum [0.0, 2.0, 0.0]", "sum [0.0, 0.0, 2.0]"], stays
    assert "Traceback" not in stays[2] + leaves[2], (stays, leaves)
