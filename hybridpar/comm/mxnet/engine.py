"""Functions of MXNet's engine: they run once arrays are ready, and hold them until somebody completes them.

# Note [a function of the engine]
MXNet's engine orders operators by the arrays that they read and write. A function that is pushed with
``MXEnginePushAsyncND`` takes part in that order: it runs when the arrays are free, and they stay taken until it calls
its completion, which may happen much later and on any thread. So nothing waits: not the script, nor a worker of the
engine. Where the arrays are free already, it runs at once in the thread that pushes it: to wake a worker costs more
than a function as short as these. Otherwise the worker that has computed the last of them runs it next, before
operators that stand in line there. What fills arrays runs on the engine's prioritised workers, which are there for
short functions.

# Note [errors through the engine]
A completion can carry an error: a pointer to a ``dmlc::Error``, which is a ``std::runtime_error`` and nothing more. The
engine copies it and throws the copy in the call that waits for an array which the function, or any operator after it,
should have written: ``asnumpy``, ``wait_to_read``, ``waitall``; operators in between are skipped. This class of the C++
library, which is the same one for MXNet and for us, and the three pointers of a completion (``CallbackOnComplete`` in
``mxnet/engine.h``) are all of MXNet's C++ that is relied on; they are those of the 1.9 releases, the last ones. MXNet
makes a Python exception of the text, of the class whose name the text begins with. It throws an error once, in the
first call that waits, and forgets it.

# Note [the interpreter is not needed]
Threads of the engine that call Python wait for the interpreter, and take it from the thread of the script, which
gives the next function to the engine: for functions as short as these that costs more than the functions. So they are
native: they copy what there is to copy, and put their number into an inbox. One thread of Python takes from there
whatever has come while it waited for the interpreter, all at once.

# Note [followers]
What is to be filled with a sum that travels could wait for the buffer in the engine, as a function of its own: to wake
a worker for it when the sum arrives costs more than the copy. So an array that is free is taken at once, by a function
that runs where it is pushed, and the copy is made when the function that holds the buffer is completed, before that is:
then the buffer still belongs to it. Where the array is in use, or where the other function has not run, so that it may
still be skipped, the engine orders the copy as it does everything else; and it carries the errors.

# Note [copies in plain order]
MXNet may keep an array of several dimensions in another order of its own, which only its operators understand, and
whether it does is known when the array has been computed. An array of one dimension is in plain order, so functions
copy it themselves. One that is a view of such an array of several dimensions cannot be had as it is: that is an error.

# Note [skipped functions]
Where an array carries the error of an earlier operator, the engine skips the function. It is deleted all the same, and
one that is deleted without having run was skipped.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import mxnet
from mxnet.base import _LIB, MXNetError, register_error

from hybridpar.comm.errors import CommunicationError
from hybridpar.kernels._native import EngineInbox
from hybridpar.topology import mxnet_engine

_LOG = logging.getLogger(__name__)

_RELEASES = "1.9."
_AHEAD = 1 << 30  # priorities have 32 bits, and operators have small ones
_NONE: list[int] = []
_END_SECONDS = 5.0
_BETWEEN_SIGNALS = 0.1
# In the order of EngineApi (csrc/engine_inbox.h).
_FUNCTIONS = (
    "MXEnginePushAsyncND", "MXShallowCopyNDArray", "MXNDArrayFree", "MXNDArrayToDLPack", "MXNDArrayCallDLPackDeleter",
    "MXNDArrayGetShapeEx", "MXNDArrayGetDType", "MXNDArrayGetContext", "MXNDArrayGetStorageType", "MXGetLastError",
)  # fmt: skip


class StoreError(MXNetError, CommunicationError):  # type: ignore[misc]
    """What MXNet's waiting calls raise for communication that failed: an MXNetError and a CommunicationError."""

    def __init__(self, text: str) -> None:
        # As CommunicationError writes it; what comes behind a colon is the reason.
        parts = re.search(r"rank (\d+): (\w+) of (.*?) failed: (.*)", text, re.DOTALL)
        rank, operation, tensor, reason = parts.groups() if parts else ("0", "unknown", "unknown", text)
        CommunicationError.__init__(self, reason, rank=int(rank), operation=operation, tensor=tensor)


@dataclass(eq=False, slots=True)
class Arrival:
    """A function that has run and holds its arrays until it is completed, or that was skipped.

    Attributes:
        load: what it was pushed with.
        problem: why its copies could not be made, if not empty. It must be completed all the same.
    """

    number: int
    load: Any
    ran: bool
    problem: str


def check_engine() -> None:
    """To be called before the first function is pushed.

    Raises:
        RuntimeError: this MXNet is not of the releases whose engine is known, or its engine is the one for debugging:
            that one would wait for each function in turn, and forgets their errors.
    """
    if not mxnet.__version__.startswith(_RELEASES):
        raise RuntimeError(f"expected MXNet {_RELEASES}x, got {mxnet.__version__}; pip install mxnet==1.9.1")
    if mxnet_engine() == "NaiveEngine":
        raise RuntimeError(
            "expected an engine of MXNet that runs operators side by side, got MXNET_ENGINE_TYPE=NaiveEngine; unset it"
        )


