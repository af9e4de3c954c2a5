"""Functions of MXNet's engine: see scripts/engine*_checks.py for what each test does."""

from __future__ import annotations

import pytest

from tests.comm.mxnet.running import checks_of, needs_mxnet, run_checks

SCRIPTS = ("engine_checks.py", "engine_copies_checks.py")
pytestmark = needs_mxnet


@pytest.fixture(scope="module")
def problems() -> dict[str, dict[str, str]]:
    return {script: run_checks(script) for script in SCRIPTS}


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script in SCRIPTS for name in (*checks_of(script), "exit")]
)
def test_engine(problems: dict[str, dict[str, str]], script: str, name: str) -> None:
    assert not problems[script].get(name), problems[script][name]
