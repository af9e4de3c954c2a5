"""Launcher variables, as their launchers set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.topology import Switches, Topology, detect, mxnet_engine, ps_lite_role, switches


def test_torchrun() -> None:
    found = detect(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "7",
        }
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.launcher, found.address, found.port) == ("torchrun", "a", 7)


def test_open_mpi_and_hydra_leave_the_meeting_place_open() -> None:
    found = detect(
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
    )
    assert (found.rank, found.size, found.local_rank, found.launcher) == (3, 4, 1, "openmpi")
    assert found.address is None
    found = detect({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.size, found.local_size, found.launcher) == (0, 2, 2, "hydra")


PS_LITE = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "2",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
}


def test_workers_of_ps_lite_meet_where_the_scheduler_would_have_listened() -> None:
    found = detect(PS_LITE | {"DMLC_TASK_ID": "3"})
    assert (found.rank, found.size, found.launcher) == (3, 4, "ps-lite")
    assert (found.address, found.port) == ("10.0.0.1", 9091)
    assert (found.local_rank, found.local_size) == (0, 1), "not known before the workers have met"
    on_one_host = detect(PS_LITE | {"DMLC_TASK_ID": "3", "DMLC_JOB_CLUSTER": "local"})
    assert (on_one_host.local_rank, on_one_host.local_size) == (3, 4)
    assert detect(PS_LITE | {"DMLC_TASK_ID": "3", "DMLC_WORKER_ID": "1"}).rank == 1
    under_torchrun = PS_LITE | {"DMLC_TASK_ID": "3", "RANK": "0", "WORLD_SIZE": "2"}
    assert detect(under_torchrun).launcher == "torchrun"


def test_schedulers_and_servers_of_ps_lite_are_no_ranks() -> None:
    for role in ("scheduler", "server"):
        assert ps_lite_role(PS_LITE | {"DMLC_ROLE": role}) == role
        assert detect(PS_LITE | {"DMLC_ROLE": role}).launcher == "alone"
    assert ps_lite_role(PS_LITE) == "worker"
    assert ps_lite_role({}) is None and ps_lite_role({"DMLC_ROLE": ""}) is None


def test_the_engine_that_mxnet_was_told_to_use() -> None:
    assert mxnet_engine({"MXNET_ENGINE_TYPE": "NaiveEngine"}) == "NaiveEngine"
    assert mxnet_engine({}) is None and mxnet_engine({"MXNET_ENGINE_TYPE": ""}) is None


@pytest.mark.parametrize("missing", ["DMLC_NUM_WORKER", "DMLC_TASK_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"])
def test_ps_lite_without_a_variable_is_refused(missing: str) -> None:
    variables = PS_LITE | {"DMLC_TASK_ID": "3"}
    del variables[missing]
    with pytest.raises(ValueError, match=f"DMLC_ROLE is worker: expected .*{missing}"):
        detect(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],login1", "gpu03"), ("one", "one"), ("a1,b2", "a1"), ("n[7,9]", "n7")],
)
def test_slurm_ranks_meet_at_the_first_host_of_the_list(nodes: str, first: str) -> None:
    found = detect(
        {
            "SLURM_PROCID": "4",
            "SLURM_STEP_NUM_TASKS": "6",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
            "SLURM_JOB_ID": "41234",
            "SLURM_STEP_NODELIST": nodes,
        }
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (4, 6, 1, 3)
    assert (found.address, found.port) == (first, 21_234)


def test_a_batch_script_without_srun_is_no_rank() -> None:
    found = detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"})
    assert (found.size, found.launcher) == (1, "alone")


def test_alone() -> None:
    assert (detect({}).rank, detect({}).size, detect({}).launcher) == (0, 1, "alone")


def test_half_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="RANK is set but WORLD_SIZE is not"):
        detect({"RANK": "0"})
    with pytest.raises(ValueError, match="expected a number in RANK, got 'first'"):
        detect({"RANK": "first", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Topology(rank=2, size=2)


def test_switches_are_on_off_and_places() -> None:
    assert switches({}) == switches({"HYBRIDPAR_TUNE": "", "HYBRIDPAR_TUNE_FILE": ""}) == Switches(True, None)
    found = switches({"HYBRIDPAR_TUNE": "0", "HYBRIDPAR_TUNE_FILE": "/a/b.json"})
    assert found == Switches(tune=False, tune_file=Path("/a/b.json"))
    assert switches({"HYBRIDPAR_TUNE": "1"}).tune
    with pytest.raises(ValueError, match="expected 0 or 1 in HYBRIDPAR_TUNE, got 'no'"):
        switches({"HYBRIDPAR_TUNE": "no"})
