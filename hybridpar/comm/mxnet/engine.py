"""Functions of MXNet's engine: Python code that runs once arrays are ready, and holds them until its work is done.

# Note [a function of the engine]
MXNet's engine orders operators by the arrays that they read and write. A function that is pushed with
``MXEnginePushAsyncND`` takes part in that order: it runs when the arrays are free, and they stay taken until it calls
its completion, which may happen much later and on any thread. So nothing waits: not the script, nor a worker of the
engine. It runs on the engine's prioritised workers, which are there for short functions, and so does not stand in line
with operators that compute.

# Note [errors through the engine]
A completion can carry an error: a pointer to a ``dmlc::Error``, which is a ``std::runtime_error`` and nothing more. The
engine copies it and throws the copy in the call that waits for an array which the function, or any operator after it,
should have written: ``asnumpy``, ``wait_to_read``, ``waitall``; operators in between are skipped. Such an object is
built by the constructor of the C++ library that MXNet itself is linked to, found through it. This, and the three
pointers of a completion (``CallbackOnComplete`` in ``mxnet/engine.h``), is all of MXNet's C++ that is relied on; it
is that of the 1.9 releases, the last ones. MXNet makes a Python exception of the text, of the class whose name the text
begins with. It throws an error once, in the first call that waits, and forgets it.

# Note [the interpreter is kept]
A call through ctypes gives the interpreter up, and must then win it back from whichever thread took it; a callback on a
thread that Python does not know makes what the interpreter needs of a thread, and throws it away at its end. For
functions as short as these both cost more than the functions. So the calls that give functions to the engine, and that
complete them, keep the interpreter: they only queue work, and MXNet calls Python while it holds no lock. And the few
threads of the engine that run functions stay known to Python once they have run one.

# Note [skipped functions]
Where an array carries the error of an earlier operator, the engine skips the function. It is deleted all the same, and
one that is deleted without having run was skipped.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import mxnet
from mxnet.base import _LIB, MXNetError, check_call, register_error

from hybridpar.comm.errors import CommunicationError
from hybridpar.topology import mxnet_engine

_LOG = logging.getLogger(__name__)

_RELEASES = "1.9."
_CPU_PRIORITIZED = ctypes.c_int(3)  # FnProperty::kCPUPrioritized
_ERROR_BYTES = 64  # room for a std::runtime_error, which takes 16 in libstdc++ and in libc++

_Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_Delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Complete = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class StoreError(MXNetError, CommunicationError):  # type: ignore[misc]
    """What MXNet's waiting calls raise for communication that failed: an MXNetError and a CommunicationError."""

    def __init__(self, text: str) -> None:
        # As CommunicationError writes it; what comes behind a colon is the reason.
        parts = re.search(r"rank (\d+): (\w+) of (.*?) failed: (.*)", text, re.DOTALL)
        rank, operation, tensor, reason = parts.groups() if parts else ("0", "unknown", "unknown", text)
        CommunicationError.__init__(self, reason, rank=int(rank), operation=operation, tensor=tensor)


class Completion:
    """Tells the engine that a function has done its work. Call it once, from any thread."""

    def __init__(self, callback: int, engine: int, block: int) -> None:
        self._callback, self._engine, self._block = callback, engine, block
        self._lock = threading.Lock()

    def __call__(self, error: BaseException | None = None) -> None:
        """The arrays are free again; with an error, calls that wait for the written ones raise it.

        Raises:
            RuntimeError: it was called before.
        """
        if not self._claim():
            raise RuntimeError("expected one completion for each function of the engine, got a second")
        self._tell(error)

    def unless_done(self, error: BaseException) -> bool:
        """Complete with an error if nobody has completed yet; returns whether this call did."""
        claimed = self._claim()
        if claimed:
            self._tell(error)
        return claimed

    def _claim(self) -> bool:
        return self._lock.acquire(blocking=False)  # and never released

    def _tell(self, error: BaseException | None) -> None:
        complete = _Complete(self._callback)
        if error is None:
            complete(self._engine, self._block, None)
            return
        memory = ctypes.create_string_buffer(_ERROR_BYTES)
        place = ctypes.addressof(memory)
        _RUNTIME_ERROR(place, text_of(error).encode())
        complete(self._engine, self._block, place)
        _END_RUNTIME_ERROR(place)


