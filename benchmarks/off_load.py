"""Rows and momentum larger than memory: a step with `state_dir=`, with little memory and with much.

    python benchmarks/off_load.py [--classes 1000000] [--limit 1024] [--folder FOLDER] [--json FILE]

One rank of one thread trains bfloat16 rows with bfloat16 momentum (`hp.RowSGD`), exact and with a tenth of the classes
in a step. Each case is a process of its own:

memory          rows and momentum in memory, no limit
files           in files under --folder (`state_dir=`), no limit: what is used stays in memory
memory, limit   in memory, in a control group with --limit MiB of memory and no swap: is expected to be killed
files, limit    in files, in such a group

Columns: GB of rows and momentum; seconds until the head is built; seconds a step, median and worst after the first; MB
that the process read from the disk and wrote to it in a step; with a limit the floor beside it: time that reading rows
twice and momentum once, and writing both once, takes at the speed of one large file on that disk, for all classes or
for those that are drawn. The losses of all cases must be equal, bit for bit, or the benchmark fails.

Groups need Linux and root; where there are none, the cases with a limit are left out, with the reason. Files have no
name and end with their process. A group ends with the benchmark; after kill -9, when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.memory_limit import MemoryLimit, NoControlGroupsError, limited_memory
from support.report import table, write_json

import hybridpar as hp

MIB = 1 << 20
_BYTES = 2 * 2  # of one number of a row, and of its momentum
_IN_MEMORY_ONLY = {"tmpfs", "ramfs", "devtmpfs"}


@dataclass(frozen=True)
class Case:
    files: bool
    limited: bool
    rate: float

    @property
    def name(self) -> str:
        return ("files" if self.files else "memory") + (", limit" if self.limited else "")


def run_case(options: argparse.Namespace) -> None:
    """The process of a case: one JSON line for what it did."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    sampler = hp.UniformSampler(rate=options.rate) if options.rate < 1 else None
    policy = hp.RowSGD(0.1, momentum=0.9, state_dtype=torch.bfloat16)
    head = hp.ShardedClassifier(
        options.embedding, options.classes, dtype=torch.bfloat16, optimizer=policy, sampler=sampler,
        state_dir=options.state_dir, group=hp.Group.alone(),
    )  # fmt: skip
    print(json.dumps({"built": time.perf_counter() - began}), flush=True)
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(step)
        features = torch.randn(options.batch, options.embedding, generator=draw).requires_grad_()
        labels = torch.randint(options.classes, (options.batch,), generator=draw)
        began, (read, written) = time.perf_counter(), disk_bytes()
        loss = head(features, labels)
        loss.backward()
        seconds, now = time.perf_counter() - began, disk_bytes()
        step_of = {"loss": float(loss.detach()), "seconds": seconds, "read": now[0] - read, "written": now[1] - written}
        print(json.dumps(step_of), flush=True)


def disk_bytes() -> tuple[int, int]:
    """That this process has read and written so far."""
    values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])


def run(case: Case, options: argparse.Namespace, group: MemoryLimit | None) -> dict[str, Any]:
    command = [
        sys.executable, __file__, "--case", "--rate", str(case.rate), "--classes", str(options.classes),
        "--embedding", str(options.embedding), "--batch", str(options.batch), "--steps", str(options.steps),
    ]  # fmt: skip
    command += ["--state-dir", str(options.folder)] if case.files else []
    if case.limited:
        assert group is not None
        command = group.command(command)
    print(f"{case.name}, rate {case.rate:g}", file=sys.stderr)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, complaints = process.communicate(timeout=options.timeout)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise SystemExit(f"{case.name}: expected an end within {options.timeout:g} s; see --timeout") from error
            raise
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{case.name}: failed\n{complaints[-2000:]}")
    built, *steps = [json.loads(line) for line in output.splitlines()] or [{}]
    killed = process.returncode != 0
    return {"case": case.name, "rate": case.rate, "killed": killed, "built": built.get("built"), "steps": steps}


def disk_speed(folder: Path, size: int = 256 * MIB) -> tuple[float, float]:
    """Bytes a second of reading and writing one file from end to end, past what memory holds of it."""
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(size // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(MIB):
            pass
        return size / (time.perf_counter() - began), size / written


def row_of(entry: dict[str, Any], options: argparse.Namespace, speed: tuple[float, float]) -> dict[str, object]:
    rows = options.classes * options.embedding * _BYTES / 2
    cells: dict[str, object] = {
        "case": entry["case"],
        "rate": f"{entry['rate']:g}",
        "rows GB": f"{2 * rows / 1e9:.2f}",
        "built s": "" if entry["built"] is None else f"{entry['built']:.1f}",
    }
    if entry["killed"]:
        return cells | {"s a step": "killed"} | dict.fromkeys(["worst s", "read MB", "written MB", "floor s"], "")
    steps = entry["steps"][1:]
    seconds = [step["seconds"] for step in steps]
    moved = entry["rate"] * rows
    limited_files = entry["case"] == Case(files=True, limited=True, rate=entry["rate"]).name
    return cells | {
        "s a step": f"{statistics.median(seconds):.2f}",
        "worst s": f"{max(seconds):.2f}",
        "read MB": f"{statistics.median(step['read'] for step in steps) / 1e6:,.0f}",
        "written MB": f"{statistics.median(step['written'] for step in steps) / 1e6:,.0f}",
        "floor s": f"{3 * moved / speed[0] + 2 * moved / speed[1]:.2f}" if limited_files else "",
    }


def check_losses(entries: list[dict[str, Any]]) -> None:
    """Raises SystemExit where two cases did different work."""
    first: dict[float, list[float]] = {}
    for entry in entries:
        losses = [step["loss"] for step in entry["steps"]]
        if not entry["killed"] and losses != first.setdefault(entry["rate"], losses):
            raise SystemExit(f"{entry['case']}: expected the losses {first[entry['rate']]}, got {losses}")


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    within = [(len(mount), kind) for mount, kind in mounts if folder.is_relative_to(mount)]
    return max(within)[1]


@contextlib.contextmanager
def group_or_reason(options: argparse.Namespace) -> Iterator[MemoryLimit | None]:
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(limited_memory(options.limit * MIB))
        except NoControlGroupsError as error:
            print(f"skipped: the cases with a limit, because {error}")
            group = None
        yield group


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--embedding", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="of each case; the first is not timed")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.1], help="shares of the classes in a step")
    parser.add_argument("--limit", type=int, default=1024, help="MiB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one case may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, besides the table")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--state-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.case:
        run_case(options)
        return
    if (kind := file_system(options.folder.resolve())) in _IN_MEMORY_ONLY:
        print(f"skipped: {options.folder} is in memory ({kind}); give a --folder on a disk")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with group_or_reason(options) as group:
        speed = disk_speed(options.folder)
        limits = (False, True) if group is not None else (False,)
        cases = [Case(files, limited, rate) for rate in options.rates for limited in limits for files in (False, True)]
        entries = [run(case, options, group) for case in cases]
        check_losses(entries)
    print(
        f"\n{options.classes:,} classes of {options.embedding} bfloat16 numbers with bfloat16 momentum, batch "
        f"{options.batch}; limit {options.limit:,} MiB; the disk reads {speed[0] / 1e6:,.0f} and writes "
        f"{speed[1] / 1e6:,.0f} MB a second\n"
    )
    print(table([row_of(entry, options, speed) for entry in entries], text_columns=1))
    if options.json:
        write_json(options.json, entries)


if __name__ == "__main__":
    main()
