"""The CUDA kernels on this machine's processor: builds cuda_host.cc, which holds csrc/cuda/pack.cu, and launches it."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fsanitize=alignment", "-w"]
_INT, _POINTER = ctypes.c_longlong, ctypes.c_void_p
_PARAMETERS = [_POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _INT, ctypes.c_double, _POINTER]


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled once in each process."""
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        object_file, shared = f"{folder}/host.o", f"{folder}/host.so"
        subprocess.run([compiler, *_FLAGS, "-c", str(_HERE / "cuda_host.cc"), "-o", object_file], check=True)
        # Linked without the sanitizer's library: cuda_host.cc counts what it reports.
        subprocess.run([compiler, "-shared", object_file, "-o", shared], check=True)
        loaded = ctypes.CDLL(shared)
    loaded.run.argtypes = [_POINTER, ctypes.c_uint, ctypes.c_uint, ctypes.c_ulonglong, *_PARAMETERS]
    loaded.run.restype = None
    loaded.find.argtypes = [_POINTER, _INT, _INT, _INT, _POINTER]
    loaded.find.restype = None
    loaded.head_of.argtypes = [_INT, _INT, ctypes.c_int, ctypes.c_int]
    loaded.offset_of.argtypes = [_POINTER, _INT]
    loaded.offset_of.restype = _INT
    loaded.count_misaligned.restype = _INT
    return loaded


@dataclass
class HostLauncher:
    """Launches as ``hybridpar.kernels.cuda.Module`` does, on memory of the host.

    Attributes:
        blocks, threads: the grid, whatever the kernel asks for: any must do. Threads in multiples of 32.
        step: the next thread to run is this many further on.
        launched: the kernels launched so far.
    """

    blocks: int = 3
    threads: int = 64
    step: int = 1

    def __post_init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, kernel: str, warps: int, *arguments: int | float) -> None:
        assert warps > 0
        step = self.step
        while math.gcd(step, self.blocks * self.threads) > 1:
            step += 1
        function = ctypes.cast(getattr(library(), kernel), _POINTER)
        library().run(function, self.blocks, self.threads, step, *arguments)
        self.launched.append(kernel)
        assert library().count_misaligned() == 0
