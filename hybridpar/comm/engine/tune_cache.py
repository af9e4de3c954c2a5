"""The file in which tuned plans are kept: JSON, one entry for each model, set of ranks and version."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_FORMAT = 1


class TuneCache:
    """Entries under the hash of the facts that they hold for. Several models and jobs may share a file.

    A file is replaced whole, so a reader never sees half of one. If two jobs write in the same instant, the entry of
    one is lost, and that job tunes again next time.

    Args:
        path: the file, which need not exist yet.

    Raises:
        ValueError: its directory does not exist.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ValueError(f"expected a file in a directory that exists, got {path}; make {path.parent} first")
        self._path = path

    def load(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry for these facts, or None."""
        try:
            entry = self._entries().get(_digest(facts))
        except (OSError, ValueError) as error:
            _LOG.warning("tuning anew, since %s cannot be read: %s", self._path, error)
            return None
        return None if entry is None else dict(entry)

    def store(self, facts: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Add or replace the entry for these facts. A file that is not of this format is set aside, not overwritten.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            entries = self._entries()
        except ValueError as error:
            aside = self._path.with_name(self._path.name + ".unreadable")
            _LOG.warning("%s goes to %s, since it is no file of tuned plans: %s", self._path, aside, error)
            self._path.replace(aside)
            entries = {}
        entries[_digest(facts)] = {**entry, "facts": facts}
        text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1, sort_keys=True)
        descriptor, partial = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            Path(partial).replace(self._path)
        except BaseException:
            Path(partial).unlink()
            raise

    def _entries(self) -> dict[str, Any]:
        """What the file holds; nothing if there is none. Raises ValueError if it is not of this format."""
        if not self._path.exists():
            return {}
        content = json.loads(self._path.read_text())
        found = content.get("entries") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise ValueError(f"expected a JSON object of format {_FORMAT} with entries, got something else")
        return found


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
