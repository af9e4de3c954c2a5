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

# Note [standing aside]
A rank that has nothing more to contribute, while others go on, goes along with whatever they send. It holds the highest
byte for each tensor that it does not submit itself, so that the others alone decide; what is highest everywhere is
nobody's, and not ready. It has no opinion on terms. The second byte is 1 where a rank stands aside. When it is 1
everywhere, all of them return in this same negotiation, whatever else it found, and gather who stood aside last.

# Note [leaving]
A rank that ends takes part in one more negotiation, holding nothing, with 0 in the third byte. So nobody is left behind
in a negotiation that this rank will not come to, and all who were in it know that there will be no other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridpar.comm.lanes.lane import Lane, Op

OPS: tuple[Op, ...] = ("sum", "max", "min")
_NEW_TERMS, _KNOWN_TERMS, _ANY = 1, 2, 255
_GROWS, _ASIDE, _STAYS, _TENSORS = 0, 1, 2, 3  # places in the vector
_NO_OPINION = -1
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
        last: where all ranks stood aside and return: the rank of the lane that came last, of several the highest.
        over: whether a rank leaves, so that this was the last negotiation.
    """

    indices: tuple[int, ...]
    disputes: Mapping[int, str] = field(default_factory=dict)
    grown: bool = False
    last: int | None = None
    over: bool = False


class Readiness:
    """Negotiates on a lane, one thread at a time; every rank makes the same calls.

    Attributes:
        terms: of each tensor, as last agreed.
        edition: how often any of them may have changed.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._growths = 0
        self._negotiations = 0
        self._aside_since: int | None = None
        self._vector = torch.zeros(_TENSORS, dtype=torch.uint8)
        # A tensor that was disputed has no terms that anybody could keep to.
        self._mine: list[Terms | None] = []
        self.terms: list[Terms] = []
        self.edition = 0

    def agree(
        self, ready: Mapping[int, Terms], registered: Sequence[int], *, aside: bool = False, leaving: bool = False
    ) -> Agreement:
        """Collective: one all-reduce, and a gather where terms have changed. Blocks until every rank has called.

        Args:
            ready: the tensors that this rank could send now.
            registered: how many tensors there were after each registration on this rank. The list only grows, and it
                is the same on all ranks as far as it goes.
            aside: whether this rank goes along with what the others hold, see Note [standing aside].
            leaving: whether it ends; then it has nothing ``ready`` and does not stand aside. See Note [leaving].

        Raises:
            CommunicationError: as the lane does.
        """
        vector, count = self._vector.numpy(), len(self.terms)
        vector.fill(_ANY if aside else 0)
        vector[_GROWS], vector[_ASIDE], vector[_STAYS] = len(registered) > self._growths, aside, not leaving
        held, mine = vector[_TENSORS:], self._mine
        for index, terms in ready.items():
            if index < count:
                # They are mostly the same object: to compare that costs much less.
                held[index] = _KNOWN_TERMS if terms is mine[index] or terms == mine[index] else _NEW_TERMS
        self._negotiations += 1
        if aside and self._aside_since is None:
            self._aside_since = self._negotiations
        self._lane.all_reduce(self._vector, "min")
        indices = tuple(np.flatnonzero((held > 0) & (held < _ANY)).tolist())
        fresh = np.flatnonzero(held == _NEW_TERMS).tolist()
        grown = bool(vector[_GROWS])
        disputes = self._gather_terms(fresh, ready) if fresh else {}
        last = self._gather_last() if vector[_ASIDE] else None
        if grown:
            self._grow(registered[self._growths])
        return Agreement(indices, disputes, grown, last, over=not vector[_STAYS])

    def _grow(self, count: int) -> None:
        self._growths += 1
        self._mine += [Terms()] * (count - len(self.terms))
        self.terms += [Terms()] * (count - len(self.terms))
        self._vector = torch.zeros(_TENSORS + count, dtype=torch.uint8)

    def _gather_last(self) -> int:
        """Note [standing aside]."""
        since = torch.empty(self._lane.size, 1, dtype=torch.int64)
        self._lane.all_gather(since.unbind(), torch.tensor([self._aside_since]))
        self._aside_since = None
        latest = since.max()
        return max(rank for rank in range(self._lane.size) if since[rank] == latest)

    def _gather_terms(self, indices: Sequence[int], ready: Mapping[int, Terms]) -> dict[int, str]:
        """Note [terms]. Returns the disputes."""
        wanted = [ready.get(index) for index in indices]
        mine = torch.tensor(
            [[_NO_OPINION, 0] if terms is None else [OPS.index(terms.op), terms.priority] for terms in wanted]
        )
        everyone = torch.empty(self._lane.size, len(indices), 2, dtype=torch.int64)
        self._lane.all_gather(everyone.unbind(), mine)
        disputes = {}
        self.edition += 1
        for place, index in enumerate(indices):
            codes, priorities = everyone[:, place].T.tolist()
            opinions = [pair for pair in zip(codes, priorities, strict=True) if pair[0] != _NO_OPINION]
            if len({code for code, _ in opinions}) > 1:
                disputes[index] = _who_wants_what(codes, self._lane.ranks)
                self._mine[index] = None
            else:
                self._mine[index] = wanted[place]
                self.terms[index] = Terms(OPS[opinions[0][0]], max(priority for _, priority in opinions))
        return disputes


def _who_wants_what(codes: Sequence[int], ranks: Sequence[int]) -> str:
    wanted: dict[str, list[int]] = {}
    for code, rank in zip(codes, ranks, strict=True):
        if code != _NO_OPINION:
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
