"""Runs the functions ``check_*`` of a script one after the other, and says of each how it went.

MXNet and its threads must not live in the process of pytest, and its import takes longer than most checks: so one
process for each rank runs all checks of a script, and each of them is a test.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

MARK = "check: "


def run(names: Mapping[str, Any], *arguments: Any) -> None:
    """Call each function ``check_*`` in the order of definition with ``arguments``; print a line of JSON for each."""
    checks: dict[str, Callable[..., None]] = {
        name: value for name, value in names.items() if name.startswith("check_") and callable(value)
    }
    for name, check in checks.items():
        try:
            check(*arguments)
            problem = None
        except Exception:
            problem = traceback.format_exc()
        print(MARK + json.dumps({"name": name.removeprefix("check_"), "problem": problem}), flush=True)
