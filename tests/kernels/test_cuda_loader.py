"""How the CUDA sources are found, compiled and launched, and what happens where they cannot be."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridpar.kernels import cuda, pack_reference

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "csrc" / "cuda").iterdir())
DEVICE = torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["pack", "margin_softmax", "row_update"])
def test_a_source_needs_no_header(name: str) -> None:
    text = cuda.source(name)
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("struct Common {") == text.count("struct alignas(sizeof(Value) * kWidth) Vector {") == 1


def test_a_header_is_written_in_once() -> None:
    text = cuda.source("pack")
    for once in ("struct Table {", "struct Common {", "half_bits_of(float value) {", "void convert_items("):
        assert text.count(once) == 1, once


def test_built_packages_hold_the_sources(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    built = sorted((tmp_path / "hybridpar" / "kernels" / "_cuda").iterdir())
    assert [path.name for path in built] == [path.name for path in FILES]
    assert [path.read_text() for path in built] == [path.read_text() for path in FILES]


class Recorder:
    """A CuPy that notes what it is asked for, and which device and stream were current."""

    def __init__(self, *, version: int, broken: bool = False) -> None:
        self.current: list[object] = []
        self.calls: list[tuple[Any, ...]] = []
        recorder = self

        class Context:
            def __init__(self, name: object) -> None:
                self.name = name

            def __enter__(self) -> None:
                recorder.current.append(self.name)

            def __exit__(self, *error: object) -> None:
                recorder.current.pop()

        class Stream:
            if version >= 14:

                @staticmethod
                def from_external(stream: Any) -> Context:
                    return Context(stream.__cuda_stream__())

        class RawModule:
            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                recorder.calls.append(("RawModule", code, options))

            def compile(self) -> None:
                if broken:
                    raise compiler.CompileException("error: expected a ;")
                recorder.calls.append(("compile", *recorder.current))

            def get_function(self, name: str) -> Any:
                recorder.calls.append(("get_function", name))
                return lambda *arguments: recorder.calls.append((name, *recorder.current, *arguments))

        compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
        self.module = ModuleType("cupy")
        self.module.__dict__.update(__version__=f"{version}.0.0", RawModule=RawModule)
        self.module.__dict__["cuda"] = SimpleNamespace(
            Device=lambda index: Context(("device", index)),
            Stream=Stream,
            ExternalStream=lambda pointer: Context(("external", pointer)),
            compiler=compiler,
        )


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    cuda._found.cache_clear()
    cuda._log_other_device.cache_clear()
    yield
    cuda._found.cache_clear()
    cuda._log_other_device.cache_clear()


@pytest.mark.parametrize(("version", "stream"), [(13, ("external", 71)), (14, (0, 71))])
def test_a_kernel_is_compiled_once_and_launched_on_torchs_stream(
    monkeypatch: pytest.MonkeyPatch, version: int, stream: tuple[object, int]
) -> None:
    recorder = Recorder(version=version)
    monkeypatch.setitem(sys.modules, "cupy", recorder.module)
    module = cuda.find_module("pack", DEVICE)
    assert module is not None
    module.launch("copy_float32", 17, 5, 2.5)
    module.launch("copy_float32", 16, 6)
    assert cuda.find_module("pack", DEVICE) is module
    assert recorder.calls == [
        ("RawModule", cuda.source("pack"), ("-std=c++17", "-fmad=false")),
        ("compile", ("device", 1)),
        ("get_function", "copy_float32"),
        ("copy_float32", ("device", 1), stream, (3,), (256,), (5, 2.5)),
        ("copy_float32", ("device", 1), stream, (2,), (256,), (6,)),
    ]
    assert recorder.current == []


def test_each_device_has_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Recorder(version=14).module)
    assert cuda.find_module("pack", DEVICE) is not cuda.find_module("pack", torch.device("cuda", 0))


@pytest.mark.parametrize("reason", ["missing", "broken"])
def test_why_a_kernel_is_not_used_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None if reason == "missing" else Recorder(version=13, broken=True).module)
    with caplog.at_level(logging.WARNING, "hybridpar"):
        for _ in range(3):
            assert cuda.find_module("pack", DEVICE) is None
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("pack uses its PyTorch reference, which is slower, on cuda:1: ")
    expected = {
        "missing": r"expected CuPy, got none .*; pip install 'hybridpar\[cuda\]'",
        "broken": r"CuPy 13.0.0 could not compile pack.cu: error: expected a ;",
    }
    assert re.search(expected[reason], line)


def test_other_devices_use_the_reference_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hybridpar"):
        for _ in range(3):
            assert cuda.find_for("row_update", torch.empty(1, device="meta")) is None
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "row_update uses its PyTorch reference on meta: compiled kernels serve CPU and CUDA only"


def test_tensors_of_two_devices_are_refused() -> None:
    here, elsewhere = torch.empty(1), torch.empty(1, device="meta")
    cuda.check_one_device(here, None, here)
    with pytest.raises(ValueError, match="expected all tensors on one device, got cpu, meta"):
        cuda.check_one_device(here, None, elsewhere)


def test_a_driver_that_is_too_old_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(version=14)

    class RefusedError(RuntimeError): ...

    def refuse(index: int) -> None:
        raise RefusedError("CUDA driver version is insufficient")

    recorder.module.__dict__["cuda"].Device = refuse
    monkeypatch.setitem(sys.modules, "cupy", recorder.module)
    with pytest.raises(cuda.UnavailableError, match="driver version is insufficient"):
        cuda.Module("pack", DEVICE)


def test_a_count_on_a_device_is_not_read() -> None:
    count = pack_reference._read(torch.zeros((), dtype=torch.int64, device="meta"))
    assert isinstance(count, torch.Tensor)
    assert pack_reference._read(torch.tensor(3)) == 3
