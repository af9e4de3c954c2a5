"""A control group of this benchmark's own, in which programs get so much memory and no more: Linux, as root."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PREFIX = "hybridpar-benchmark-"
# Of the two versions of control groups: the limit on memory, that on memory and swap (2: on swap), and the most seen.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.swap.max", "memory.peak"),
}


class NoControlGroupsError(RuntimeError):
    """Why no limit can be set here."""


class MemoryLimit:
    """A group with a limit.

    Attributes:
        folder: of the group.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self._version = folder, version

    def command(self, command: Sequence[str]) -> list[str]:
        """The same command, as a program of the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    @property
    def peak(self) -> int | None:
        """Bytes that the group had at most, files in memory included; None where the system does not say."""
        file = self.folder / _FILES[self._version][2]
        return int(file.read_text()) if file.exists() else None

    def set(self, limit: int) -> None:
        """Bytes of memory, and no swap."""
        memory, with_swap, _ = _FILES[self._version]
        (self.folder / memory).write_text(str(limit))
        if (self.folder / with_swap).exists():
            (self.folder / with_swap).write_text(str(limit) if self._version == 1 else "0")


@contextlib.contextmanager
def limited_memory(limit: int) -> Iterator[MemoryLimit]:
    """A group, which ends with all that runs in it. What a benchmark that was killed has left is removed first.

    Raises:
        NoControlGroupsError: with the reason.
    """
    parent, version = _parent()
    for old in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
            _end(old)
    folder = parent / f"{_PREFIX}{os.getpid()}"
    try:
        if version == 2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        raise NoControlGroupsError(f"no group can be made in {parent}: {error.strerror}") from error
    try:
        group = MemoryLimit(folder, version)
        try:
            group.set(limit)
        except OSError as error:
            raise NoControlGroupsError(f"no limit can be set in {folder}: {error.strerror}") from error
        yield group
    finally:
        _end(folder)


def _parent() -> tuple[Path, int]:
    """The group of this process, and the version of control groups."""
    try:
        groups = Path("/proc/self/cgroup").read_text()
        mounts = Path("/proc/self/mounts").read_text()
    except OSError as error:
        raise NoControlGroupsError("there are no control groups on this system") from error
    if os.geteuid() != 0:
        raise NoControlGroupsError("only root may set limits")
    first = re.search(r"^\S+ (\S+) cgroup \S*\bmemory\b", mounts, re.MULTILINE)
    name = re.search(r"^\d+:(?:\S*,)?memory(?:,\S*)?:(\S+)$", groups, re.MULTILINE)
    if first and name:
        return _existing(Path(first[1]), name[1]), 1
    second = re.search(r"^\S+ (\S+) cgroup2 ", mounts, re.MULTILINE)
    name = re.search(r"^0::(\S+)$", groups, re.MULTILINE)
    if second and name and "memory" in (Path(second[1]) / "cgroup.controllers").read_text().split():
        return _existing(Path(second[1]), name[1]), 2
    raise NoControlGroupsError("no control group of this system counts memory")


def _existing(mount: Path, name: str) -> Path:
    """A container may see its own group as the root of all."""
    folder = mount / name.removeprefix("/")
    return folder if folder.is_dir() else mount


def _end(folder: Path) -> None:
    """Kill what runs in a group, and remove it."""
    for _ in range(100):
        for process in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:  # those that were killed are not gone yet
            time.sleep(0.1)
        else:
            return
    raise OSError(f"{folder}: expected an empty group after killing what ran in it; remove it by rmdir")
