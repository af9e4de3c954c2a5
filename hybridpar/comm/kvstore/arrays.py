"""Arrays of any library as tensors that share their memory.

# Note [arrays of mxnet]
MXNet runs operators on threads of its own, and an array may still be written by them. A view is of the memory as it is:
whoever takes one has made sure before that the array may be read or written, with ``wait_to_read`` or
``wait_to_write``, or by running as a function of MXNet's engine. mxnet is never imported here: an array of it can only
exist where somebody else has done so.
"""

from __future__ import annotations

import ctypes
import math
import sys
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Library = Literal["torch", "numpy", "cupy", "mxnet"]
Array: TypeAlias = Any  # torch.Tensor, numpy.ndarray, cupy.ndarray, mxnet.nd.NDArray, and what speaks DLPack

_WAY_OUT = "pass a torch tensor, a NumPy or CuPy array, or an MXNet NDArray"
_CPU_KINDS = (1, 3)  # mxnet's device types: cpu, and cpu memory that is pinned


def as_tensor(array: Array, *, write: bool = False) -> Tensor:
    """A tensor over the memory of ``array``: no copy, but of a NumPy array that may not be written.

    Args:
        array: torch.Tensor (dense), numpy.ndarray, cupy.ndarray or anything else with ``__dlpack__``, or a dense MXNet
            NDArray that may be touched now, see Note [arrays of mxnet].
        write: whether the tensor will be written. A read-only NumPy array is refused then, and copied otherwise,
            because torch has no tensors that are read-only.

    Returns:
        A tensor of the same shape, dtype and device that does not require grad. It keeps the memory alive.

    Raises:
        TypeError: ``array`` is no array, is sparse, has a dtype or strides that torch does not know, or may not be
            written but is to be.
    """
    if isinstance(array, Tensor):
        if array.layout is not torch.strided:
            raise TypeError(f"expected a dense array, got a sparse tensor of shape {list(array.shape)}")
        return array.detach()
    if isinstance(array, np.ndarray):
        return _from_numpy(array, write)
    if is_mxnet(array):
        return _from_mxnet(array)
    if hasattr(array, "__dlpack__"):
        try:
            return torch.utils.dlpack.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{type(array).__name__} cannot be viewed as a tensor: {error}; {_WAY_OUT}") from error
    raise TypeError(f"expected an array, got {type(array).__name__}; {_WAY_OUT}")


def is_mxnet(array: Array) -> bool:
    """Whether ``array`` is an NDArray of MXNet, dense or sparse."""
    return not isinstance(array, np.ndarray | Tensor) and any(
        kind.__name__ == "NDArray" and kind.__module__.partition(".")[0] == "mxnet" for kind in type(array).__mro__
    )


def is_array(value: object) -> bool:
    """Whether ``value`` is one array, and not a list of them. Sparse ones count."""
    return isinstance(value, Tensor | np.ndarray) or is_mxnet(value) or hasattr(value, "__dlpack__")


def library_of(array: Array) -> Library:
    """Whose array it is; what only speaks DLPack counts as torch's."""
    if isinstance(array, np.ndarray):
        return "numpy"
    if is_mxnet(array):
        return "mxnet"
    return "cupy" if type(array).__module__.partition(".")[0] == "cupy" else "torch"


def library_array(tensor: Tensor, library: Library) -> Array:
    """An array of another library over the memory of ``tensor``, which must outlive its use there."""
    if library == "torch":
        return tensor
    if library == "numpy":
        return tensor.numpy()
    if library == "cupy":
        return sys.modules["cupy"].from_dlpack(tensor)
    return mxnet_module("mxnet.ndarray").from_dlpack(tensor.__dlpack__())


def wait_to_read(array: Array) -> None:
    """Return when MXNet's pending operators have written ``array``. Arrays of other libraries need no waiting."""
    if is_mxnet(array):
        array.wait_to_read()


def wait_to_write(array: Array) -> None:
    """Return when MXNet's pending operators have read and written ``array``, so that it may be overwritten."""
    if is_mxnet(array):
        base = mxnet_module("mxnet.base")
        base.check_call(base._LIB.MXNDArrayWaitToWrite(array.handle))


def mxnet_module(name: str) -> ModuleType:
    """A module of the mxnet that has been imported elsewhere."""
    return sys.modules[name]


def _from_numpy(array: npt.NDArray[Any], write: bool) -> Tensor:
    if not array.flags.writeable:
        if write:
            raise TypeError(
                f"expected an array that may be written, got a read-only numpy.ndarray of shape {list(array.shape)}; "
                "use .copy()"
            )
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"numpy.ndarray of {array.dtype} with strides {array.strides} cannot be viewed as a tensor: {error}; "
            "use numpy.ascontiguousarray, or cast it"
        ) from error


class _Memory:
    """Memory of another library, for NumPy; it lives as long as the arrays that are made of it."""

    def __init__(self, owner: object, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": dtype.str, "version": 3}


def _from_mxnet(array: Array) -> Tensor:
    if array.stype != "default":
        raise TypeError(f"expected a dense array, got a {array.stype} NDArray of shape {list(array.shape)}")
    if array.context.device_typeid not in _CPU_KINDS:
        return torch.utils.dlpack.from_dlpack(array.to_dlpack_for_write())
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    brain = dtype.names == ("bfloat16",)  # which NumPy does not know, so mxnet names it so
    if brain:
        dtype = np.dtype(np.uint16)
    if math.prod(shape) == 0:
        empty = torch.from_numpy(np.empty(shape, dtype))
        return empty.view(torch.bfloat16) if brain else empty
    base = mxnet_module("mxnet.base")
    pointer = ctypes.c_void_p()
    base.check_call(base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    assert pointer.value is not None
    tensor = torch.from_numpy(np.asarray(_Memory(array, pointer.value, shape, dtype)))
    return tensor.view(torch.bfloat16) if brain else tensor
