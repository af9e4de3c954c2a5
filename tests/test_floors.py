"""Imports point down only, and each place keeps to what it may know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the top. A floor is a list of columns; a module may import its own column and everything on lower floors.
# A name stands for the module and, where no longer name is listed, for all modules below it.
FLOORS: list[list[list[str]]] = [
    [["hybridpar", "hybridpar.cli", "hybridpar.__main__"]],
    [
        ["hybridpar.checkpoint"],
        ["hybridpar.engine_report"],
        ["hybridpar.estimate"],
        ["hybridpar.parallelize"],
        ["hybridpar.grad_norm"],
        ["hybridpar.lamb"],
        ["hybridpar.kvstore"],
        ["hybridpar.mxnet"],
        ["hybridpar.horovod"],
    ],
    [
        ["hybridpar.data_parallel", "hybridpar.bucket_optimizer", "hybridpar.gradient_hooks", "hybridpar.kept_sums"],
        ["hybridpar.sync_batch_norm"],
        ["hybridpar.global_order"],
        ["hybridpar.head"],
    ],
    [["hybridpar.comm"], ["hybridpar.partition"]],
    [
        [
            "hybridpar.comm.agreement",
            "hybridpar.comm.buckets",
            "hybridpar.comm.coalesce",
            "hybridpar.comm.engine.wire",
            "hybridpar.comm.functional",
            "hybridpar.comm.group",
            "hybridpar.comm.lanes",
            "hybridpar.comm.start",
            "hybridpar.comm.worker",
        ],
        ["hybridpar.kernels"],
    ],
    [["hybridpar.comm.errors"]],
    # The compiled module is csrc/, which the lanes of shared memory need as much as the kernels' doors.
    [["hybridpar.topology"], ["hybridpar.kernels._native"]],
]
PLACES = {
    name: (floor, column)
    for floor, columns in enumerate(FLOORS)
    for column, names in enumerate(columns)
    for name in names
}


def modules(root: Path, package: str) -> dict[str, Path]:
    """Dotted names of all modules of a package and their files."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str], module: str) -> Iterator[tuple[str, int]]:
    """Every imported module, wherever in the file, with its line; `from package import name` may mean a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in known else base), node.lineno


def place(module: str) -> tuple[int, int] | None:
    """(floor, column) of the longest listed name that the module is or lies below; the root stands for itself only."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[:length])
        if name in PLACES:
            return PLACES[name]
    return PLACES.get(module)


def upward(root: Path) -> list[str]:
    """Every import in hybridpar that does not point down, as text."""
    files = modules(root, "hybridpar")
    wrong = []
    for module, path in files.items():
        here = place(module)
        if here is None:
            wrong.append(f"{module} has no floor: give it one in tests/test_floors.py")
            continue
        for imported, line in imports(path, set(files), module):
            if imported.split(".")[0] == "recipes":
                wrong.append(f"{path.relative_to(root)}:{line} imports {imported}")
            if imported.split(".")[0] != "hybridpar" or imported == module:
                continue
            there = place(imported)
            if there is None or not (there[0] > here[0] or there == here):
                wrong.append(f"{path.relative_to(root)}:{line} imports {imported}")
    return wrong


def environment_readers(root: Path) -> list[str]:
    """The modules of hybridpar that touch the environment."""
    readers = []
    for path in modules(root, "hybridpar").values():
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
            taken = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in {"environ", "environb", "getenv"} for alias in node.names)
            )
            if named or taken:
                readers.append(path.relative_to(root).as_posix())
    return sorted(set(readers))


def test_imports_point_down_only() -> None:
    assert upward(ROOT) == []


def test_topology_alone_reads_the_environment() -> None:
    assert environment_readers(ROOT) == ["hybridpar/topology.py"]


def test_csrc_includes_no_header_of_a_framework() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}]
    assert sources
    wrong = [
        f"{path.name}: {header}"
        for path in sources
        for header in re.findall(r"#\s*include\s*[<\"]([^>\"]+)", path.read_text())
        if re.match(r"(torch|ATen|c10|mxnet|numpy|arrayobject|tensorflow)", header)
    ]
    assert wrong == []


def test_only_the_bindings_know_python() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in {".h", ".cc", ".cu"} and not path.name.startswith("bindings"):
            assert not re.search(r"#\s*include\s*[<\"](nanobind|Python\.h|pybind)", path.read_text()), path.name


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("kernels/fast.py", "from hybridpar.comm.group import Group", True),
        ("comm/lanes.py", "from hybridpar.kernels import pack", True),
        ("comm/engine.py", "from hybridpar.kernels import pack", False),
        ("comm/errors.py", "from hybridpar.comm import group", True),
        ("comm/lanes.py", "from . import errors", False),
        ("comm/lanes.py", "from . import engine", True),
        ("comm/lanes.py", "from .engine import Engine", True),
        ("comm/lanes.py", "def later():\n    import hybridpar.head", True),
        ("comm/lanes.py", "import hybridpar", True),
        ("head/softmax.py", "from hybridpar import checkpoint", True),
        ("head/softmax.py", "from hybridpar.head import margins", False),
        ("head/softmax.py", "from hybridpar.data_parallel import DataParallel", True),
        ("data_parallel.py", "from hybridpar.comm.engine.engine import Engine", False),
        ("checkpoint.py", "from hybridpar.head import classifier", False),
        ("checkpoint.py", "import recipes.insightface", True),
        ("surprise.py", "", True),
        ("topology.py", "from hybridpar.comm.errors import CommunicationError", True),
    ],
)
def test_the_rule_sees_an_import(tmp_path: Path, file: str, text: str, wrong: bool) -> None:
    for name in ("", "comm/", "head/", "kernels/"):
        (tmp_path / "hybridpar" / name).mkdir(exist_ok=True)
        (tmp_path / "hybridpar" / name / "__init__.py").touch()
    for name in ("comm/group", "comm/lanes", "comm/errors", "comm/engine", "head/margins", "checkpoint"):
        (tmp_path / "hybridpar" / f"{name}.py").touch()
    (tmp_path / "hybridpar" / file).write_text(text)
    assert bool(upward(tmp_path)) == wrong


@pytest.mark.parametrize(
    "text", ["import os\nx = os.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"]
)
def test_a_second_reader_of_the_environment_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "hybridpar").mkdir()
    (tmp_path / "hybridpar" / "other.py").write_text(text)
    assert environment_readers(tmp_path) == ["hybridpar/other.py"]
