"""Compiles csrc/cuda with NVRTC, as CuPy does at run time, for each architecture. Needs no GPU, only the library.

    python benchmarks/gpu/nvrtc.py

Ends with status 3 where there is no NVRTC (it comes with CUDA builds of torch, or as nvidia-cuda-nvrtc).
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

from hybridpar.kernels import cuda

ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
NO_LIBRARY = 3


def libraries() -> list[str]:
    """Candidates, most specific first: NVIDIA's wheels, then the loader's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    wheels = [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    return [*wheels, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


def loaded() -> ctypes.CDLL | None:
    for name in libraries():
        # The compiler looks for this one by name only, and finds it where it is loaded already.
        for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiled(nvrtc: ctypes.CDLL, name: str, architecture: str) -> tuple[int, str]:
    """(NVRTC's result, 0 if good; what it said)"""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = cuda.source(name).encode()
    if result := nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, f"{name}.cu".encode(), 0, None, None):
        return result, "no program"
    given = [*cuda.OPTIONS, "-ftz=true", f"-arch={architecture}"]  # the second is CuPy's own
    options = (ctypes.c_char_p * len(given))(*map(str.encode, given))
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode()


def main() -> int:
    nvrtc = loaded()
    if nvrtc is None:
        print(f"no NVRTC: looked for {', '.join(libraries())}")
        return NO_LIBRARY
    failed = 0
    for path in sorted((Path(__file__).parents[2] / "csrc" / "cuda").glob("*.cu")):
        for architecture in ARCHITECTURES:
            result, log = compiled(nvrtc, path.stem, architecture)
            print(f"nvrtc {architecture} {path.name}: {'good' if result == 0 else log}")
            failed += result != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
