"""Groups: collectives on whole tensors, JSON values, and their door."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybridpar as hp
from tests.ranks import free_port, run_threads


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_concatenates_and_reduce_scatter_sums_the_rows(size: int) -> None:
    sizes = [rank + 1 for rank in range(size)]

    def work(group: hp.Group) -> None:
        parts = [torch.full((rows, 2), float(rank)) for rank, rows in enumerate(sizes)]
        assert torch.equal(group.all_gather(parts[group.rank], sizes), torch.cat(parts))
        whole = torch.arange(2.0 * sum(sizes)).view(-1, 2)
        scattered = group.reduce_scatter(whole * (group.rank + 1), sizes)
        assert torch.equal(scattered, whole.split(sizes)[group.rank] * sum(sizes))

    run_threads(size, work)


def test_values_of_any_length_travel_as_json() -> None:
    def work(group: hp.Group) -> None:
        value = {"rank": group.rank, "text": "ü" * (10 * group.rank), "nothing": None}
        everyone = group.all_gather_json(value)
        assert [entry["rank"] for entry in everyone] == [0, 1, 2]
        assert everyone[2]["text"] == "ü" * 20
        assert group.broadcast_json(value, root=1)["rank"] == 1

    run_threads(3, work)


def test_wrong_sizes_are_refused_before_anything_is_sent() -> None:
    group = hp.Group.alone()
    with pytest.raises(ValueError, match="expected 3 rows"):
        group.all_gather(torch.zeros(2, 2), [3])
    with pytest.raises(ValueError, match="one size for each of 1 ranks, got 2"):
        group.all_gather(torch.zeros(2, 2), [1, 1])
    with pytest.raises(ValueError, match="expected 3 rows"):
        group.reduce_scatter(torch.zeros(2, 2), [3])
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.zeros(2, 3).T)

    def uneven(group: hp.Group) -> None:
        with pytest.raises(ValueError, match="divisible by 2"):
            group.reduce_scatter(torch.zeros(3))

    run_threads(2, uneven)


def test_two_groups_live_side_by_side_in_one_process() -> None:
    def work(first: hp.Group) -> None:
        lane = first.new_lane()
        second = hp.Group(lane, first.topology)
        one, two = torch.ones(1), torch.ones(1)
        first.all_reduce(one)
        second.all_reduce(two)
        assert one.item() == two.item() == 2

    run_threads(2, work)


def test_init_adopts_a_torch_distributed_that_is_initialised() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        group = hp.init(timeout=20)
        assert (group.rank, group.size) == (0, 1)
        assert group.all_reduce(torch.ones(2)).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_only_thread_groups_can_be_aborted_by_hand() -> None:
    with pytest.raises(TypeError, match="thread_groups"):
        hp.abort_thread_group(hp.Group.alone())