Function = Callable[[Completion], None]


class _Call:
    """A function on its way through the engine; the engine holds the one reference to it."""

    def __init__(self, function: Function, skipped: Callable[[], None]) -> None:
        self.function, self.skipped = function, skipped
        self.ran = False


def check_engine() -> None:
    """To be called before the first ``push``.

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


def push(
    function: Function,
    *,
    reads: Sequence[Any] = (),
    writes: Sequence[Any] = (),
    skipped: Callable[[], None] = lambda: None,
    priority: int = 0,
    name: str = "hybridpar",
) -> None:
    """Give MXNet's engine a function. Returns at once. See Note [a function of the engine].

    Args:
        function: is called on a thread of the engine, with the completion that it must see called. It must not wait
            for arrays, and neither must what completes it. If it raises, it is completed with that error.
        reads, writes: NDArrays that it reads, and that it writes; not one in both.
        skipped: called in place of ``function``; Note [skipped functions].
        priority: of functions that can run the highest goes first.
        name: for MXNet's profiler.
    """
    call = ctypes.py_object(_Call(function, skipped))
    ctypes.pythonapi.Py_IncRef(call)  # _delete gives it back
    check_call(
        _KEEPING.MXEnginePushAsyncND(
            _run,
            ctypes.c_void_p(id(call.value)),
            _delete,
            ctypes.byref(_CPU),
            _handles(reads),
            ctypes.c_int(len(reads)),
            _handles(writes),
            ctypes.c_int(len(writes)),
            ctypes.byref(_CPU_PRIORITIZED),
            ctypes.c_int(max(-(1 << 31), min(priority, (1 << 31) - 1))),
            name.encode(),
            ctypes.c_bool(False),
        )
    )


def text_of(error: BaseException) -> str:
    """The text by which MXNet knows the class of an error that it throws; Note [errors through the engine]."""
    if isinstance(error, CommunicationError):
        return f"{_COMMUNICATION_ERROR}: {error}"
    name = type(error).__name__
    return f"{name if type(error) in (ValueError, TypeError) else f'MXNetError: {name}'}: {error}"


class _OnComplete(ctypes.Structure):
    _fields_ = [("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("block", ctypes.c_void_p)]


class _Context(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


def _run_function(_context: int, on_complete: int, parameter: int) -> None:
    if not hasattr(_THREAD, "known"):
        _THREAD.known = ctypes.pythonapi.PyGILState_Ensure()  # and never released
    # It lies on the stack of the caller, so its parts are taken now.
    parts = _OnComplete.from_address(on_complete)
    completion = Completion(parts.callback, parts.engine, parts.block)
    call = _call_at(parameter)
    call.ran = True
    try:
        call.function(completion)
    except BaseException as error:
        if not completion.unless_done(error):
            _LOG.exception("a function of MXNet's engine failed after it had completed")


def _delete_function(parameter: int) -> None:
    call = _call_at(parameter)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(call))
    if not call.ran:
        try:
            call.skipped()
        except BaseException:
            _LOG.exception("a function that MXNet's engine skipped could not say so")


def _call_at(address: int) -> _Call:
    return cast("_Call", ctypes.cast(address, ctypes.py_object).value)


def _handles(arrays: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def _cxx(name: str, *arguments: Any) -> Any:
    """A function of the C++ library that MXNet is linked to."""
    function = _LIB[name]
    function.argtypes, function.restype = arguments, None
    return function


# Note [the interpreter is kept]
_KEEPING = ctypes.PyDLL(_LIB._name, handle=_LIB._handle)
_THREAD = threading.local()
_CPU = _Context(1, 0)
_run, _delete = _Run(_run_function), _Delete(_delete_function)
# Registered names: std::runtime_error(const char*), its destructor, and the class that MXNet makes of our text.
_RUNTIME_ERROR = _cxx("_ZNSt13runtime_errorC1EPKc", ctypes.c_void_p, ctypes.c_char_p)
_END_RUNTIME_ERROR = _cxx("_ZNSt13runtime_errorD1Ev", ctypes.c_void_p)
_COMMUNICATION_ERROR = "hybridpar.CommunicationError"
register_error(_COMMUNICATION_ERROR, StoreError)
