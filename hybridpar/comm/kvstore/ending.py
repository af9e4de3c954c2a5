"""The end of the process, when values that other ranks need may still be on their way.

# Note [the last pushes]
A script may end right after its last push, when other ranks still need its values. So the end of the process waits for
what was pushed, unless the script ended by an exception: then the others learn of it at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any


class AtEnd:
    """Calls a method of an object at the end of the process that made this, without keeping the object alive.

    What was registered last is called first.

    Args:
        method: bound; it is told whether to wait, see Note [the last pushes].
    """

    def __init__(self, method: Callable[[bool], None]) -> None:
        self._method: weakref.WeakMethod[Callable[[bool], Any]] = weakref.WeakMethod(method)
        self._process = os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        method = self._method()
        if method is not None and os.getpid() == self._process:
            method(not (hasattr(sys, "last_value") or hasattr(sys, "last_exc")))

    def cancel(self) -> None:
        """It will not be called."""
        atexit.unregister(self)
