"""A script of benchmarks/peers with some of its lines changed, as a module."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def changed(script: Path, changes: Mapping[str, str]) -> str:
    """The text of a script in which other lines stand in the place of some; an empty text takes a line away.

    Raises:
        ValueError: a line to change is not there once.
    """
    text = script.read_text()
    for line, replacement in changes.items():
        if (count := text.count(f"\n{line}\n")) != 1:
            raise ValueError(f"expected the line {line!r} once in {script}, got it {count} times")
        text = text.replace(f"\n{line}\n", f"\n{replacement}\n" if replacement else "\n")
    return text


def difference(script: Path, text: str) -> str:
    """The lines that differ, each after its - or +."""
    lines = difflib.unified_diff(script.read_text().splitlines(), text.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def load(script: Path, text: str, **names: object) -> ModuleType:
    """Execute the text as a module, in which ``names`` are known."""
    module = ModuleType(script.stem)
    module.__dict__.update(names)
    exec(compile(text, f"{script} (changed)", "exec"), module.__dict__)  # noqa: S102  (a file of this repository)
    return module
