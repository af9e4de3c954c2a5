"""Parcels: what the ranks of one host send to those of another, and how it gets there.

# Note [parcels between hosts]
What is for a rank of another host goes, inside the sender's host, to the carrier that has the local rank of the carrier
that answers for the receiver (Note [layers]). The two carriers exchange it across the network, and where the receiver
is no carrier, it is handed to it. So every byte crosses once, on the connections of the carriers, and in one message
for each pair of carriers, not for each pair of ranks. The ranks of a host first tell each other, in its memory, what
they send and expect: so no round across the network is needed to agree on sizes.

A flat lane sends as many bytes across. It would save the way through the host's memory, and cost a connection between
any two ranks, a message on each, and the network's way for what stays inside a host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.lanes.memory import deal, joined, room_for


class Parcels:
    """The part of a ``HierarchicalLane`` that exchanges bytes between ranks of different hosts.

    Args:
        local, cross, hosts: of the ``HierarchicalLane``.
        here: number of this rank's host.
    """

    def __init__(self, local: Lane, cross: Lane | None, hosts: Sequence[Sequence[int]], here: int) -> None:
        self._local, self._cross, self._hosts = local, cross, hosts
        self._home = hosts[here]
        self._carriers = min(map(len, hosts))
        self._others = [number for number in range(len(hosts)) if number != here]

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Collective. uint8 vectors to and from each rank; those of the own host are left alone."""
        sizes = torch.empty(len(self._home), 2, len(inputs), dtype=torch.int64)
        mine = torch.tensor([[part.numel() for part in parts] for parts in (inputs, outputs)])
        self._local.all_gather(sizes.unbind(), mine)
        sent, expected = sizes.unbind(1)
        forwarded = self._forward(inputs, sent.tolist())
        handed = [] if self._cross is None else self._carry(outputs, forwarded, expected.tolist(), self._cross)
        if len(self._home) > self._carriers:
            self._hand_over(outputs, handed)

    def _answered(self, host: Sequence[int], mate: int) -> Sequence[int]:
        """The ranks of a host for which its carrier with this local rank answers."""
        return host[mate :: self._carriers]

    def _forward(self, inputs: Sequence[Tensor], sent: Sequence[Sequence[int]]) -> list[dict[int, Tensor]]:
        """Give each carrier of this host what goes through it. What this one gets: of each mate, by receiver."""
        nothing = inputs[0].new_empty(0)
        given, taken = [nothing] * len(self._home), [nothing] * len(self._home)
        for mate in range(self._carriers):
            given[mate] = joined([inputs[rank] for rank in self._through(mate)])
        receivers = self._through(self._local.rank) if self._cross is not None else []
        counts = [[row[rank] for rank in receivers] for row in sent]
        if self._cross is not None:
            taken = [inputs[0].new_empty(sum(row)) for row in counts]
        self._local.all_to_all(taken, given)
        parts = [whole.split(row) if row else () for whole, row in zip(taken, counts, strict=True)]
        return [dict(zip(receivers, of, strict=True)) for of in parts]

    def _through(self, mate: int) -> list[int]:
        """The ranks of other hosts that carriers with this local rank answer for."""
        return [rank for number in self._others for rank in self._answered(self._hosts[number], mate)]

    def _carry(
        self,
        outputs: Sequence[Tensor],
        forwarded: Sequence[dict[int, Tensor]],
        expected: Sequence[Sequence[int]],
        cross: Lane,
    ) -> list[Tensor]:
        """Across the network. What is for this rank goes to its outputs; what is for those that it answers for besides,
        is returned: for each mate, all of it, in the order of hosts and their ranks."""
        place = self._local.rank
        mates = range(place, len(self._home), self._carriers)
        given, taken = [outputs[0].new_empty(0)] * len(self._hosts), [outputs[0].new_empty(0)] * len(self._hosts)
        rooms: dict[int, list[Tensor]] = {}
        for number in self._others:
            host = self._hosts[number]
            given[number] = joined([of[rank] for rank in self._answered(host, place) for of in forwarded])
            # By receiver, then by sender; only this rank's own may be received in place.
            rooms[number] = [outputs[rank] for rank in host]
            rooms[number] += [outputs[0].new_empty(expected[mate][rank]) for mate in mates[1:] for rank in host]
            taken[number] = room_for(rooms[number])
        cross.all_to_all(taken, given)
        for number in self._others:
            deal(taken[number], rooms[number])
        handed = [outputs[0].new_empty(0)] * len(self._home)
        for layer, mate in enumerate(mates):
            if layer:
                pieces = []
                for number in self._others:
                    count = len(self._hosts[number])
                    pieces += rooms[number][layer * count : (layer + 1) * count]
                handed[mate] = joined(pieces)
        return handed

    def _hand_over(self, outputs: Sequence[Tensor], handed: Sequence[Tensor]) -> None:
        """Carriers give the ranks without connections what has come for them."""
        nothing = outputs[0].new_empty(0)
        taken, place = [nothing] * len(self._home), self._local.rank
        parts = [outputs[rank] for number in self._others for rank in self._hosts[number]]
        if self._cross is None:
            taken[place % self._carriers] = room_for(parts)
        self._local.all_to_all(taken, handed or [nothing] * len(self._home))
        if self._cross is None:
            deal(taken[place % self._carriers], parts)
