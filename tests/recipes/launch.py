"""Starting the recipe as its users do: torchrun, on small synthetic data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from recipes.common.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).parent / "torchrun"

# Synchronised batch norm: without it the batch statistics, and so the losses, depend on the number of ranks.
SMALL = [
    "synthetic", "--data.identities", "50", "--data.images-per-identity", "8", "--data.image-size", "16",
    "--model.options", "width", "0.25", "--model.embedding-size", "16", "--model.sync-batch-norm",
    "--head.margin-options", "scale", "16", "margin", "0.2", "--batch", "30",
    "--optimizer.learning-rate", "0.01", "--run.log-every", "1", "--run.no-tensorboard", "--run.no-export",
]  # fmt: skip


def start(ranks: int, out: Path, *options: str, module: str = "recipes.insightface.train") -> subprocess.Popen[str]:
    """torchrun with ``ranks`` ranks, writing into ``out``."""
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(ranks), "-m", module]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *SMALL, "--run.out", str(out), *options],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(ranks: int, out: Path, *options: str, **how: str) -> str:
    """The same, to the end; returns what it printed."""
    process = start(ranks, out, *options, **how)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def losses(out: Path) -> dict[int, float]:
    """Loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(out) if "loss" in record}


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run in ``out`` has reported ``step``."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if (out / "metrics.jsonl").exists() and max(losses(out), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks that a torchrun started."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]
