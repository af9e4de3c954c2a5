"""English text that ships inside Python and installed packages: what the docstrings of their source files say."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXTRACTION = 1
"""Number of the rules below; a change of what they yield needs another one, or caches of the old text stay in use."""

# Folders with little prose for their size: tests, generated code, and variants of one model in hundreds of files.
_SKIPPED = frozenset({"test", "tests", "testing", "idle_test", "site-packages", "__pycache__"})
_SKIPPED_OF = {
    "torch": frozenset({"_inductor", "_dynamo", "_refs", "_decomp", "_prims", "_functorch", "include", "lib", "share"}),
    "transformers": frozenset({"models"}),
}
_DISTRIBUTIONS = {
    "numpy": "numpy",
    "torch": "torch",
    "sympy": "sympy",
    "networkx": "networkx",
    "transformers": "transformers",
    "huggingface_hub": "huggingface_hub",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
}

_FEWEST_WORDS = 6
_LETTERS = 0.88
_COMMON_WORDS = frozenset(
    (
        "a",
        "an",
        "and",
        "are",
        "as",
        "be",
        "by",
        "for",
        "if",
        "in",
        "is",
        "it",
        "of",
        "on",
        "or",
        "that",
        "the",
        "this",
        "to",
        "with",
    )
)
# A comment, a triple-quoted string, or another string, whichever comes first: quotes in one do not open another.
_LITERAL = re.compile(
    r"""\#[^\n]*+
    |(?P<quote>\"{3}|'{3})(?P<content>(?:[^\\"']++|\\.|(?!(?P=quote))["'])*+)(?P=quote)
    |"(?:[^"\\\n]++|\\.)*+"
    |'(?:[^'\\\n]++|\\.)*+'""",
    re.DOTALL | re.VERBOSE,
)
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")
_NOT_LETTERS = re.compile(r"[^A-Za-z ]+")


@dataclass(frozen=True)
class TextSource:
    """A folder of Python sources, of the standard library or of one installed package."""

    name: str
    version: str
    folder: Path


def find_sources() -> tuple[TextSource, ...]:
    """The standard library, and those of the packages above that are installed; none of them is imported."""
    found = [TextSource("Python", platform.python_version(), Path(sysconfig.get_paths()["stdlib"]))]
    for package, distribution in _DISTRIBUTIONS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            version = importlib.metadata.version(distribution)
            found.append(TextSource(package, version, Path(spec.submodule_search_locations[0])))
    return tuple(found)


def read_prose(sources: tuple[TextSource, ...]) -> list[str]:
    """What the sources say in sentences: one document for each file that says anything, paragraphs on lines.

    A paragraph that came before, in any file, is left out: no document repeats another one.
    """
    seen: set[str] = set()
    documents = []
    for source in sources:
        for path in _python_files(source):
            paragraphs = []
            for paragraph in _paragraphs(path):
                if paragraph not in seen:
                    seen.add(paragraph)
                    paragraphs.append(paragraph)
            if paragraphs:
                documents.append("\n".join(paragraphs))
    return documents


def _python_files(source: TextSource) -> list[Path]:
    skipped = _SKIPPED | _SKIPPED_OF.get(source.name, frozenset())
    return sorted(
        path for path in source.folder.rglob("*.py") if skipped.isdisjoint(path.relative_to(source.folder).parts)
    )


def _paragraphs(path: Path) -> Iterator[str]:
    for text in _help_topics(path) if path.parent.name == "pydoc_data" else _long_strings(path):
        for block in _blocks(text):
            if paragraph := _as_prose(block):
                yield paragraph


def _long_strings(path: Path) -> Iterator[str]:
    """The contents of triple-quoted strings, as they are written.

    They are docstrings for the most part; what else there is, such as templates, is rarely prose. Finding them by
    their quotes takes a fifth of the time that building syntax trees of some 70 MB of sources takes, and it works on
    sources for any version of Python.
    """
    for match in _LITERAL.finditer(path.read_text("utf-8", "replace")):
        if (content := match["content"]) is not None:
            yield content.replace("\\\n", "")


def _help_topics(path: Path) -> Iterator[str]:
    """The values of the dictionary with the texts of `help()`: strings in many short pieces."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _blocks(text: str) -> Iterator[str]:
    """Runs of lines of one indentation with no blank line between, each joined to one line."""
    block: list[str] = []
    indent = -1
    for line in text.splitlines():
        stripped = line.lstrip()
        own_indent = len(line) - len(stripped)
        if block and (not stripped or own_indent != indent):
            yield " ".join(block)
            block = []
        if stripped:
            block.append(stripped.rstrip())
        indent = own_indent
    if block:
        yield " ".join(block)


def _as_prose(block: str) -> str:
    """The block without markup if it looks like English sentences, else nothing."""
    if block[-1] not in ".!?:" or block.startswith((">>>", "..", "|", "#")):
        return ""
    words = block.split()
    if len(words) < _FEWEST_WORDS or len(_COMMON_WORDS.intersection(map(str.lower, words))) < 2:
        return ""
    text = _ROLE.sub(r"\1", block).replace("`", "").lstrip("-* ")
    return text if len(_NOT_LETTERS.sub("", text)) >= _LETTERS * len(text) else ""
