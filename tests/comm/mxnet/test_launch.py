"""One script under the launchers that MXNet's users have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.mxnet.running import QUIET, SCRIPTS, needs_mxnet, run_together
from tests.ranks import free_port

pytestmark = needs_mxnet
COMMAND = [sys.executable, str(SCRIPTS / "launched.py")]


@pytest.mark.parametrize("cluster", ["local", "ssh"])
def test_under_ps_lites_launcher_workers_train_and_scheduler_and_server_end(cluster: str) -> None:
    meeting = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_JOB_CLUSTER": cluster,
    }
    roles = [("scheduler", "0"), ("worker", "0"), ("worker", "1"), ("server", "2")]
    environments = [meeting | {"DMLC_ROLE": role, "DMLC_TASK_ID": number} for role, number in roles]
    ended = run_together([COMMAND] * len(roles), environments)
    assert [status for status, _, _ in ended] == [0] * 4, ended
    assert [out for _, out, _ in ended] == [
        "",
        "worker 0 of 2, local 0 of 2, by ps-lite: ours True [3.0, 3.0]\n",
        "worker 1 of 2, local 1 of 2, by ps-lite: ours True [3.0, 3.0]\n",
        "",
    ]
    assert ended[0][2] == ended[3][2] == "", "scheduler and server have nothing to complain of"


@pytest.mark.mpi
def test_under_mpirun() -> None:
    launch = [str(Path(sys.prefix) / "bin" / "mpirun"), "-n", "2", *COMMAND]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ((status, out, err),) = run_together([launch], [variables])
    assert status == 0, err
    for rank in (0, 1):
        assert f"worker {rank} of 2, local {rank} of 2" in out, out
    assert out.count("[3.0, 3.0]") == 2


def test_alone_a_store_has_one_worker() -> None:
    ((status, out, err),) = run_together([COMMAND], [{}])
    assert status == 0, err
    assert out == "worker 0 of 1, local 0 of 1, by alone: ours True [1.0, 1.0]\n"


def test_the_import_puts_back_what_mxnet_misses_in_numpy() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import hybridpar.mxnet, mxnet; print(mxnet.__version__)"],
        env=QUIET, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert run.stdout == "1.9.1\n"
