"""Who has asked for what: the same on every rank, because all ranks put the same messages into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridpar.comm.any_order.readiness import name_ranks
from hybridpar.comm.horovod.request import Request


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank asks for under a name."""

    request: Request
    own: list[int] = field(default_factory=list)
    problem: str = ""

    def values(self) -> list[Any]:
        """As JSON carries it."""
        return [self.request.values(), self.own, self.problem]

    @classmethod
    def read(cls, values: Sequence[Any]) -> Entry:
        """The inverse of ``values``."""
        request, own, problem = values
        return cls(Request.read(request), own, problem)


@dataclass(frozen=True)
class Message:
    """What one rank says in a round.

    Attributes:
        joined: whether it has joined, and goes along with whatever the others ask for.
        news: what it asks for, by name, and has not said before.
        waits: what it has given to the engine, and waits for so long that perhaps another rank asks for something else.
    """

    joined: bool
    news: Mapping[str, Entry]
    waits: Mapping[str, Request]

    def values(self) -> Any:
        """As JSON carries it."""
        news = {name: entry.values() for name, entry in self.news.items()}
        return [self.joined, news, {name: request.values() for name, request in self.waits.items()}]

    @classmethod
    def read(cls, values: Any) -> Message:
        """The inverse of ``values``."""
        joined, news, waits = values
        return cls(
            joined,
            {name: Entry.read(entry) for name, entry in news.items()},
            {name: Request.read(request) for name, request in waits.items()},
        )


@dataclass(frozen=True)
class Verdict:
    """A name of which all ranks have spoken.

    Attributes:
        entries: by rank; ranks that have joined or wait for the engine have none.
        waits: what ranks have given to the engine under this name.
        problem: why it cannot be done; empty where it can.
    """

    name: str
    entries: Mapping[int, Entry]
    waits: Mapping[int, Request]
    problem: str

    @property
    def request(self) -> Request:
        """Of any rank: they are equal where there is no problem."""
        return next(iter(self.entries.values())).request


class Table:
    """Names that some ranks have asked for and others have not."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks  # numbers in the job, for messages
        self._size = len(ranks)
        self._asked: dict[str, dict[int, Entry]] = {}

    def absorb(self, messages: Sequence[Message]) -> list[Verdict]:
        """One round: a message of each rank, in rank order.

        Returns:
            What is complete now, in an order that is the same on all ranks.
        """
        for rank, message in enumerate(messages):
            for name, entry in message.news.items():
                self._asked.setdefault(name, {})[rank] = entry
        joined = [rank for rank, message in enumerate(messages) if message.joined]
        verdicts = []
        for name, entries in list(self._asked.items()):
            waits = {
                rank: message.waits[name]
                for rank, message in enumerate(messages)
                if name in message.waits and rank not in entries
            }
            if len(entries.keys() | waits.keys() | set(joined)) == self._size:
                del self._asked[name]
                problem = self._problem(entries, waits, [rank for rank in joined if rank not in entries])
                verdicts.append(Verdict(name, entries, waits, problem))
        return verdicts

    def who(self, name: str) -> str:
        """Who has asked for it and who has not, as text; empty where nobody has."""
        have = self._asked.get(name)
        if not have:
            return ""
        lack = [self._ranks[rank] for rank in range(self._size) if rank not in have]
        return f"asked for by {name_ranks([self._ranks[rank] for rank in sorted(have)])}, not by {name_ranks(lack)}"

    def _problem(self, entries: Mapping[int, Entry], waits: Mapping[int, Request], joined: Sequence[int]) -> str:
        for rank, entry in sorted(entries.items()):
            if entry.problem:
                return f"rank {self._ranks[rank]}: {entry.problem}"
        requests = {rank: entry.request for rank, entry in entries.items()} | dict(waits)
        sides: dict[Request, list[int]] = {}
        for rank in sorted(requests):
            sides.setdefault(requests[rank], []).append(self._ranks[rank])
        if len(sides) > 1:
            held = [request.detail.split("; ") if request.detail and request.dtype else [] for request in sides]
            parts = _first_differing(held)
            wanted = "; ".join(
                f"{request}{part} on {name_ranks(ranks)}"
                for (request, ranks), part in zip(sides.items(), parts, strict=True)
            )
            return f"the ranks asked for different things under this name: {wanted}"
        assert not waits, "a registered request goes to the engine on all ranks"
        (request,) = sides
        if joined and request.kind not in ("allreduce", "barrier"):
            gone = name_ranks([self._ranks[rank] for rank in joined])
            return (
                f"{request.kind} needs all ranks, but {gone} joined; call it before any rank joins or after all have, "
                "or make gradients dense (sparse_as_dense=True)"
            )
        return ""


def _first_differing(details: Sequence[Sequence[str]]) -> list[str]:
    """Of what is in tensors: the first part that is not everywhere the same, as text for each; else nothing."""
    for place in range(max(map(len, details), default=0)):
        parts = [detail[place] if place < len(detail) else "nothing" for detail in details]
        if len(set(parts)) > 1:
            return [f" holding {part} at place {place}" for part in parts]
    return [""] * len(details)
