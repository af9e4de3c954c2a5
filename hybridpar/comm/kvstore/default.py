"""The group of stores that are created without one."""

from __future__ import annotations

import threading

from hybridpar.comm.group import Group
from hybridpar.comm.start import init

_LOCK = threading.Lock()
_default: Group | None = None


def default_group() -> Group:
    """All ranks of this job. Made by ``hybridpar.init()`` at the first call (collective), and the same ever after."""
    global _default
    with _LOCK:
        if _default is None:
            _default = init()
        return _default
