"""Tables on the terminal, rows in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, object]


def table(rows: Sequence[Row], text_columns: int) -> str:
    """Aligned columns, the first ``text_columns`` to the left, numbers to the right."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, content: object) -> None:
    """Indented JSON, ending in a newline."""
    path.write_text(json.dumps(content, indent=1) + "\n")
