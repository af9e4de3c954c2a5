"""Vectors as one: their own memory where they lie side by side in one allocation, a copy elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar.comm.lanes.memory import bytes_of, deal, joined, room_for

WHOLE = torch.arange(12)
LAYOUTS: dict[str, tuple[list[Tensor], bool]] = {
    "side by side": (list(WHOLE.split([3, 0, 4, 5])), True),
    "a part": (list(WHOLE[2:7].split([1, 4])), True),
    "nothing before and behind": ([torch.empty(0, dtype=torch.int64), WHOLE[3:5], WHOLE[5:5], WHOLE[:0]], True),
    "a gap": ([WHOLE[:3], WHOLE[4:]], False),
    "another order": ([WHOLE[3:], WHOLE[:3]], False),
    "one tensor twice": ([WHOLE[:3], WHOLE[:3]], False),
    "other allocations": ([torch.arange(3), torch.arange(4)], False),
    "nothing": ([WHOLE[:0], WHOLE[3:3]], True),
}


@pytest.mark.parametrize(("parts", "in_place"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_is_joined_has_all_values_and_is_copied_only_where_it_must_be(parts: list[Tensor], in_place: bool) -> None:
    one = joined(parts)
    assert one.tolist() == [value for part in parts for value in part.tolist()]
    if one.numel():
        full = next(part for part in parts if part.numel())
        assert (one.data_ptr() == full.data_ptr()) is in_place


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one tensor twice"])
def test_what_is_written_to_the_room_is_dealt_to_the_parts(name: str) -> None:
    memory = WHOLE.untyped_storage().data_ptr()
    base = torch.full_like(WHOLE, -1)
    parts = [
        base[part.storage_offset() : part.storage_offset() + len(part)]
        if part.untyped_storage().data_ptr() == memory
        else torch.full_like(part, -1)
        for part in LAYOUTS[name][0]
    ]
    room = room_for(parts)
    room.copy_(torch.arange(len(room)) + 5)
    deal(room, parts)
    assert [value for part in parts for value in part.tolist()] == list(range(5, 5 + len(room)))


def test_bytes_share_the_memory_of_their_tensor() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16, requires_grad=False)
    bytes_of(tensor)[2] = 7
    assert tensor[0, 1] == 7
    assert bytes_of(torch.tensor(True)).tolist() == [1]
    assert bytes_of(torch.empty(0, 3)).shape == (0,)
