"""The table: what is complete is found the same on all ranks, and what is wrong with it is named."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.comm.horovod.reduce_op import ReduceOp
from hybridpar.comm.horovod.request import Request
from hybridpar.comm.horovod.table import Entry, Message, Table, Verdict

GOOD = Request("allreduce", "float32", (2, 3), op=ReduceOp.MAX, prescale=0.1, postscale=1 / 3, detail="a; b")


def _says(**names: Request) -> Message:
    return Message(False, {name: Entry(request) for name, request in names.items()}, {})


def test_messages_survive_their_journey() -> None:
    entry = Entry(GOOD, [3, 4], "no rows")
    message = Message(True, {"allreduce.x": entry}, {"allreduce.y": Request("barrier")})
    assert Message.read(json.loads(json.dumps(message.values()))) == message


@settings(max_examples=100)
@given(st.lists(st.lists(st.sets(st.sampled_from("abcdef")), min_size=3, max_size=3), max_size=6))
def test_a_name_is_complete_in_the_round_in_which_the_last_rank_says_it(rounds: list[list[set[str]]]) -> None:
    table, said = Table([10, 11, 12]), [set[str](), set[str](), set[str]()]
    complete: set[str] = set()
    for sets in rounds:
        news = [theirs - before for theirs, before in zip(sets, said, strict=True)]
        for before, new in zip(said, news, strict=True):
            before |= new
        found = [verdict.name for verdict in table.absorb([_says(**dict.fromkeys(sorted(new), GOOD)) for new in news])]
        assert len(found) == len(set(found)) and set(found) == set.intersection(*said) - complete
        complete |= set(found)
    assert table.who("never") == ""


def test_who_has_asked_is_told_by_numbers_in_the_job() -> None:
    table = Table([10, 11, 12])
    assert table.absorb([_says(x=GOOD), _says(), _says(x=GOOD)]) == []
    assert table.who("x") == "asked for by ranks 10, 12, not by rank 11"


def _one(table: Table, messages: list[Message]) -> Verdict:
    (verdict,) = table.absorb(messages)
    return verdict


def test_joined_ranks_count_as_present_and_only_reductions_and_barriers_go_without_them() -> None:
    joined: Any = Message(True, {}, {})
    assert _one(Table([0, 1]), [joined, _says(x=GOOD)]).problem == ""
    assert _one(Table([0, 1]), [joined, _says(x=Request("barrier"))]).problem == ""
    problem = _one(Table([0, 1]), [joined, _says(x=Request("allgather", "int64", (3,)))]).problem
    assert "allgather needs all ranks, but rank 0 joined" in problem
    # What it asked for before it joined is its own.
    table = Table([0, 1])
    gather = Request("allgather", "int64", (3,))
    assert table.absorb([_says(x=gather), _says()]) == []
    assert _one(table, [joined, _says(x=gather)]).problem == ""


def test_the_first_part_that_differs_is_named() -> None:
    one = Request("allreduce", "float32", (9,), detail="w: float32[3]; b: float32[6]")
    other = Request("allreduce", "float32", (9,), detail="w: float32[3]; c: float32[2]; d: float32[4]")
    problem = _one(Table([0, 1, 2]), [_says(x=one), _says(x=other), _says(x=one)]).problem
    assert "holding b: float32[6] at place 1 on ranks 0, 2; " in problem
    assert "holding c: float32[2] at place 1 on rank 1" in problem


def test_what_waits_in_the_engine_is_compared_too() -> None:
    waits = Message(False, {}, {"x": GOOD})
    other = Request("allreduce", "float32", (3, 2))
    table = Table([0, 1])
    assert table.absorb([waits, _says()]) == []
    verdict = _one(table, [waits, _says(x=other)])
    assert verdict.waits == {0: GOOD} and "float32[2, 3] by Max (prescale 0.1, postscale 0.333333)" in verdict.problem
