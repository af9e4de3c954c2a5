"""Ten million identities on one machine: the recipe's preset is trained, checkpointed, killed and resumed.

    python benchmarks/ten_million.py [--identities 10000000] [--out FOLDER] [--json FILE]

Runs `torchrun -m recipes.insightface.train ten-million` three times, in a folder that is removed afterwards:

trained    200 steps, of each of which a tenth of the classes is part; one rank is killed after `--kill-at`
resumed    the same command again: goes on from the checkpoint before that, to the end, where it writes another
exact      a few steps of which all classes are part

Columns: seconds from the start of the ranks until the first step begins, with building or loading the head; seconds a
step, median; GB of rows and state of one rank; MB that one rank took at most beyond those: memory that is the rank's
own or shared, looked at twenty times a second; what of these MB a process takes that does nothing but one step of one
linear layer with torch.optim; size of a checkpoint, and seconds that writing it took, with a sha256 of all of it; mean
loss of the first and last ten steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.bare_torch import own_memory
from support.launch import available_memory
from support.report import table, write_json

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipes.common.metrics import read_metrics  # noqa: E402  (the line above finds it)
from recipes.insightface.presets import PRESETS  # noqa: E402  (the line above finds it)

PRESET = PRESETS["ten-million"][1]
_BESIDE = 500_000_000  # bytes of a rank beside its rows
_SAVED = re.compile(r"step (\d+): checkpoint .* \(([\d,]+) MB in ([\d.]+) s\)")


@dataclass
class Run:
    """One training run, as seen from outside.

    Attributes:
        output: lines that it printed.
        started: seconds until it said that it begins; None before that.
        peak: bytes that one rank held at most, as far as looked at.
    """

    process: subprocess.Popen[str]
    began: float
    output: list[str] = field(default_factory=list)
    started: float | None = None
    peak: int = 0

    def read(self) -> None:
        """On a thread of its own: what it prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip())
            if self.started is None and line.startswith("hybrid:"):
                self.started = time.monotonic() - self.began

    def look(self) -> None:
        """At the memory of its ranks."""
        for rank in self.ranks():
            with contextlib.suppress(OSError):
                self.peak = max(self.peak, own_memory(rank))

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in path.read_text().split()] if path.exists() else []


@contextlib.contextmanager
def running(out: Path, options: argparse.Namespace, extra: Sequence[str]) -> Iterator[Run]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
        "-m", "recipes.insightface.train", "ten-million", "--run.out", str(out), "--run.log-every", "1",
        "--run.no-tensorboard", "--data.identities", str(options.identities),
        "--data.shown", str(min(PRESET.data.shown, options.identities)), *extra,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        run = Run(process, time.monotonic())
        reader = threading.Thread(target=run.read, daemon=True)
        reader.start()
        try:
            yield run
        finally:
            for rank in run.ranks():
                os.kill(rank, signal.SIGKILL)
            process.wait()
            reader.join()


def train(
    out: Path, options: argparse.Namespace, extra: Sequence[str], *, until: int | None = None
) -> tuple[Run, list[dict[str, Any]]]:
    """A run to its end, or until a rank is killed after step ``until``; and what it noted of each step.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    before = len(_steps(out))
    with running(out, options, extra) as run:
        while run.process.poll() is None:
            run.look()
            if until is not None and len(_steps(out)) - before and _steps(out)[-1]["step"] >= until:
                os.kill(run.ranks()[-1], signal.SIGKILL)
                break
            time.sleep(0.05)
        run.process.wait()
    if until is None and run.process.returncode:
        raise RuntimeError("the run failed:\n" + "\n".join(run.output[-30:]))
    return run, _steps(out)


def _steps(out: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out) if "loss" in record] if (out / "metrics.jsonl").exists() else []


def rows_bytes(options: argparse.Namespace) -> int:
    """What one rank cannot do without: bfloat16 rows and momentum."""
    return 2 * 2 * PRESET.model.embedding_size * -(-options.identities // options.ranks)


def bare_memory() -> int:
    """Bytes of a process that does nothing but one step of one linear layer."""
    command = [sys.executable, str(Path(__file__).parent / "support" / "bare_torch.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def row_of(name: str, run: Run, steps: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, object]:
    if run.started is None or not steps:
        raise RuntimeError(f"{name}: the run made no step:\n" + "\n".join(run.output[-30:]))
    rows = rows_bytes(options)
    seconds = [PRESET.batch / record["samples_per_second"] for record in steps[2:] or steps]
    losses = [record["loss"] for record in steps]
    saved = next((match for line in run.output if (match := _SAVED.search(line))), None)
    return {
        "run": name,
        "steps": f"{steps[0]['step']}-{steps[-1]['step']}",
        "start s": f"{run.started:.1f}",
        "s a step": f"{statistics.median(seconds):.3f}",
        "rows GB": f"{rows / 1e9:.2f}",
        "beyond MB": f"{(run.peak - rows) / 1e6:.0f}",
        "bare MB": f"{bare_memory() / 1e6:.0f}",
        "saved MB": saved.group(2) if saved else "",
        "saving s": saved.group(3) if saved else "",
        "first losses": f"{statistics.mean(losses[:10]):.2f}",
        "last losses": f"{statistics.mean(losses[-10:]):.2f}",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--identities", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--kill-at", type=int, default=120, help="step after which a rank is killed")
    parser.add_argument("--exact-steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to make the runs' folder in, with room for two checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there, besides the table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    needed, free = options.ranks * (rows_bytes(options) + _BESIDE), available_memory()
    disk = shutil.disk_usage(options.out or tempfile.gettempdir()).free
    if needed > free or 2.1 * options.ranks * rows_bytes(options) > disk:
        print(
            f"skipped: {options.identities:,} identities need {needed / 1e9:.0f} GB of memory and room for two "
            f"checkpoints of {options.ranks * rows_bytes(options) / 1e9:.0f} GB, there are {free / 1e9:.0f} and "
            f"{disk / 1e9:.0f} GB; give fewer --identities, or --out"
        )
        return
    folder = Path(tempfile.mkdtemp(prefix="ten-million-", dir=options.out))
    usual = ["--steps", str(options.steps), "--run.checkpoint-every", str(options.checkpoint_every)]
    rows = []
    try:
        run, steps = train(folder / "sampled", options, usual, until=options.kill_at)
        rows.append(row_of("trained", run, steps, options))
        print(table(rows, text_columns=1), flush=True)
        first = options.kill_at // options.checkpoint_every * options.checkpoint_every
        run, steps = train(folder / "sampled", options, usual)
        rows.append(row_of("resumed", run, [step for step in steps if step["step"] > first], options))
        print(table(rows, text_columns=1), flush=True)
        shutil.rmtree(folder / "sampled")
        exact = ["--steps", str(10 * options.exact_steps), "--head.sample-rate", "1"]
        run, steps = train(folder / "exact", options, exact, until=options.exact_steps)
        rows.append(row_of("exact", run, steps, options))
    finally:
        shutil.rmtree(folder)
    print(table(rows, text_columns=1))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
