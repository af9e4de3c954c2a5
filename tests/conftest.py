"""Settings of the whole suite: thread counts, and the markers that need something of the machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

# Ranks are threads and processes of few cores; torch's own threads would only fight over them.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store looks up the name of whoever connects; a name server that does not answer must not cost seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shared machine has slow moments; what a test may take is bounded by pytest-timeout instead.
hypothesis.settings.register_profile("hybridpar", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hybridpar")


@functools.cache
def _no_root() -> str | None:
    return None if os.geteuid() == 0 else "needs the rights of root"


@functools.cache
def _no_hosts() -> str | None:
    if _no_root():
        return _no_root()
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the programs ip and tc (iproute2)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if made.returncode == 0 else "needs the right to make network namespaces"


@functools.cache
def _no_mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py (pip install 'hybridpar[mpi]')"
    launchers = (Path(sys.prefix) / "bin" / "mpirun", shutil.which("mpirun"))
    return None if any(path and Path(path).exists() for path in launchers) else "needs an mpirun"


@functools.cache
def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device"


_MISSING: dict[str, Callable[[], str | None]] = {
    "root": _no_root,
    "hosts": _no_hosts,
    "mpi": _no_mpi,
    "gpu": _no_gpu,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="ranks to kill on every route (tests/faults)")
    parser.addoption("--kill-seed", type=int, help="draws the same moments again")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in _MISSING.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(reason)
