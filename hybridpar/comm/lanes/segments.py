"""Segments: memory that the ranks of one host share, files of /dev/shm that exist only while ranks are mapping them.

# Note [segments leave nothing behind]
Rank 0 makes the file and removes it as soon as every rank has mapped it; the memory then lives exactly as long as a
process has it mapped, whatever ends that process. Only ranks killed in between leave a file. Its name says which
process made it, so the next rank 0 that makes a segment knows that it is stale, and removes it.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hybridpar.kernels._native as _native
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.values import gather_json

_LOG = logging.getLogger(__name__)
FOLDER = Path("/dev/shm")
# user, pid namespace, process, its start time, random
_NAME = re.compile(r"hybridpar-(\d+)-(\d+)-(\d+)-(-?\d+)-[0-9a-f]{16}")


def share(lane: Lane, size: int, folder: Path = FOLDER) -> mmap.mmap:
    """Collective: a new segment of ``size`` bytes, zeros, mapped by every rank of the lane. All are on one host.

    Raises:
        OSError: there is no shared memory, or not enough of it (on every rank).
    """
    path = _new_path(folder) if lane.rank == 0 else None
    with _removed_at_the_end(path):
        problem = None if path is None else _tried(lambda: _make(path, size))
        place, problem = gather_json(lane, [None if path is None else str(path), problem])[0]
        if problem is not None:
            raise OSError(problem)
        mapping: mmap.mmap | None = None

        def attach() -> None:
            nonlocal mapping
            mapping = _map(Path(place), size)

        problems = gather_json(lane, _tried(attach))
    for rank, found in enumerate(problems):
        if found is not None:
            raise OSError(f"rank {rank}: {found}")
    assert mapping is not None
    return mapping


def free_bytes(folder: Path) -> int:
    """What the file system of ``folder`` can still take."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_stale(folder: Path = FOLDER) -> list[Path]:
    """Remove this user's segments whose maker is gone; returns their paths."""
    removed = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        user, namespace, process, start = map(int, match.groups())
        # A process of another pid namespace cannot be looked up here; its segments are its own business.
        if user != os.getuid() or namespace != _pid_namespace():
            continue
        found = _native.process_start(process)
        if found == 0 or (found > 0 and start > 0 and found != start):
            _LOG.info("removed %s, which process %d left when it was killed", path, process)
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _new_path(folder: Path) -> Path:
    own = os.getpid()
    parts = (os.getuid(), _pid_namespace(), own, _native.process_start(own), secrets.token_hex(8))
    return folder / "-".join(["hybridpar", *map(str, parts)])


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


@contextmanager
def _removed_at_the_end(path: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _tried(work: Callable[[], None]) -> str | None:
    """What went wrong, as text for the other ranks."""
    try:
        work()
    except OSError as error:
        return str(error)
    return None


def _make(path: Path, size: int) -> None:
    """A file of zeros whose memory is already taken, so that no later write can fail (SIGBUS)."""
    folder = path.parent
    if not folder.is_dir():
        raise OSError(f"expected shared memory at {folder}, got no such folder; mount a tmpfs there")
    remove_stale(folder)
    free = free_bytes(folder)
    if size > free:
        raise OSError(_too_small(folder, size, free))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise OSError(f"{_too_small(folder, size, free)} ({error.strerror})") from error
    finally:
        os.close(descriptor)


def _too_small(folder: Path, size: int, free: int) -> str:
    return (
        f"expected {size:,} free bytes in {folder}, got {free:,}; enlarge it (mount -o remount,size=... {folder}, or "
        "docker run --shm-size=...), or use hp.init(shared_memory=False)"
    )


def _map(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return mapping
