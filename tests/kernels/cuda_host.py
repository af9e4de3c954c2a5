"""The CUDA kernels on this machine's processor: builds cuda_host*.cc, which hold csrc/cuda/*.cu, and launches them."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fsanitize=alignment", "-w"]
_INT, _POINTER = ctypes.c_longlong, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled once in each process."""
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        objects = [f"{folder}/{path.stem}.o" for path in sorted(_HERE.glob("cuda_host*.cc"))]
        commands = [[compiler, *_FLAGS, "-c", str(_HERE / f"{Path(file).stem}.cc"), "-o", file] for file in objects]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(functools.partial(subprocess.run, check=True), commands))
        # Linked without the sanitizer's library: cuda_host.cc counts what it reports.
        subprocess.run([compiler, "-shared", *objects, "-o", f"{folder}/host.so"], check=True)
        loaded = ctypes.CDLL(f"{folder}/host.so")
    loaded.find.argtypes = [_POINTER, _INT, _INT, _INT, _POINTER]
    loaded.find.restype = None
    loaded.head_of.argtypes = [_INT, _INT, ctypes.c_int, ctypes.c_int]
    loaded.offset_of.argtypes = [_POINTER, _INT]
    loaded.offset_of.restype = _INT
    loaded.count_misaligned.restype = loaded.take_stuck.restype = _INT
    return loaded


@dataclass
class HostLauncher:
    """Launches as ``hybridpar.kernels.cuda.Module`` does, on memory of the host.

    Attributes:
        blocks, threads: the grid, whatever the kernel asks for: any must do. Threads in multiples of 32, up to 256.
        step: the next thread to run is this many further on.
        source: whose kernels, as in csrc/cuda/<source>.cu.
        launched: the kernels launched so far.
    """

    blocks: int = 3
    threads: int = 64
    step: int = 1
    source: str = "pack"

    def __post_init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, kernel: str, warps: int, *arguments: int | float) -> None:
        assert warps > 0
        step = self.step
        while math.gcd(step, self.blocks * self.threads) > 1:
            step += 1
        # As CuPy takes them: an int is a pointer or a long long, a float a double.
        assert all(-(2**63) <= value < 2**63 for value in arguments if isinstance(value, int)), arguments
        given = [ctypes.c_double(value) if isinstance(value, float) else _INT(value) for value in arguments]
        function = ctypes.cast(getattr(library(), kernel), _POINTER)
        run = getattr(library(), f"run_{self.source}")
        run(function, ctypes.c_uint(self.blocks), ctypes.c_uint(self.threads), ctypes.c_ulonglong(step), *given)
        self.launched.append(kernel)
        assert library().count_misaligned() == 0
        assert library().take_stuck() == 0
