"""The order in which buckets are sent, on a lane of which only the clock knows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.comm.engine.launch_order import launch_order


def sent(order: Sequence[int], ready: Sequence[int], send: Sequence[int]) -> dict[int, tuple[int, int]]:
    """When each bucket begins and ends on a lane that keeps to an order."""
    now, times = 0, {}
    for bucket in order:
        begin = max(now, ready[bucket])
        now = begin + send[bucket]
        times[bucket] = (begin, now)
    return times


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    count = draw(st.integers(0, 6))
    times = st.lists(st.integers(0, 12), min_size=count, max_size=count)
    return draw(times), draw(times), list(draw(st.permutations(range(count))))


@given(rounds())
def test_what_is_needed_first_is_sent_no_later_and_the_lane_never_rests(
    case: tuple[list[int], list[int], list[int]],
) -> None:
    ready, send, needed = case
    order = launch_order(ready, send, needed)
    plan = list(range(len(ready)))
    assert sorted(order) == plan
    if not plan:
        return
    ours, planned = sent(order, ready, send), sent(plan, ready, send)
    assert ours[needed[0]][1] <= planned[needed[0]][1]
    if order == plan:
        return
    # No order whatever sends all of them earlier.
    least = min(max(end for _, end in sent(other, ready, send).values()) for other in itertools.permutations(plan))
    assert max(end for _, end in ours.values()) == least
    for place, bucket in enumerate(order):
        begin = ours[bucket][0]
        later = order[place + 1 :]
        # Whatever is ready when a bucket begins is needed after it.
        assert all(needed.index(other) > needed.index(bucket) for other in later if ready[other] <= begin)
        before = ours[order[place - 1]][1] if place else 0
        assert begin == before or all(ready[other] >= begin for other in later)


def test_buckets_are_sent_by_need_while_the_lane_is_behind() -> None:
    # Backward makes them ready one a second, the last layer first; forward needs them the other way round.
    assert launch_order([1, 2, 3, 4], [0.5, 0.5, 0.5, 0.5], [3, 2, 1, 0]) == [0, 1, 2, 3]
    assert launch_order([1, 2, 3, 4], [2.5, 2.5, 2.5, 2.5], [3, 2, 1, 0]) == [0, 2, 3, 1]
    assert launch_order([0, 0, 0], [1, 1, 1], [1, 2, 0]) == [1, 2, 0]
    # Bucket 2 would begin just before bucket 1, the first to be needed, is ready, and hold it up.
    assert launch_order([0, 2, 0], [1, 1, 10], [1, 2, 0]) == [0, 1, 2]
    with pytest.raises(ValueError, match="each of them needed once"):
        launch_order([0, 0], [1, 1], [0, 0])
    with pytest.raises(ValueError, match="1 times to send"):
        launch_order([0, 0], [1], [0, 1])
