"""What a user sees when the kernels cannot be built or were not built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_missing_compiler_is_named_with_the_way_to_get_one(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler", "CC": "no-such-compiler"}
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode != 0
    assert "expected a C++17 compiler" in build.stderr
    assert "'no-such-compiler'" in build.stderr
    assert "apt-get install g++" in build.stderr


def test_without_the_compiled_module_the_import_says_how_to_build_it() -> None:
    program = """
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hybridpar.kernels._native":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing)
import hybridpar
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "ImportError: expected the compiled module hybridpar.kernels._native" in run.stderr
    assert "make venv" in run.stderr
