"""Parcels: what the ranks of one host send to those of another, and how it gets there.

# Note [parcels between hosts]
What goes to the ranks of another host is collected by the carrier that answers for the sender (Note [layers]), crosses
the network to the carrier with the same local rank, and is handed there to the receivers. So every byte crosses once,
on the connections of the carriers, in one message for each pair of hosts and carrier in place of one for each pair of
ranks. Only sender and receiver know how much it is, so the carriers exchange that first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.memory import joined


class Parcels:
    """The part of a ``HierarchicalLane`` that exchanges bytes between ranks of different hosts.

    Args:
        local, cross, hosts: of the ``HierarchicalLane``.
        here: number of this rank's host.
    """

    def __init__(self, local: Lane, cross: Lane | None, hosts: Sequence[Sequence[int]], here: int) -> None:
        self._local, self._cross, self._hosts, self._here = local, cross, hosts, here
        self._home = hosts[here]
        self._carriers = min(map(len, hosts))
        self._others = [number for number in range(len(hosts)) if number != here]
        self._away = [rank for number in self._others for rank in hosts[number]]

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Collective. uint8 vectors to and from each rank; those of the own host are left alone."""
        rows = self._collect(inputs)
        arrived = {} if self._cross is None else self._carry(rows, self._cross)
        nothing = inputs[0].new_empty(0)
        for number in self._others:
            host = self._hosts[number]
            for first in range(0, len(host), self._carriers):
                layer = [outputs[rank] for rank in host[first : first + self._carriers]]
                handed = arrived.get((number, first + self._local.rank), [nothing] * len(self._home))
                self._local.all_to_all(layer + [nothing] * (len(self._home) - len(layer)), handed)

    def _collect(self, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each rank for which this one answers sends to each rank: itself first, and nobody if it is no carrier.

        Only ``_away`` has a meaning in it.
        """
        if len(self._home) == self._carriers:
            return [list(inputs)]
        sizes = torch.empty(len(self._home), len(inputs), dtype=torch.int64)
        self._local.all_gather(sizes.unbind(), torch.tensor([part.numel() for part in inputs]))
        nothing, place = inputs[0].new_empty(0), self._local.rank
        given, taken = [nothing] * len(self._home), [nothing] * len(self._home)
        answered: Sequence[int] = ()
        if place < self._carriers:
            answered = range(place + self._carriers, len(self._home), self._carriers)
        else:
            given[place % self._carriers] = joined([inputs[rank] for rank in self._away])
        counts = {mate: [int(sizes[mate, rank]) for rank in self._away] for mate in answered}
        for mate in answered:
            taken[mate] = inputs[0].new_empty(sum(counts[mate]))
        self._local.all_to_all(taken, given)
        rows = [list(inputs)] if place < self._carriers else []
        for mate in answered:
            row = [nothing] * len(inputs)
            for rank, part in zip(self._away, taken[mate].split(counts[mate]), strict=True):
                row[rank] = part
            rows.append(row)
        return rows

    def _carry(self, rows: Sequence[Sequence[Tensor]], cross: Lane) -> dict[tuple[int, int], list[Tensor]]:
        """Collective over the carriers of one local rank. By host and place of the sender: what is for each mate."""
        nothing = rows[0][0].new_empty(0)
        none = torch.empty(0, dtype=torch.int64)
        sizes, sent = [none] * len(self._hosts), [nothing] * len(self._hosts)
        theirs, taken = list(sizes), list(sent)
        for number in self._others:
            parts = [row[rank] for row in rows for rank in self._hosts[number]]
            sizes[number] = torch.tensor([part.numel() for part in parts])
            sent[number] = joined(parts)
            theirs[number] = torch.empty(len(self._senders(number)) * len(self._home), dtype=torch.int64)
        cross.all_to_all(theirs, sizes)
        for number in self._others:
            taken[number] = nothing.new_empty(int(theirs[number].sum()))
        cross.all_to_all(taken, sent)
        arrived = {}
        for number in self._others:
            parts = list(taken[number].split(theirs[number].tolist()))
            bounds = accumulate([len(self._home)] * len(self._senders(number)), initial=0)
            for place, (begin, end) in zip(self._senders(number), pairwise(bounds), strict=True):
                arrived[number, place] = parts[begin:end]
        return arrived

    def _senders(self, number: int) -> range:
        """Places in a host of the ranks for which the carrier with this local rank answers."""
        return range(self._local.rank, len(self._hosts[number]), self._carriers)