class Engine:
    """Gives functions to MXNet's engine, and tells when they have run.

    Args:
        receive: a method, called with all functions that have run or were skipped since the last call, in that order,
            on a thread of its own. It must not wait for arrays. If it raises, they are completed with that error. Its
            object is kept alive as long as functions are on their way.
    """

    def __init__(self, receive: Callable[[Sequence[Arrival]], None]) -> None:
        method = cast("MethodType", receive)
        self._owner = weakref.ref(method.__self__)
        self._inbox = EngineInbox([_address(name) for name in _FUNCTIONS])
        self._numbers = itertools.count(1)
        self._loads: dict[int, tuple[object, Any]] = {}
        self._process = os.getpid()
        # The thread holds all that it needs but this object, so that an abandoned one is collected, and it ends.
        arguments = (self._inbox, self._loads, method.__func__)
        self._thread = threading.Thread(target=_receive_all, args=arguments, name="hybridpar-mxnet", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._inbox, self._thread, self._process, _ENDED)

    # Arrays are named by their handles, which the caller keeps alive during the call.

    def is_plain(self, array: int, like: int) -> bool:
        """Whether an array is dense, on this host, of one dimension, and of the dtype and length of another one."""
        return self._inbox.is_plain(array, like)

    def push(
        self,
        load: object,
        *,
        reads: list[int] = _NONE,
        writes: list[int] = _NONE,
        copied: list[int] = _NONE,
        back: bool = False,
        priority: int = 0,
        name: str = "hybridpar",
    ) -> int:
        """A function that copies, and then is received with its load. Returns its number, at once.

        Args:
            reads, writes: arrays that it reads, and that it writes; not one in both.
            copied: handle, address and bytes of each of some of the arrays, which are plain, see ``is_plain``: they are
                copied to that address, which is memory of an array that it writes.
            back: whether they are copied back when the function is completed without an error.
            priority: of functions that can run the highest goes first.
            name: for MXNet's profiler.

        Raises:
            RuntimeError: a forked child, or MXNet refused the function.
        """
        if os.getpid() != self._process:
            raise RuntimeError("push in a forked child: expected the process that made the store; make another there")
        number = next(self._numbers)
        if self._finalizer.alive:
            self._loads[number] = (self._owner(), load)
        self._inbox.push(number, reads, writes, copied, back, _AHEAD + max(-_AHEAD, min(priority, _AHEAD - 1)), name)
        return number

    def fill(self, array: int, source: int, address: int, nbytes: int, number: int = 0) -> None:
        """Copy from an address, memory of ``source``, into a plain array, when both can be had. Returns at once.

        Args:
            number: of the function that was the last one to write ``source``, which nobody writes before this has
                copied; 0 where operators write it. See Note [followers].
        """
        if number and self._inbox.follow(number, array, address, nbytes):
            return
        self._inbox.push_copies([source], [array], [array, address, nbytes], 0, "hybridpar pull")

    def complete(self, number: int, error: BaseException | None = None) -> bool:
        """Its arrays are free again; with an error, calls that wait for the written ones raise it.

        Returns:
            False if it was completed before, or everything was by ``stop``.
        """
        return self._inbox.complete([number], "" if error is None else text_of(error)) == 1

    def complete_all(self, numbers: list[int]) -> None:
        """``complete`` of several, without an error."""
        self._inbox.complete(numbers, "")

    def wait_idle(self) -> None:
        """Return when all functions have been completed, or skipped, and the engine is done with them."""
        while not self._inbox.wait_idle(_BETWEEN_SIGNALS):
            pass

    def stop(self, error: BaseException) -> None:
        """Functions that are not complete are completed with this error, now and whenever they run."""
        if self._finalizer.detach() is not None:
            _end(self._inbox, self._thread, self._process, text_of(error))


def text_of(error: BaseException) -> str:
    """The text by which MXNet knows the class of an error that it throws; Note [errors through the engine]."""
    if isinstance(error, CommunicationError):
        return f"{_COMMUNICATION_ERROR}: {error}"
    name = type(error).__name__
    return f"{name if type(error) in (ValueError, TypeError) else f'MXNetError: {name}'}: {error}"


def _receive_all(inbox: EngineInbox, loads: dict[int, tuple[object, Any]], receive: Callable[..., None]) -> None:
    """The thread of an ``Engine``."""
    while inbox.wait():
        _receive_once(inbox, loads, receive)
    loads.clear()


def _receive_once(inbox: EngineInbox, loads: dict[int, tuple[object, Any]], receive: Callable[..., None]) -> None:
    """A function of its own, so that nothing is kept alive while the thread waits."""
    arrived = []
    for number, ran, problem in inbox.take():
        owner, load = loads.pop(number)
        arrived.append(Arrival(number, load, ran, problem))
    if not arrived:
        return
    try:
        receive(owner, arrived)
    except BaseException as error:
        if not inbox.complete([one.number for one in arrived], text_of(error)):
            _LOG.exception("functions of MXNet's engine failed after they had completed")


def _end(inbox: EngineInbox, thread: threading.Thread, process: int, why: str) -> None:
    """In a forked child the lock may be held by a thread that does not exist there."""
    if os.getpid() != process:
        return
    inbox.stop(why)
    if threading.current_thread() is not thread:
        thread.join(_END_SECONDS)


def _address(name: str) -> int:
    address = ctypes.cast(_LIB[name], ctypes.c_void_p).value
    assert address is not None
    return address


# Registered name: the class that MXNet makes of our text.
_COMMUNICATION_ERROR = "hybridpar.CommunicationError"
register_error(_COMMUNICATION_ERROR, StoreError)
_ENDED = "MXNetError: RuntimeError: the store has ended"
