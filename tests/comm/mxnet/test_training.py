"""The store trains exactly as MXNet's own servers do: scripts that differ in nothing but the name of the store."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.comm.mxnet.running import SCRIPTS, needs_mxnet, ranks_of_torchrun, run_together
from tests.ranks import free_port

pytestmark = needs_mxnet

TRAIN = [sys.executable, str(SCRIPTS / "train.py")]
# Module reads here whether the optimizer runs on the store.
OFF_STORE = {"MXNET_UPDATE_ON_KVSTORE": "0"}
CASES: dict[str, dict[str, str]] = {
    "gluon_sparse_on_store": {},
    "gluon_adam_on_store": {},
    "gluon_off_store": {},
    "by_hand_2bit_on_store": {},
    "by_hand_2bit_off_store": {},
    "module_sparse_on_store": {},
    "module_off_store": OFF_STORE,
}
FURTHER = {"gluon_adam_on_store", "by_hand_2bit_off_store"}
# Note [workers of ps-lite in program order]
# A Trainer that starts in its first step pulls the initial weights and pushes the first gradients right after, from
# another array: MXNet's threaded engine knows no order between the two. Where a worker's push overtakes its pull of the
# same key, the servers hold the sum of the first gradients when they answer, and that worker trains on with the sum for
# weights. With the engine that runs each operation to its end before the next, workers of ps-lite keep the order of the
# script. Ours run on the threaded engine.
IN_PROGRAM_ORDER = {"MXNET_ENGINE_TYPE": "NaiveEngine"}
CLOSE = 1e-4
Parameters = list[dict[str, npt.NDArray[np.float32]]]


def on_servers(folder: Path, case: str, workers: int) -> None:
    """MXNet's own dist_sync: a scheduler, a server and workers on loopback."""
    meeting = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_INTERFACE": "lo",
    }
    worker = {"DMLC_ROLE": "worker"} | IN_PROGRAM_ORDER
    roles = [{"DMLC_ROLE": "scheduler"}, {"DMLC_ROLE": "server"}] + [worker] * workers
    environments = [meeting | CASES[case] | role for role in roles]
    finish([[*TRAIN, str(folder), "dist_sync", case]] * len(roles), environments)


def on_hybridpar(folder: Path, cases: list[str], workers: int) -> None:
    """All cases in one run of the workers, a store for each of them."""
    port = free_port()
    environments = [ranks_of_torchrun(workers, rank, port) | CASES[cases[0]] for rank in range(workers)]
    finish([[*TRAIN, str(folder), "dist_sync_hybridpar", *cases]] * workers, environments)


def finish(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    for place, (status, out, err) in enumerate(run_together(commands, environments)):
        assert status == 0, f"process {place} of {len(commands)}: status {status}\n{out[-2000:]}\n{err[-4000:]}"


def load(folder: Path, case: str, workers: int) -> Parameters:
    return [dict(np.load(folder / f"{case}.{rank}.npz")) for rank in range(workers)]


def difference(ours: Mapping[str, npt.NDArray[np.float32]], theirs: Mapping[str, npt.NDArray[np.float32]]) -> float:
    """Largest difference of two sets of parameters, in units of the largest value of each."""
    assert ours.keys() == theirs.keys()
    return float(np.max([np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max() for name in theirs]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder with what some number of workers have trained, in one run for all cases with the same variables."""

    @functools.cache
    def train(workers: int) -> Path:
        folder = tmp_path_factory.mktemp(f"trained-{workers}")
        for variables in ({}, OFF_STORE):
            on_hybridpar(folder, [case for case in CASES if CASES[case] == variables], workers)
        return folder

    return train


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(case, workers, marks=pytest.mark.slow if case in FURTHER or workers > 2 else ())
        for workers in (2, 4)
        for case in CASES
    ],
)
@pytest.mark.timeout(300)
def test_parameters_after_20_steps_equal_those_of_mxnets_servers(
    trained: Callable[[int], Path], case: str, workers: int, tmp_path: Path
) -> None:
    """Worker by worker: with the optimizer off the store, MXNet's Module starts each from weights of its own."""
    try:
        on_servers(tmp_path, case, workers)
    except subprocess.TimeoutExpired:  # seen once; a run that does not end shows nothing
        on_servers(tmp_path, case, workers)
    ours, theirs = load(trained(workers), case, workers), load(tmp_path, case, workers)
    # Sums of floats in another order, carried through 20 steps, most of them with momentum.
    apart = [difference(one, other) for one, other in zip(ours, theirs, strict=True)]
    assert np.max(apart) < CLOSE, f"{case}: the parameters of the workers differ by {apart}"


def test_the_comparison_tells_other_sums(trained: Callable[[int], Path]) -> None:
    """Gradients that are compressed, and the same ones as they are, lead to parameters that hardly agree."""
    folder = trained(2)
    dense, compressed = (load(folder, case, 2)[0] for case in ("gluon_off_store", "by_hand_2bit_on_store"))
    assert difference(compressed, dense) > 1e-2
