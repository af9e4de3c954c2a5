"""The MPI lane: the contract and more under mpirun, and how it fails. See ``mpi_checks`` for what the ranks do."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridpar.comm.lanes.attendance import Attendance
from hybridpar.comm.lanes.mpi_library import Library
from hybridpar.comm.lanes.watch import Found
from tests.comm.lanes.lane_contract import CHECKS, Check, LaneContract, abort_ends_a_wait_and_all_later_calls

ROOT = Path(__file__).parents[3]
SIZE = 3
# What mpirun starts for each rank: it outlives its rank until all have reported, lest the launcher end them. A signal
# by which mpich tells of a failure ends whoever does not ignore it.
KEEPER = """
trap '' USR1
"$@"
status=$?
waited=0
while [ "$(ls "$REPORTS" | grep -c json)" -lt "$RANKS" ] && [ $waited -lt 200 ]; do
    sleep 0.1
    waited=$((waited + 1))
done
exit $status
"""


@dataclass(frozen=True)
class Outcome:
    """Of one mpirun."""

    reports: list[dict[str, Any]]
    status: int
    said: str


def _mpirun() -> list[str]:
    beside = Path(sys.executable).parent
    program = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    assert program is not None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" in version:
        return [program, "--oversubscribe", "--with-ft", "ulfm"]
    return [program, "-disable-auto-cleanup"]


@functools.cache
def _outcome(name: str, size: int = SIZE, *, kept: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        rank = [sys.executable, "-m", "tests.comm.lanes.mpi_checks", folder, name]
        command = [*_mpirun(), "-n", str(size), *(["sh", "-c", KEEPER, "keeper"] if kept else []), *rank]
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "REPORTS": folder,
            "RANKS": str(size),
        }
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.terminate()  # at which it ends its ranks
                said, _ = process.communicate(timeout=10)
                pytest.fail(f"{name} hangs: {said}")
        places = [Path(folder) / f"{rank}.json" for rank in range(size)]
        missing = [place.name for place in places if not place.exists()]
        assert not missing, f"{missing}: {said}"
        reports = [json.loads(place.read_text()) for place in places]
    return Outcome(reports, process.returncode, said)


def _problems(outcome: Outcome) -> str:
    """What went wrong on any rank."""
    return "\n".join(
        f"rank {rank}, {name}: {text}"
        for rank, report in enumerate(outcome.reports)
        for name, text in report.items()
        if isinstance(text, str) and "Traceback" in text
    )


@pytest.mark.mpi
class TestMpiLane(LaneContract):
    sizes = (SIZE,)

    def verdict(self, check: Check, size: int) -> str | None:
        mode = "failures" if check is abort_ends_a_wait_and_all_later_calls else "ordinary"
        found = [report[check.__name__] for report in _outcome(mode).reports]
        return next((text for text in found if text), None)


@pytest.mark.mpi
def test_all_else_that_must_work_and_a_process_that_ends_as_usual() -> None:
    outcome = _outcome("ordinary")
    assert not _problems(outcome)
    for report in outcome.reports:
        assert len(report) > len(CHECKS) + 10
        assert report["finalized"] is True
    assert outcome.status == 0, outcome.said


@pytest.mark.mpi
def test_failures_come_in_time_and_leave_the_status_of_the_process_alone() -> None:
    outcome = _outcome("failures")
    assert not _problems(outcome)
    assert all(len(report) == 8 for report in outcome.reports)
    assert outcome.status == 7, outcome.said


@pytest.mark.mpi
def test_ranks_that_are_killed_or_end_by_an_exception_are_named_and_the_others_end() -> None:
    outcome = _outcome("lost", kept=True)
    assert not _problems(outcome)
    assert [len(report) for report in outcome.reports] == [3, 2, 0]


@pytest.mark.mpi
def test_an_mpi_for_one_thread_at_a_time_serves_several() -> None:
    outcome = _outcome("serialized", size=2, kept=True)
    assert not _problems(outcome)
    assert all(report["level"] for report in outcome.reports)
    # Rank 0 has failed, and mpi4py would finalize.
    assert outcome.status == 1, outcome.said


def test_an_mpi_for_the_main_thread_alone_says_so_elsewhere() -> None:
    mpi = SimpleNamespace(THREAD_SERIALIZED=2, THREAD_MULTIPLE=3, Query_thread=lambda: 1, Is_thread_main=lambda: False)
    with pytest.raises(RuntimeError, match="expected an MPI that takes calls from any thread"):
        Library(mpi, finalizes=False).check_thread()
    mpi.Is_thread_main = lambda: True
    Library(mpi, finalizes=False).check_thread()


class _Witness:
    """A watch of which one knows everything."""

    def __init__(self, answers: dict[int, Any], gone: dict[int, str]) -> None:
        self.answers, self.silent = answers, gone
        self.statuses: dict[str, Callable[[], Any]] = {}

    def set_status(self, key: str, status: Callable[[], Any] | None) -> None:
        if status is None:
            self.statuses.pop(key)
        else:
            self.statuses[key] = status

    def survey(self, ranks: Any) -> dict[int, Found]:
        found = {rank: Found(self.answers.get(rank)) for rank in ranks}
        problems = {rank: text for rank, text in self.silent.items() if rank in ranks}
        return found | {rank: Found(problem=text, ended="ended" in text) for rank, text in problems.items()}


def test_blame_goes_to_ranks_that_are_gone_before_those_that_are_behind() -> None:
    def state(calls: int, gave_up: str = "") -> dict[str, Any]:
        return {"lane": {"calls": calls, "gave_up": gave_up}}

    answers = {3: state(2), 4: state(1), 5: {"other": 0}, 6: state(0)}
    witness = _Witness(answers, {})
    attendance = Attendance(witness, "lane", [3, 4, 5, 6])
    attendance.begin()
    attendance.begin()
    assert witness.statuses["lane"]() == {"calls": 2, "gave_up": ""}
    assert attendance.blame("late") == "ranks 4, 5, 6 did not come to this call (late)"
    witness.silent = {5: "rank 5 is silent", 9: "rank 9 has ended"}
    assert attendance.blame("late") == "rank 5 is silent (late)"
    assert attendance.lost() == ""
    answers[3] = state(2, "rank 1 has ended")
    assert attendance.lost() == "rank 3 gave up: rank 1 has ended"
    witness.silent[4] = "rank 4 has ended"
    assert attendance.blame("late") == "rank 4 has ended (late)"
    witness.silent, witness.answers = {}, {3: state(2), 4: state(2), 6: state(1)}
    assert attendance.blame("late") == "rank 6 did not come to this call (late)", "nobody can ask rank 5"
    attendance.close()
    assert witness.statuses == {}
    assert Attendance(None, "lane", [3, 4]).blame("late") == "late"
