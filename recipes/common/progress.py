"""Progress of a long loop: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress:
    """Counts steps and shows them on rank 0.

    On a terminal this is a tqdm bar; where output goes to a file or a pipe, a plain line every ``seconds`` and at the
    end, because a redrawn bar fills logs with control characters.

    Args:
        total: steps in all.
        done: steps that are behind already (a resumed run).
        label: a word in front.
        visible: false on all ranks but 0, and with ``--quiet``.
        stream: where to show it.
        seconds: between two lines where the stream is no terminal.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        label: str = "train",
        visible: bool = True,
        stream: TextIO | None = None,
        seconds: float = 10.0,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._done, self._first = total, done, done
        self._label, self._seconds = label, seconds
        self._started = self._shown = time.monotonic()
        self._values: dict[str, str] = {}
        terminal = self._stream.isatty()
        self._lines = visible and not terminal
        self._bar: tqdm | None = None
        if visible and terminal:
            self._bar = tqdm(total=total, initial=done, desc=label, file=self._stream, dynamic_ncols=True)

    def advance(self, steps: int = 1, **values: str) -> None:
        """Count steps; ``values`` (formatted by the caller, such as loss="3.21") replace those shown before."""
        self._done += steps
        if values:
            self._values = values
        if self._bar is not None:
            if values:
                self._bar.set_postfix(values, refresh=False)
            self._bar.update(steps)
        now = time.monotonic()
        if self._lines and now - self._shown >= self._seconds:
            self._print(now)

    def note(self, message: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        elif self._lines:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Finish the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._lines:
            self._print(time.monotonic())
        self._lines = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, now: float) -> None:
        self._shown = now
        elapsed = now - self._started
        parts = [f"{self._label} {self._done}/{self._total}", f"{elapsed:.0f} s"]
        if self._done > self._first and elapsed > 0 and self._done < self._total:
            left = (self._total - self._done) * elapsed / (self._done - self._first)
            parts.append(f"{left:.0f} s left")
        parts += [f"{name} {value}" for name, value in self._values.items()]
        print(", ".join(parts), file=self._stream, flush=True)
