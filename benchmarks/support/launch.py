"""A benchmark's case on ranks of its own: fresh processes through torchrun, so that peak memory is the case's alone."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20


class CaseError(RuntimeError):
    """The ranks of a case failed, or took longer than they may."""


def run_ranks(
    script: Path, arguments: Sequence[str], *, ranks: int, timeout: float, environment: Mapping[str, str]
) -> Any:
    """Run ``script`` with ``arguments`` and ``--result FILE`` on new processes; the JSON that rank 0 left in FILE.

    Args:
        timeout: seconds after which the ranks are stopped.
        environment: variables that the ranks have besides this process's.

    Raises:
        CaseError: a rank failed, with the end of what the ranks printed, or the time was over.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with subprocess.Popen(
            [*launcher, str(script), *arguments, "--result", str(result)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except BaseException as error:
                process.terminate()  # the launcher then ends the ranks, which are in sessions of their own
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise CaseError(f"too slow: stopped after {timeout:g} s") from error
                raise
        if process.returncode:
            lines = output.splitlines()
            # The launcher's own traceback, which comes last, says nothing of the cause.
            ranks_said = [line for line in lines if line.startswith("[rank")]
            raise CaseError("failed:\n" + "\n".join((ranks_said or lines)[-20:]))
        return json.loads(result.read_text())


def peak_memory() -> int:
    """Bytes: the most memory that this process has had resident since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> int:
    """Bytes that the machine can still give without swapping (MemAvailable of /proc/meminfo)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024
