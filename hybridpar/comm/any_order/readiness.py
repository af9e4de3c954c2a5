"""What is ready everywhere: agreement between ranks whose tensors become ready in any order.

# Note [agreement without a coordinator]
Each rank fills a vector of bytes, one for each tensor: 0 while it has nothing to send, more when it has. One MIN
all-reduce on a lane of its own later, every rank holds the same vector, and what is not 0 there is ready everywhere.
All ranks then send just that, in an order computed from what they agreed on. Nothing else decides: no clock, no
rank's own history. So whoever negotiates late, often, or with less than was expected changes when sets are agreed
and what is in them, but never whether the ranks do the same.

# Note [terms]
Besides being ready, a tensor comes on terms: the operation and the priority. They rarely change, so a byte says only
whether they are (2) or are not (1) those that this rank named for this tensor last time. MIN makes it 1 for all where
it is 1 for one, and then the ranks gather the terms of these tensors: operations must be equal, the highest priority
counts.

# Note [growth]
The first byte is no tensor: it is 1 where the next tensors have been registered, and when it is 1 everywhere all ranks
lengthen the vector. Registration is collective, but the threads that negotiate hear of it at different times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridpar.comm.lanes.lane import Lane, Op

OPS: tuple[Op, ...] = ("sum", "max", "min")
_NEW_TERMS, _KNOWN_TERMS = 1, 2
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Terms:
    """How a tensor is to be sent.

    Attributes:
        op: how the ranks' values are combined.
        priority: of what is agreed together, the highest goes first. Within 64 bits.
    """

    op: Op = "sum"
    priority: int = 0


@dataclass(frozen=True)
class Agreement:
    """What one negotiation found, the same on every rank.

    Attributes:
        indices: the tensors that are ready everywhere, ascending.
        disputes: for those of them that the ranks want combined in different ways: who wants what.
        grown: whether more tensors take part from now on.
    """

    indices: tuple[int, ...]
    disputes: Mapping[int, str] = field(default_factory=dict)
    grown: bool = False


class Readiness:
    """Negotiates on a lane, one thread at a time; every rank makes the same calls.

    Attributes:
        terms: of each tensor, as last agreed.
        edition: how often any of them may have changed.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._growths = 0
        self._vector = torch.zeros(1, dtype=torch.uint8)
        # A tensor that was disputed has no terms that anybody could keep to.
        self._mine: list[Terms | None] = []
        self.terms: list[Terms] = []
        self.edition = 0

    def agree(self, ready: Mapping[int, Terms], registered: Sequence[int]) -> Agreement:
        """Collective: one all-reduce, and a gather where terms have changed. Blocks until every rank has called.

        Args:
            ready: the tensors that this rank could send now.
            registered: how many tensors there were after each registration on this rank. The list only grows, and it
                is the same on all ranks as far as it goes.

        Raises:
            CommunicationError: as the lane does.
        """
        vector, count = self._vector.numpy(), len(self.terms)
        vector.fill(0)
        vector[0] = len(registered) > self._growths
        for index, terms in ready.items():
            if index < count:
                vector[index + 1] = _KNOWN_TERMS if terms == self._mine[index] else _NEW_TERMS
        self._lane.all_reduce(self._vector, "min")
        indices = tuple(np.flatnonzero(vector[1:]).tolist())
        fresh = [index for index in indices if vector[index + 1] == _NEW_TERMS]
        grown = bool(vector[0])
        disputes = self._gather_terms(fresh, ready) if fresh else {}
        if grown:
            self._grow(registered[self._growths])
        return Agreement(indices, disputes, grown)

    def _grow(self, count: int) -> None:
        self._growths += 1
        self._mine += [Terms()] * (count - len(self.terms))
        self.terms += [Terms()] * (count - len(self.terms))
        self._vector = torch.zeros(1 + count, dtype=torch.uint8)

    def _gather_terms(self, indices: Sequence[int], ready: Mapping[int, Terms]) -> dict[int, str]:
        """Note [terms]. Returns the disputes."""
        mine = torch.tensor([[OPS.index(ready[index].op), ready[index].priority] for index in indices])
        everyone = torch.empty(self._lane.size, len(indices), 2, dtype=torch.int64)
        self._lane.all_gather(everyone.unbind(), mine)
        disputes = {}
        self.edition += 1
        for place, index in enumerate(indices):
            codes, priorities = everyone[:, place].T.tolist()
            if len(set(codes)) > 1:
                disputes[index] = _who_wants_what(codes, self._lane.ranks)
                self._mine[index] = None
            else:
                self._mine[index] = ready[index]
                self.terms[index] = Terms(OPS[codes[0]], max(priorities))
        return disputes


def _who_wants_what(codes: Sequence[int], ranks: Sequence[int]) -> str:
    wanted: dict[str, list[int]] = {}
    for code, rank in zip(codes, ranks, strict=True):
        wanted.setdefault(OPS[code], []).append(rank)
    return " and ".join(f"{op} on {name_ranks(found)}" for op, found in wanted.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Forecast:
    """Guesses which set will be agreed next: the one that followed the same two sets last time."""

    def __init__(self) -> None:
        self._recent: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._followers: OrderedDict[tuple[frozenset[int], frozenset[int]], frozenset[int]] = OrderedDict()

    @property
    def expected(self) -> frozenset[int]:
        """Empty where these two sets were never seen before."""
        return self._followers.get(self._recent, frozenset())

    def saw(self, indices: Sequence[int]) -> None:
        """A set was agreed that is not empty."""
        found = frozenset(indices)
        self._followers[self._recent] = found
        self._followers.move_to_end(self._recent)
        if len(self._followers) > _REMEMBERED:
            self._followers.popitem(last=False)
        self._recent = (self._recent[1], found)
