"""Starts the scripts of this folder on ranks, and reads what they report."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.comm.mxnet.scripts.checks import MARK
from tests.ranks import free_port

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]

needs_mxnet = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None, reason="needs mxnet (pip install 'hybridpar[mxnet]')"
)

# One thread for each pool: the ranks share few cores.
QUIET = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "MXNET_CPU_WORKER_NTHREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "DMLC_LOG_STACK_TRACE_DEPTH": "0",
}


def checks_of(script: str) -> list[str]:
    """Names of the checks that a script defines, without importing it."""
    tree = ast.parse((SCRIPTS / script).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("check_") for name in names if name.startswith("check_")]


def run_checks(script: str, size: int = 1, **variables: str) -> dict[str, str]:
    """Run a script's checks on ``size`` ranks. Returns for each check what was wrong on any rank, if anything was."""
    port = free_port()
    environments = [ranks_of_torchrun(size, rank, port) | variables for rank in range(size)]
    outputs = run_together([[sys.executable, str(SCRIPTS / script)]] * size, environments)
    problems: dict[str, str] = {}
    for rank, (status, out, err) in enumerate(outputs):
        found = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
        reports = {report["name"]: report["problem"] for report in found}
        for name in checks_of(script):
            problem = reports.get(name, f"did not come to an end: status {status}\n{err[-4000:]}")
            problems[name] = problems.get(name, "") + (f"rank {rank}: {problem}\n" if problem else "")
        if status:
            problems["exit"] = problems.get("exit", "") + f"rank {rank}: status {status}\n{err[-4000:]}\n"
    return problems


def ranks_of_torchrun(size: int, rank: int, port: int) -> dict[str, str]:
    """Variables as torchrun sets them."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float = 110.0
) -> list[tuple[int, str, str]]:
    """Start all commands at once, and wait for each. Returns status, output and complaints of each."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "MXNET_"))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=base | QUIET | dict(variables), **pipes)
        for command, variables in zip(commands, environments, strict=True)
    ]
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            results.append((process.returncode, out, err))
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
