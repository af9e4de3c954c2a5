"""The CUDA kernels of csrc/cuda: compiled by CuPy (NVRTC) when first needed, launched on torch's current stream.

CuPy is optional (``pip install 'hybridpar[cuda]'``). Where it is missing, or cannot compile, the kernels' doors use
their PyTorch references, and that is logged once with the reason.

The sources lie beside this file, in ``_cuda``: a link to csrc/cuda in a source tree, a copy of it in a wheel.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "_cuda"
_INCLUDE = re.compile(r'^#include "(\w+\.h)"\n', re.MULTILINE)

WARP = 32
WARPS_PER_BLOCK = 8
_MOST_BLOCKS = 2**31 - 1
# Products and sums are rounded one by one, as PyTorch's and the CPU kernels' are: memory is what takes the time.
OPTIONS = ("-std=c++17", "-fmad=false")


class UnavailableError(RuntimeError):
    """A CUDA kernel cannot be used here; the message says why, and what would help."""


class Module:
    """The kernels of one file of csrc/cuda, compiled for one device.

    Args:
        name: of the file, without its ending.
        device: a CUDA device.

    Raises:
        UnavailableError: CuPy is missing or cannot compile the file for this device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UnavailableError(
                f"expected CuPy, got none that can be imported ({error}); pip install 'hybridpar[cuda]'"
            ) from error
        self._cupy = cupy
        self._device = device
        self._functions: dict[str, Any] = {}
        try:
            with cupy.cuda.Device(device.index):
                self._compiled = cupy.RawModule(code=source(name), options=OPTIONS)
                self._compiled.compile()
        except (RuntimeError, ImportError, OSError, cupy.cuda.compiler.CompileException) as error:
            raise UnavailableError(f"CuPy {cupy.__version__} could not compile {name}.cu: {error}") from error

    def launch(self, kernel: str, warps: int, *arguments: int | float) -> None:
        """Start a kernel on torch's current stream of the device, and return at once.

        Args:
            kernel: its name in the file (extern "C").
            warps: how many it needs at least; their number is in gridDim and blockDim.
            arguments: int for a pointer or long long, float for double.
        """
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self._compiled.get_function(kernel)
        blocks = min(-(-warps // WARPS_PER_BLOCK), _MOST_BLOCKS)
        with self._cupy.cuda.Device(self._device.index), self._stream():
            function((blocks,), (WARPS_PER_BLOCK * WARP,), arguments)

    def _stream(self) -> Any:
        pointer = torch.cuda.current_stream(self._device).cuda_stream
        kind = self._cupy.cuda.Stream
        if hasattr(kind, "from_external"):
            return kind.from_external(_Borrowed(pointer))
        return self._cupy.cuda.ExternalStream(pointer)  # CuPy 13; deprecated in 14


class _Borrowed:
    """torch's stream by CUDA's stream protocol, which its own stream objects do not all have."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def find_module(name: str, device: torch.device) -> Module | None:
    """The module ``name`` for a CUDA device, compiled once; None, after one line in the log, if it is unavailable."""
    return _found(name, torch.cuda.current_device() if device.index is None else device.index)


def find_for(name: str, tensor: torch.Tensor) -> Module | None:
    """The module ``name`` for the device of a tensor that is not on the CPU; None, after one line in the log, if there
    is none for this device.
    """
    if tensor.is_cuda:
        return find_module(name, tensor.device)
    _log_other_device(name, tensor.device.type)
    return None


def check_one_device(*tensors: torch.Tensor | None) -> None:
    """A kernel that is given an address of another device's memory takes the whole process down: ValueError instead."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"expected all tensors on one device, got {', '.join(sorted(map(str, devices)))}")


@functools.cache
def _log_other_device(name: str, device: str) -> None:
    _LOG.info("%s uses its PyTorch reference on %s: compiled kernels serve CPU and CUDA only", name, device)


@functools.cache
def _found(name: str, index: int) -> Module | None:
    try:
        return Module(name, torch.device("cuda", index))
    except UnavailableError as error:
        _LOG.warning("%s uses its PyTorch reference, which is slower, on cuda:%d: %s", name, index, error)
        return None


def source(name: str) -> str:
    """``name``.cu with the headers of its folder written in.

    CuPy recognises what it has compiled before by this text alone: a header that it had to read itself could change
    unnoticed.
    """
    written: set[str] = set()

    def expanded(file: str) -> str:
        if file in written:
            return ""
        written.add(file)
        text = (_SOURCES / file).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expanded(match[1]), text)

    return expanded(f"{name}.cu")
