"""The record of a run: ``metrics.jsonl`` and TensorBoard events, written by rank 0, read by the plots."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS_FILE = "metrics.jsonl"
"""In the run directory: one JSON object per line with "step", "time" (Unix seconds) and the values of that step."""

TENSORBOARD_FOLDER = "tensorboard"

Record = Mapping[str, Any]


class MetricsWriter:
    """Writes the values of a step as one line of ``metrics.jsonl`` and as TensorBoard scalars.

    A line is complete on disk as far as the operating system is concerned when :meth:`write` returns, so a killed run
    keeps what it had reported. A run that resumes from step N first drops the lines beyond N, and a half-written last
    line: the steps after N are about to be done, and reported, again.

    Args:
        directory: of the run; must exist.
        resumed_step: the step of the checkpoint that training goes on from; 0 for a new run, which starts an empty
            record.
        tensorboard: whether to write TensorBoard events into ``tensorboard/`` too.
    """

    def __init__(self, directory: Path | str, *, resumed_step: int = 0, tensorboard: bool = True) -> None:
        self.path = Path(directory) / METRICS_FILE
        _keep_until(self.path, resumed_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._events: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter  # large: only where it is used

            folder = str(Path(directory) / TENSORBOARD_FOLDER)
            self._events = SummaryWriter(folder, purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step. Values that are not finite become ``null``, which JSON can hold."""
        reserved = {"step", "time"} & set(values)
        if reserved:
            raise ValueError(f"expected names of metrics other than step and time, got {sorted(reserved)}")
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": int(step), "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both records; writing afterwards is an error."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(directory: Path | str) -> list[Record]:
    """The records of a run in the order written; a last line cut short by a kill is left out.

    Raises ``ValueError`` for any other line that is not a record.
    """
    path = Path(directory) / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f'{path}, line {number}: expected an object with an integer "step", got {line.strip()}')
        records.append(record)
    return records


def series(records: Iterable[Record], name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Steps int64 [n] and values float64 [n] of one metric; ``null`` comes back as NaN."""
    found = [(record["step"], record[name]) for record in records if name in record]
    steps = np.array([step for step, _ in found], dtype=np.int64)
    values = np.array([math.nan if value is None else value for _, value in found], dtype=np.float64)
    return steps, values


def _keep_until(path: Path, step: int) -> None:
    """Drop the records beyond ``step`` (all of them for step 0), leaving the old file whole if this is interrupted."""
    kept = read_metrics(path.parent) if step > 0 and path.exists() else []
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept if record["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
