"""A pickle reader for plain data: lists, tuples, bytes, text, numbers, booleans and one-dimensional numpy arrays.

A pickle is a program that may call any function by its name. Here every name but the few below is refused, and those
few lead to functions of this module that only make bytes and arrays; no code named by the file is ever imported.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMBER_TYPES = ("b1", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


def load_plain(data: bytes, *, origin: str) -> Any:
    """Read a pickle of plain data, written by Python 2 or 3. numpy arrays come back as `PlainArray`.

    Raises:
        ValueError: a forbidden name (given in the message), or bytes that are no such pickle; names `origin`.
    """
    try:
        # Python 2 wrote its str, which is bytes, so it must not be decoded.
        return _Reader(io.BytesIO(data), origin).load()
    except _ForbiddenNameError:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ValueError(f"{origin}: expected a whole pickle of plain data: {error}") from error


class PlainArray:
    """A numpy array under construction: pickle first makes it, then hands it its state."""

    __slots__ = ("values",)

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, data = state
        self.values = _array(data, dtype, shape)


class _PlainDtype:
    """A number type; the state that numpy adds to it (byte order, fields) must be that of a plain number."""

    __slots__ = ("name",)

    def __init__(self, name: Any) -> None:
        text = (name.decode("ascii") if isinstance(name, bytes) else str(name)).lstrip("<|=")
        if text not in _NUMBER_TYPES:
            raise ValueError(f"expected arrays of {', '.join(_NUMBER_TYPES)}, got another type")
        self.name = text

    def __setstate__(self, state: Any) -> None:
        order, subtype, names, fields = state[1:5]
        if order not in ("<", "|", b"<", b"|") or (subtype, names, fields) != (None, None, None):
            raise ValueError("expected a plain little-endian number type, got another")


class _Ndarray:
    """Stands where a pickle names the array class; it cannot be called."""

    __slots__ = ()


class _Encode:
    """Python 3 writes bytes for Python 2 as Latin-1 text to be encoded."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str | bytes) -> bytes:
        if encoding not in ("latin1", "latin-1", b"latin1") or not isinstance(text, str):
            raise ValueError(f"expected Latin-1 text, got {type(text).__name__}")
        return text.encode("latin-1")


class _Reconstruct:
    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> PlainArray:
        if not isinstance(kind, _Ndarray):
            raise ValueError("expected a numpy array of no subclass")
        return PlainArray(np.zeros(0, dtype=np.uint8))


class _FromBuffer:
    __slots__ = ()

    def __call__(self, data: Any, dtype: Any, shape: Any, order: Any) -> PlainArray:
        return PlainArray(_array(data, dtype, shape))


class _Dtype:
    __slots__ = ()

    def __call__(self, name: Any, align: Any = False, copy: Any = True) -> _PlainDtype:
        return _PlainDtype(name)


class _Scalar:
    __slots__ = ()

    def __call__(self, dtype: Any, data: Any) -> int | bool:
        value: int | bool = _array(data, dtype, (1,))[0].item()
        return value


def _array(data: Any, dtype: Any, shape: Any) -> npt.NDArray[Any]:
    """A one-dimensional array over the given bytes."""
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _PlainDtype):
        raise ValueError(f"expected an array of plain numbers, got {type(data).__name__} of {type(dtype).__name__}")
    values = np.frombuffer(data, dtype=dtype.name)
    if shape not in ((len(values),), (len(values), 1), (1, len(values))):
        raise ValueError(f"expected a one-dimensional array of {len(values)} values, got another shape")
    return values


_ALLOWED: dict[tuple[str, str], object] = {("_codecs", "encode"): _Encode(), ("numpy", "ndarray"): _Ndarray()}
_ALLOWED[("numpy", "dtype")] = _Dtype()
for _module in ("numpy.core", "numpy._core"):
    _ALLOWED[(f"{_module}.multiarray", "_reconstruct")] = _Reconstruct()
    _ALLOWED[(f"{_module}.multiarray", "scalar")] = _Scalar()
    _ALLOWED[(f"{_module}.numeric", "_frombuffer")] = _FromBuffer()


class _ForbiddenNameError(ValueError):
    """Kept apart from the errors of a damaged pickle, so that its message stays."""


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, origin: str) -> None:
        super().__init__(file, encoding="bytes")
        self._origin = origin

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _ForbiddenNameError(
                f"{self._origin}: refused to load {module}.{name}: expected lists, bytes, numbers and booleans alone; "
                f"the file may be hostile, and nothing in it was run"
            )
        return _ALLOWED[(module, name)]
