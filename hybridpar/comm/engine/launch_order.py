"""The order in which one lane sends buckets, so that the next forward pass waits as little as it can."""

from __future__ import annotations

from collections.abc import Sequence


def launch_order(
    ready_seconds: Sequence[float], send_seconds: Sequence[float], needed_first: Sequence[int]
) -> list[int]:
    """The order of buckets to keep on every rank. A pure function: give it what all ranks have agreed on.

    The lane is simulated: whenever it is free, of the buckets that are ready it takes the one that is needed first, and
    if none is ready it waits for the next. So it never rests while there is something to send, and all is sent as early
    as in any order. A long bucket may have begun just before one that is needed more urgently becomes ready; if that
    makes the bucket that is needed first later than in the order of the plan, the order of the plan stays.

    Args:
        ready_seconds: when each bucket is complete on all ranks, from any common origin (the maximum over ranks).
        send_seconds: how long the lane takes for each.
        needed_first: all buckets in the order in which the next forward pass needs them.

    Raises:
        ValueError: the three do not speak of the same buckets.
    """
    buckets = range(len(ready_seconds))
    if len(send_seconds) != len(buckets) or sorted(needed_first) != list(buckets):
        raise ValueError(
            f"expected times of as many buckets as are ready ({len(buckets)}) and each of them needed once, got "
            f"{len(send_seconds)} times to send and the order {list(needed_first)}"
        )
    place = {bucket: number for number, bucket in enumerate(needed_first)}
    left, order, now = set(buckets), [], float("-inf")
    while left:
        now = max(now, min(ready_seconds[bucket] for bucket in left))
        chosen = min((bucket for bucket in left if ready_seconds[bucket] <= now), key=place.__getitem__)
        now += send_seconds[chosen]
        order.append(chosen)
        left.remove(chosen)
    if order and _sent(order, needed_first[0], ready_seconds, send_seconds) > _sent(
        buckets, needed_first[0], ready_seconds, send_seconds
    ):
        return list(buckets)
    return order


def _sent(order: Sequence[int], bucket: int, ready_seconds: Sequence[float], send_seconds: Sequence[float]) -> float:
    """When a bucket has been sent, if the lane keeps to an order."""
    now = float("-inf")
    for sent in order:
        now = max(now, ready_seconds[sent]) + send_seconds[sent]
        if sent == bucket:
            break
    return now
