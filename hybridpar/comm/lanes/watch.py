"""The watch: tells which ranks are gone, and what those that live are doing. Used only once something has gone wrong.

# Note [who is gone]
Every process listens on a socket of its own, for nothing but this. A library that loses a peer says at best "connection
closed", and often on a rank that only heard of it from another. So whoever fails asks all members: where the process
has ended, the system refuses the connection at once; where it stands still, nobody answers; where it lives, it says
what it is doing. Nothing is sent while all goes well.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hybridpar.topology import host_identity

Status = Callable[[], Any]
# A host that answers no connection at all, and a process that accepts one and says nothing.
_ANSWER_SECONDS = 1.5
_LIMIT = 1 << 20
_ASKERS = 64
_LOOPBACK = "127.0.0.1"
# What accept() says of a socket that was shut down or closed.
_CLOSED = {errno.EINVAL, errno.EBADF, errno.ENOTSOCK}


@dataclass(frozen=True)
class Found:
    """What a rank answered, or what is wrong with it.

    Attributes:
        answer: what it is doing, by key; None if it did not answer.
        problem: says so, where something is wrong with it; empty for one that lives, or that nobody can ask.
        ended: whether its process is known to have ended.
    """

    answer: Any = None
    problem: str = ""
    ended: bool = False


class Watch:
    """Answers for this process, on a thread of its own, and asks after the others.

    Args:
        rank: number of this rank in the job.
        ranks: numbers of all ranks that it can be asked about.
        exchange: collective; gives the values of ``ranks``, in that order.
        hint: an address of another host, by which to find the interface that leads there.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], exchange: Callable[[Any], Sequence[Any]], hint: str | None = None
    ) -> None:
        self.rank = rank
        self._statuses: dict[str, Status] = {}
        listener = _listener()
        token = secrets.token_hex(16)
        self._host = host_identity()
        place = {
            "host": self._host, "addresses": _own_addresses(hint), "port": listener.getsockname()[1], "token": token,
            "name": f"process {os.getpid()} on {socket.gethostname()}",
        }  # fmt: skip
        # The thread holds what it needs, not the watch, so that an abandoned watch is collected and its port closed.
        threading.Thread(
            target=_answer, args=(listener, token, self._statuses), name="hybridpar-watch", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, _close, listener, os.getpid())
        self._places: dict[int, dict[str, Any]] = dict(zip(ranks, exchange(place), strict=True))

    def set_status(self, key: str, status: Status | None) -> None:
        """From now on this process answers, under ``key``, what ``status()`` gives: any value that JSON can carry."""
        if status is None:
            self._statuses.pop(key, None)
        else:
            self._statuses[key] = status

    def survey(self, ranks: Sequence[int]) -> dict[int, Found]:
        """How each of ``ranks`` is, this one left out. Takes seconds at most, more only for hundreds of silent ones."""
        others = [rank for rank in ranks if rank != self.rank]
        if not others:
            return {}
        try:
            with ThreadPoolExecutor(min(_ASKERS, len(others))) as pool:
                return dict(zip(others, pool.map(self._ask_one, others), strict=True))
        except RuntimeError:  # the interpreter is going down, and gives no threads any more
            return {rank: self._ask_one(rank) for rank in others}

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
        """What each rank says it is doing, by key; None for one that does not answer."""
        return {rank: found.answer for rank, found in self.survey(ranks).items()}

    def gone(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of ``ranks`` that have ended or do not answer, and what is known of each."""
        return {rank: found.problem for rank, found in self.survey(ranks).items() if found.problem}

    def ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of ``ranks`` whose processes are known to have ended. One that only stands still may be busy."""
        return {rank: found.problem for rank, found in self.survey(ranks).items() if found.ended}

    def close(self) -> None:
        """Stop answering: for the others this rank is gone."""
        self._finalizer()

    def _ask_one(self, rank: int) -> Found:
        place = self._places[rank]
        addresses = [_LOOPBACK] if place["host"] == self._host else place["addresses"]
        if not addresses:
            return Found()  # its host did not know how others reach it
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            refusals = 0
            for address in addresses:
                try:
                    return Found(_converse(address, place["port"], place["token"], deadline - time.monotonic()))
                except ConnectionRefusedError:
                    refusals += 1
                except (OSError, ValueError):
                    pass  # another address may lead there; what is wrong is said below
            # A process that is just ending may still accept a connection, and then drop it.
            ended = refusals == len(addresses)
            if ended or time.monotonic() > deadline:
                what = "has ended" if ended else f"has not answered for {_ANSWER_SECONDS:g} s"
                return Found(problem=f"rank {rank} ({place['name']}) {what}", ended=ended)
            time.sleep(0.05)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=256)


def _own_addresses(hint: str | None) -> list[str]:
    """Addresses by which ranks of other hosts may reach this process, the most likely first."""
    found: dict[str, None] = {}
    for way in _resolved(hint) if hint is not None else []:
        family = socket.AF_INET6 if ":" in way else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((way, 9))  # sends nothing: the system only chooses the way
                found[probe.getsockname()[0]] = None
            except OSError:
                continue
    found |= dict.fromkeys(_resolved(socket.gethostname()))
    return [address for address in found if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return parsed.is_loopback or (mapped is not None and mapped.is_loopback)


def _resolved(name: str) -> list[str]:
    try:
        return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _close(listener: socket.socket, process: int) -> None:
    if os.getpid() == process:  # what a forked child shuts down is shut for its parent, too
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
    listener.close()


def _converse(address: str, port: int, token: str, seconds: float) -> Any:
    with socket.create_connection((address, port), timeout=max(0.05, seconds)) as connection:
        connection.sendall(f"{token}\n".encode())
        with connection.makefile("rb") as answer:
            line = answer.readline(_LIMIT)
    if not line.endswith(b"\n"):
        raise ConnectionError("the answer broke off")
    return json.loads(line)


def _answer(listener: socket.socket, token: str, statuses: dict[str, Status]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            time.sleep(0.1)  # no file descriptor is free: there will be one again
            continue
        # A thread for each, so that a stranger who says nothing keeps nobody waiting.
        try:
            threading.Thread(target=_answer_one, args=(connection, token, statuses), daemon=True).start()
        except RuntimeError:  # no thread is free
            connection.close()


def _answer_one(connection: socket.socket, token: str, statuses: dict[str, Status]) -> None:
    with connection:
        try:
            connection.settimeout(_ANSWER_SECONDS)
            with connection.makefile("rb") as question:
                if question.readline(len(token) + 1).decode() == f"{token}\n":
                    connection.sendall(json.dumps(_status(statuses), default=str).encode() + b"\n")
        except (OSError, UnicodeDecodeError):
            pass  # a stranger, or one who did not wait


def _status(statuses: dict[str, Status]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, status in list(statuses.items()):
        try:
            found[key] = status()
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"
    return found
