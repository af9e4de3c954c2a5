"""The store under MXNet, on two ranks: see the files of SCRIPTS in scripts/ for what each test does."""

from __future__ import annotations

import pytest

from tests.comm.mxnet.running import checks_of, needs_mxnet, run_checks

SCRIPTS = ("store_checks.py", "array_checks.py", "trap_checks.py")
pytestmark = needs_mxnet


@pytest.fixture(scope="module")
def problems() -> dict[str, dict[str, str]]:
    return {script: run_checks(script, 2) for script in SCRIPTS}


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script in SCRIPTS for name in [*checks_of(script), "exit"]]
)
def test_store(problems: dict[str, dict[str, str]], script: str, name: str) -> None:
    assert not problems[script].get(name), problems[script][name]
