"""Groups: collectives on whole tensors, JSON values, and their door."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridpar as hp
from hybridpar.comm.lanes.compose import Ways
from hybridpar.comm.lanes.routes import HierarchicalLane
from hybridpar.comm.lanes.torch_lane import TorchLane
from tests.ranks import free_port, run_processes, run_threads


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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_to_all_gives_each_rank_the_rows_that_are_for_it(size: int) -> None:
    counts = [[(2 * sender + receiver) % 4 for receiver in range(size)] for sender in range(size)]
    rows = [[torch.full((count, 2), 10.0 * s + r) for r, count in enumerate(row)] for s, row in enumerate(counts)]

    def work(group: hp.Group) -> None:
        rank = group.rank
        found = group.all_to_all(torch.cat(rows[rank]), counts[rank])
        assert torch.equal(found, torch.cat([row[rank] for row in rows]))
        even = group.all_to_all(torch.arange(2 * size).bool())
        assert torch.equal(even, torch.arange(2 * size).bool().view(size, 2)[rank].repeat(size))
        columns = torch.arange(2.0 * size).view(2, size).T + 100 * rank  # not contiguous
        expected = [[rank + 100.0 * other, rank + size + 100.0 * other] for other in range(size)]
        assert group.all_to_all(columns.requires_grad_()).tolist() == expected
        assert group.all_to_all(torch.tensor(counts[rank])).tolist() == [row[rank] for row in counts]

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
    with pytest.raises(ValueError, match=r"expected 3 rows as sizes \[3\] say, got 2"):
        group.all_to_all(torch.zeros(2, 2), [3])
    with pytest.raises(ValueError, match="one size for each of 1 ranks, got 2"):
        group.all_to_all(torch.zeros(2, 2), [1, 1])
    with pytest.raises(ValueError, match="without dimensions"):
        group.all_to_all(torch.tensor(1.0))
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.zeros(2, 3).T)

    def uneven(group: hp.Group) -> None:
        with pytest.raises(ValueError, match="divisible by 2"):
            group.reduce_scatter(torch.zeros(3))
        with pytest.raises(ValueError, match="divisible by 2"):
            group.all_to_all(torch.zeros(3))
        with pytest.raises(ValueError, match=r"expected 2 rows as sizes \[3, -1\]"):
            group.all_to_all(torch.zeros(2), [3, -1])

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


@pytest.mark.parametrize("how", ["init", "from_torch"])
def test_one_interface_not_in_a_list_is_refused(how: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        start: Any = hp.init if how == "init" else hp.Group.from_torch
        with pytest.raises(TypeError, match=r"interfaces: expected a list of names, got .*'eth0'"):
            start(interfaces="eth0")
    finally:
        dist.destroy_process_group()


def parameters_travel_like_any_tensor(group: hp.Group) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.full((200,), group.rank + 1.0, dtype=dtype))
        assert group.all_reduce(parameter) is parameter
        assert parameter.tolist() == [6.0] * 200
        for op, expected in (("max", 3.0), ("min", 1.0)):
            parameter = torch.nn.Parameter(torch.full((5,), group.rank + 1.0, dtype=dtype))
            assert group.all_reduce(parameter, op).tolist() == [expected] * 5  # type: ignore[arg-type]
        parameter = torch.nn.Parameter(torch.full((200,), group.rank + 1.0, dtype=dtype))
        group.broadcast(parameter, root=1)
        assert parameter.tolist() == [2.0] * 200
        assert parameter.requires_grad and parameter.is_leaf
        parameter = torch.nn.Parameter(torch.full((2, 3), group.rank + 1.0, dtype=dtype))
        for tensor in (parameter, parameter * 1):
            gathered = group.all_gather(tensor)
            assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0] and not gathered.requires_grad
            scattered = group.reduce_scatter(group.all_gather(tensor) + 0 * torch.cat([tensor] * 3))
            assert scattered[:, 0].tolist() == [3.0 * (group.rank + 1)] * 2 and not scattered.requires_grad


def autograd_notices_that_a_saved_value_was_overwritten(group: hp.Group) -> None:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum": group.all_reduce,
        "max": functools.partial(group.all_reduce, op="max"),
        "broadcast": functools.partial(group.broadcast, root=1),
    }
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.ones(3, requires_grad=True, dtype=dtype)
            saved = torch.full((3,), 2.0, dtype=dtype)
            product = (weight * saved).sum()
            call(saved)
            if (name, group.rank) == ("broadcast", 1):
                continue  # the root's tensor stays as it is
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def unequal_rows_without_sizes_are_refused_on_every_rank(group: hp.Group) -> None:
    for rows in (2 + group.rank, int(group.rank == 1), 4 if group.rank == 2 else 3):
        with pytest.raises(ValueError, match="all_gather: expected as many rows on every rank"):
            group.all_gather(torch.ones(rows, 3))
    assert group.all_gather(torch.ones(2, 3)).shape == (6, 3)


def a_tensor_without_dimensions_has_no_rows_to_gather(group: hp.Group) -> None:
    with pytest.raises(ValueError, match="tensor without dimensions"):
        group.all_gather(torch.ones(()))
    assert group.all_gather(torch.ones(())[None]).tolist() == [1, 1, 1]


DOOR = (
    parameters_travel_like_any_tensor,
    autograd_notices_that_a_saved_value_was_overwritten,
    unequal_rows_without_sizes_are_refused_on_every_rank,
    a_tensor_without_dimensions_has_no_rows_to_gather,
)


@pytest.mark.parametrize("check", DOOR, ids=lambda check: check.__name__)
def test_the_door_of_a_group_on_two_hosts(check: Callable[[hp.Group], None]) -> None:
    def work(parent: hp.Group) -> None:
        ways = Ways("aab"[parent.rank], 30, shared_memory=False)
        group = hp.Group.over(parent.new_lane(), ways, topology=parent.topology)
        assert isinstance(group._lane, HierarchicalLane)
        check(group)

    run_threads(3, work, timeout=30)


def _whole_door(group: hp.Group) -> dict[str, str]:
    assert isinstance(group._lane, TorchLane)
    return {check.__name__: _problem(check, group) for check in DOOR}


def _problem(check: Callable[[hp.Group], None], group: hp.Group) -> str:
    try:
        check(group)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


@functools.cache
def _problems_between_processes() -> list[dict[str, str]]:
    return run_processes(3, _whole_door, shared_memory=False)


@pytest.mark.parametrize("check", DOOR, ids=lambda check: check.__name__)
def test_the_door_of_a_group_between_processes(check: Callable[[hp.Group], None]) -> None:
    assert [found[check.__name__] for found in _problems_between_processes()] == [""] * 3
