"""Functions of MXNet's engine: see scripts/engine_checks.py for what each test does."""

from __future__ import annotations

import pytest

from tests.comm.mxnet.running import checks_of, needs_mxnet, run_checks

SCRIPT = "engine_checks.py"
pytestmark = needs_mxnet


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    return run_checks(SCRIPT)


@pytest.mark.parametrize("name", [*checks_of(SCRIPT), "exit"])
def test_engine(problems: dict[str, str], name: str) -> None:
    assert not problems.get(name), problems[name]
