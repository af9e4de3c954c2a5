"""Checks that need MXNet run in a process of their own, because its threads must not live in that of pytest."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = "from tests.comm.kvstore import mxnet_checks; mxnet_checks.run_all()"


def need_mxnet() -> None:
    """Skips the test where mxnet is not installed."""
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("needs mxnet (pip install 'hybridpar[mxnet]')")


def check_with_mxnet(name: str) -> None:
    """Fails as the function ``name`` of ``mxnet_checks`` did. All run in one process, because mxnet starts slowly."""
    need_mxnet()
    errors = _errors()
    assert not errors[name], errors[name]


@functools.cache
def _errors() -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
