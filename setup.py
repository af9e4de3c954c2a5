"""Builds the one compiled module, `hybridpar.kernels._native`, from csrc/. Everything else is in pyproject.toml."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_MODULES = (
    "arrivals", "board", "engine_inbox", "exponents", "initial", "margin_softmax", "pack", "parallel", "reduce",
    "row_update", "sample", "shm", "tensor_reader",
)  # fmt: skip
_HEADERS = (
    "bindings_arrivals", "bindings_head", "check", "clones", "exponent_window", "exponential", "ranges", "row_values",
    "splitmix", "types",
)  # fmt: skip
_SOURCES = ("bindings", "bindings_arrivals", "bindings_head", "row_sgd", "shm_buckets", "shm_parcels")
SOURCES = [f"csrc/{name}.cc" for name in (*_SOURCES, *_MODULES)]
HEADERS = [f"csrc/{name}.h" for name in (*_HEADERS, *_MODULES)]


def native_extension() -> Extension:
    library = Path(nanobind.source_dir())
    return Extension(
        "hybridpar.kernels._native",
        sources=SOURCES,
        depends=HEADERS,
        include_dirs=[nanobind.include_dir(), str(library.parent / "ext" / "robin_map" / "include")],
        define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
        language="c++",
    )


class BuildNative(build_ext):
    """C++17 at -O3 for the baseline of the architecture, with a readable error where no compiler is found."""

    def build_extensions(self) -> None:
        self.require_compiler()
        # -fno-strict-aliasing is what nanobind's library asks for. Without -fno-trapping-math the branch-free half
        # conversions are not vectorised, nor square roots without -fno-math-errno; results are the same, only the
        # floating-point exception flags and errno differ.
        compile_args = ["-std=c++17", "-O3", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off"]
        compile_args += [
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
            "-ffunction-sections",
            "-fdata-sections",
            "-Wall",
            "-Wextra",
        ]
        link_args = [] if sys.platform == "darwin" else ["-Wl,--gc-sections", "-Wl,-s"]
        for extension in self.extensions:
            extension.extra_compile_args += compile_args
            extension.extra_link_args += link_args
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        # nanobind's own library is one more source file. It is named only while it is compiled, because setuptools
        # takes sources for files of this project and refuses those that lie elsewhere.
        own = extension.sources
        extension.sources = [*own, str(Path(nanobind.source_dir()) / "nb_combined.cpp")]
        try:
            super().build_extension(extension)
        finally:
            extension.sources = own

    def require_compiler(self) -> None:
        command = getattr(self.compiler, "compiler_cxx", None) or self.compiler.compiler
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if shutil.which(words[0]) is None:
            raise SystemExit(
                f"hybridpar: expected a C++17 compiler to build its kernels, got no program named {words[0]!r}. "
                "Install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
                "macOS: xcode-select --install; conda: conda install cxx-compiler) or set CXX to yours."
            )


setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildNative})
