"""Ranks of several hosts exchange parcels: how much crosses the network, and what becomes of mistakes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.lanes.compose import Ways, compose
from hybridpar.comm.lanes.routes import HierarchicalLane
from tests.ranks import run_threads


def _composed(group: hp.Group, places: str, *, shared_memory: bool = False) -> HierarchicalLane:
    lane = compose(group._lane, Ways(places[group.rank], 30, shared_memory=shared_memory), "hierarchical")
    assert isinstance(lane, HierarchicalLane)
    return lane


@pytest.mark.parametrize("shared_memory", [False, True])
def test_ranks_of_two_hosts_that_mean_different_sizes_all_raise(shared_memory: bool) -> None:
    """Rank 3 of one host expects of rank 0 of the other what it does not send."""

    def work(group: hp.Group) -> None:
        lane = _composed(group, "aabb", shared_memory=shared_memory)
        outputs = [torch.zeros(7 if (group.rank, other) == (3, 0) else 5) for other in range(4)]
        if group.rank == 3:  # it sees what comes from both ranks by way of the other carrier
            with pytest.raises(hp.CommunicationError, match="expected 48 bytes from rank 1, got 40"):
                lane.all_to_all(outputs, torch.ones(20).split(5))
        else:  # the others may be done before
            with contextlib.suppress(hp.CommunicationError):
                lane.all_to_all(outputs, torch.ones(20).split(5))
        with pytest.raises(hp.CommunicationError):
            lane.barrier()

    run_threads(4, work, timeout=20)


def test_hosts_exchange_each_byte_once_and_a_message_a_carrier() -> None:
    """Of 3 hosts with 2 ranks: a carrier sends what is for the ranks of its place, whoever of its host it is from."""
    counts = [[(sender * 7 + receiver * 3) % 11 for receiver in range(6)] for sender in range(6)]

    def work(group: hp.Group) -> list[list[int]]:
        lane = _composed(group, "aabbcc")
        assert lane._cross is not None
        sent, plain = [], lane._cross.all_to_all

        def counted(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
            sent.append([part.nbytes for part in inputs])
            plain(outputs, inputs)

        lane._cross.all_to_all = counted  # type: ignore[method-assign]
        inputs = [torch.ones(count, dtype=torch.uint8) for count in counts[group.rank]]
        lane.all_to_all([torch.empty(row[group.rank], dtype=torch.uint8) for row in counts], inputs)
        return sent

    for rank, calls in enumerate(run_threads(6, work, timeout=30)):
        here, place = divmod(rank, 2)
        mates = (2 * here, 2 * here + 1)
        expected = [0 if host == here else sum(counts[mate][2 * host + place] for mate in mates) for host in range(3)]
        assert calls == [expected]
