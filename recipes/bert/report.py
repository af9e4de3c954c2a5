"""What a model reaches, beside what is reached without one, as a text table."""

from __future__ import annotations

from collections.abc import Mapping

REPORT_FILE = "evaluation.json"


def format_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each name, a column for each metric that any of them has."""
    metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
    rows = [["", *metrics]]
    for name, values in results.items():
        rows.append([name, *(_number(metric, values[metric]) if metric in values else "-" for metric in metrics)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(metric: str, value: float) -> str:
    return f"{value:,.2f}" if metric == "perplexity" else f"{value:.4f}"
