"""What is agreed is what all ranks have, on all ranks the same; what a negotiation costs; what is expected next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.any_order.readiness import Agreement, Forecast, Readiness, Terms, name_ranks
from hybridpar.comm.lanes.lane import Lane, Op
from tests.ranks import run_threads


class _Counted(Lane):
    """Counts the calls of the lane that it hands them to."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self.calls = lane, Counter[str]()
        self.rank, self.size, self.ranks = lane.rank, lane.size, lane.ranks

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        self.calls[op] += 1
        self._lane.all_reduce(tensor, op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self.calls["gather"] += 1
        self._lane.all_gather(outputs, tensor)

    reduce_scatter = all_to_all = broadcast = barrier = split = close = None  # type: ignore[assignment]


SUBSETS = st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3)


@settings(max_examples=30)
@given(st.lists(SUBSETS, min_size=1, max_size=6))
def test_the_intersection_is_agreed(rounds: list[list[set[int]]]) -> None:
    def work(group: Any) -> None:
        readiness = Readiness(group.new_lane())
        assert readiness.agree({}, [10]) == Agreement((), grown=True)
        for sets in rounds:
            ready = {index: Terms() for index in sets[group.rank]}
            assert readiness.agree(ready, [10]) == Agreement(tuple(sorted(set.intersection(*sets))))

    run_threads(3, work)


def test_the_vector_grows_when_the_last_rank_has_registered() -> None:
    registered = [[[2], [2, 5]], [[2, 5, 6], [2, 5, 6]], [[2, 5], [2, 5, 6]], [[2, 5, 6], [2, 5, 6]]]
    everything = {index: Terms() for index in range(6)}

    def work(group: Any) -> list[Agreement]:
        readiness = Readiness(group.new_lane())
        return [readiness.agree(everything, row[group.rank]) for row in registered]

    expected = [
        Agreement((), grown=True),  # to 2
        Agreement((0, 1), grown=True),  # to 5
        Agreement((0, 1, 2, 3, 4)),  # rank 0 knows of no sixth
        Agreement((0, 1, 2, 3, 4), grown=True),
    ]
    assert run_threads(2, work) == [expected, expected]


def test_terms_are_exchanged_only_when_they_change_and_the_highest_priority_counts() -> None:
    def work(group: Any) -> None:
        lane = _Counted(group.new_lane())
        readiness = Readiness(lane)
        readiness.agree({}, [3])

        def agree(*terms: Terms) -> int:
            """How many gathers it took."""
            before = lane.calls["gather"]
            assert readiness.agree(dict(enumerate(terms)), [3]) == Agreement(tuple(range(len(terms))))
            return lane.calls["gather"] - before

        assert agree(Terms(), Terms(), Terms()) == 0
        assert readiness.terms == [Terms()] * 3 and readiness.edition == 0
        own = Terms(priority=-5 if group.rank == 1 else -7)
        assert agree(Terms(), own) == 1
        assert readiness.terms == [Terms(), Terms(priority=-5), Terms()] and readiness.edition == 1
        assert agree(Terms(), own, Terms()) == 0
        assert readiness.terms[1] == Terms(priority=-5)
        # One rank's change is enough.
        assert agree(Terms(), Terms(priority=8) if group.rank == 2 else own) == 1
        assert readiness.terms[1].priority == 8
        largest = Terms("max", (1 << 63) - 1)
        assert agree(largest) == 1 and readiness.terms[0] == largest
        assert agree(Terms("min", -(1 << 63))) == 1 and readiness.terms[0] == Terms("min", -(1 << 63))
        assert lane.calls["min"] == 7

    run_threads(3, work)


def test_different_operations_are_a_dispute_that_every_rank_hears_of_and_that_can_end() -> None:
    def work(group: Any) -> None:
        readiness = Readiness(group.new_lane())
        readiness.agree({}, [2])
        wish = Terms("max" if group.rank == 1 else "sum")
        found = readiness.agree({0: wish, 1: Terms()}, [2])
        assert found.indices == (0, 1)
        assert found.disputes == {0: "sum on ranks 0, 2 and max on rank 1"}
        assert readiness.agree({0: wish, 1: Terms()}, [2]).disputes == found.disputes
        assert readiness.agree({0: Terms("max"), 1: Terms()}, [2]) == Agreement((0, 1))
        assert readiness.terms == [Terms("max"), Terms()]

    run_threads(3, work)


def test_all_hear_in_the_last_negotiation_that_a_rank_leaves() -> None:
    def work(group: Any) -> list[Agreement]:
        readiness, everything = Readiness(group.new_lane()), {index: Terms() for index in range(3)}
        leaves = group.rank == 1
        readiness.agree({}, [3])
        return [readiness.agree(everything, [3]), readiness.agree({} if leaves else everything, [3], leaving=leaves)]

    assert run_threads(3, work) == [[Agreement((0, 1, 2)), Agreement((), over=True)]] * 3


def test_a_rank_that_left_is_an_error_for_the_others() -> None:
    def work(group: Any) -> None:
        lane = group.new_lane()
        if group.rank == 0:
            with pytest.raises(hp.CommunicationError, match="another rank left"):
                Readiness(lane).agree({}, [1])

    run_threads(2, work, timeout=0.2)


def test_ranks_are_named_as_in_a_sentence() -> None:
    assert name_ranks([3]) == "rank 3" and name_ranks((0, 2)) == "ranks 0, 2"


def test_a_repeated_sequence_of_sets_is_foreseen() -> None:
    forecast = Forecast()
    # After {1} comes {2} or {3}: only the set before it tells which.
    steady = [(0,), (1,), (2,), (4, 5), (1,), (3,)]
    for number, indices in enumerate(steady * 3):
        if number >= len(steady) + 2:
            assert forecast.expected == set(indices), number
        forecast.saw(indices)
    assert forecast.expected == {0}
    forecast.saw((7,))
    assert forecast.expected == set()
    for follower in ((0,), (9,)):  # the last time counts
        for indices in [follower, *steady, (7,)]:
            forecast.saw(indices)
        assert forecast.expected == set(follower)


def test_only_so_much_is_remembered() -> None:
    forecast = Forecast()
    for number in range(2000):
        forecast.saw((number,))
    assert len(forecast._followers) <= 256
    for first, expected in ((0, set()), (1990, {1992})):
        forecast.saw((first,))
        forecast.saw((first + 1,))
        assert forecast.expected == expected
