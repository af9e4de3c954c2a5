"""Names asked for in any order give what all asked for, joined ranks change nothing, and mistakes are told to all."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.horovod.exchange import Exchange
from hybridpar.comm.horovod.reduce_op import ReduceOp
from tests.head.cases import errors_of
from tests.ranks import run_threads

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
SHAPES = [(), (1,), (5,), (0, 3), (3, 4), (7, 2, 2)]
REDUCTIONS = [op for op in ReduceOp if op is not ReduceOp.ADASUM]
KINDS = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]


def _values(case: dict[str, Any], call: int, rank: int, number: int) -> Tensor:
    """Small whole numbers: exact in every dtype, in any order."""
    shape, dtype = case["tensors"][call]
    if case["kinds"][call] in ("allgather", "alltoall", "reducescatter"):
        rows = 3 if case["kinds"][call] == "reducescatter" else rank + call % 2
        shape = (rows, *shape[1:])
    seed = 1000 * call + 100 * rank + number
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _splits(rows: int, size: int) -> list[int]:
    return [rows if rank == rows % size else 0 for rank in range(size)]


def _expected(case: dict[str, Any], call: int, rank: int, number: int, ranks: list[int], size: int) -> Tensor:
    kind, op = case["kinds"][call], case["ops"][call]
    values = [_values(case, call, other, number) for other in ranks]
    if kind == "allgather":
        return torch.cat(values)
    if kind == "broadcast":
        return values[call % size]
    if kind == "alltoall":
        return torch.cat([v for v in values if v.shape[0] % size == rank] + [values[0][:0]])
    stacked = torch.stack([value.double() for value in values])
    if kind == "reducescatter":
        total = stacked.sum(0) / (size if op is ReduceOp.AVERAGE else 1)
        return total.to(values[0].dtype).tensor_split(size)[rank]
    total = {
        ReduceOp.SUM: lambda: stacked.sum(0),
        ReduceOp.AVERAGE: lambda: stacked.sum(0) / size,
        ReduceOp.MIN: lambda: stacked.amin(0),
        ReduceOp.MAX: lambda: stacked.amax(0),
        ReduceOp.PRODUCT: lambda: stacked.prod(0),
    }[op]()
    return total.to(values[0].dtype)


def _ask(exchange: Exchange, case: dict[str, Any], call: int, number: int) -> Any:
    kind, op = case["kinds"][call], case["ops"][call]
    tensor, name = _values(case, call, exchange.rank, number), f"{kind}.{call}"
    if case["strided"] and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    match kind:
        case "allreduce":
            return exchange.all_reduce(name, tensor, op)
        case "allgather":
            return exchange.all_gather(name, tensor)
        case "broadcast":
            return exchange.broadcast(name, tensor, call % exchange.size)
        case "alltoall":
            return exchange.all_to_all(name, tensor, _splits(tensor.shape[0], exchange.size))
        case "reducescatter":
            sums = ReduceOp.AVERAGE if op is ReduceOp.AVERAGE else ReduceOp.SUM
            return exchange.reduce_scatter(name, tensor, sums)
        case _:
            return exchange.barrier(name)


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    size, calls = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    each = st.integers(calls, calls)
    return {
        "size": size,
        "calls": calls,
        "kinds": [draw(st.sampled_from(KINDS)) for _ in range(draw(each))],
        "ops": [draw(st.sampled_from(REDUCTIONS)) for _ in range(calls)],
        "tensors": [(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))) for _ in range(calls)],
        "strided": draw(st.booleans()),
        # Four times the same names: the engine has some of them from the third time on.
        "orders": [[draw(st.permutations(range(calls))) for _ in range(4)] for _ in range(size)],
    }


@settings(max_examples=30)
@given(_cases())
def test_any_order_of_names_gives_what_was_asked_for(case: dict[str, Any]) -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        for number in range(4):
            asked = {call: _ask(exchange, case, call, number) for call in case["orders"][group.rank][number]}
            for call, operation in asked.items():
                result = exchange.finished(operation)
                if case["kinds"][call] == "barrier":
                    assert result is None
                    continue
                if case["kinds"][call] in ("alltoall", "allgather"):
                    result, _ = result
                exact = _expected(case, call, group.rank, number, list(range(case["size"])), case["size"])
                tolerance = {"rtol": 2e-2, "atol": 2e-2} if exact.dtype in (torch.bfloat16, torch.float16) else {}
                torch.testing.assert_close(result, exact, **tolerance)
        exchange.close()

    run_threads(case["size"], work)


def test_names_go_to_the_engine_when_they_come_for_the_third_time() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        for step in range(4):
            operation = exchange.all_reduce("allreduce.weight", torch.ones(3), ReduceOp.AVERAGE)
            assert operation.direct == (step >= 2)
            assert torch.equal(exchange.finished(operation), torch.ones(3))
            made_up = exchange.all_reduce(exchange.named("allreduce", None), torch.ones(3), ReduceOp.SUM)
            assert not made_up.direct
            assert torch.equal(exchange.finished(made_up), torch.full((3,), 2.0))
        exchange.close()

    run_threads(2, work)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_joined_ranks_change_no_result_and_averages_are_divided_by_all(op: ReduceOp, dtype: torch.dtype) -> None:
    def combined(values: list[int]) -> Tensor:
        stacked = torch.tensor(values, dtype=torch.float64)
        total = {
            ReduceOp.SUM: stacked.sum(), ReduceOp.AVERAGE: stacked.sum() / 3, ReduceOp.MIN: stacked.min(),
            ReduceOp.MAX: stacked.max(), ReduceOp.PRODUCT: stacked.prod(),
        }[op]  # fmt: skip
        return (total if dtype.is_floating_point else total.trunc()).to(dtype)

    def work(group: Any) -> int:
        exchange = Exchange(group, timeout=30)
        values = [-5, 7, 3]
        for _ in range(2):
            # Rank 0 has one step, rank 1 five, rank 2 nine; a name that appears late, too.
            for step in range(1 + 4 * group.rank):
                present = [value for rank, value in enumerate(values) if step < 1 + 4 * rank]
                for name in ["early", *["late"] * (step > 0)]:
                    tensor = torch.full((2,), values[group.rank], dtype=dtype)
                    operation = exchange.all_reduce(f"allreduce.{name}", tensor, op)
                    torch.testing.assert_close(exchange.finished(operation), combined(present).expand(2), msg=str(step))
                made_up = exchange.named("allreduce", None)
                exchange.finished(exchange.all_reduce(made_up, torch.ones(2, dtype=dtype), op))
            last = exchange.join()
            made_up = exchange.named("allreduce", None)
            result = exchange.finished(exchange.all_reduce(made_up, torch.ones(2, dtype=dtype), ReduceOp.SUM))
            assert torch.equal(result, torch.full((2,), 3, dtype=dtype))
        exchange.close()
        return last

    assert run_threads(3, work) == [2, 2, 2]


def test_what_is_in_flight_when_a_rank_joins_arrives() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        if group.rank == 0:
            operation = exchange.all_reduce("allreduce.a", torch.ones(2), ReduceOp.SUM)
        exchange.join()
        if group.rank == 0:
            assert torch.equal(exchange.finished(operation), torch.ones(2))
        exchange.close()

    run_threads(2, work)


@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_what_needs_all_ranks_says_so_when_one_has_joined(kind: str) -> None:
    case: dict[str, Any] = {"kinds": [kind], "ops": [ReduceOp.SUM], "tensors": [((3,), torch.float32)], "strided": 0}

    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        if group.rank != 1:
            with pytest.raises(hp.CommunicationError, match=f"{kind} needs all ranks, but rank 1 joined"):
                exchange.finished(_ask(exchange, case, 0, 0))
        exchange.join()
        exchange.finished(_ask(exchange, case, 0, 1))
        exchange.close()

    run_threads(3, work)


def _differently(exchange: Exchange, steps_alike: int) -> None:
    for _ in range(steps_alike):
        exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(2, 3), ReduceOp.SUM))
    if exchange.rank == 1:
        exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(3, 2), ReduceOp.SUM))
    else:
        exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(2, 3), ReduceOp.SUM))


@pytest.mark.parametrize("steps_alike", [0, 4])
def test_different_shapes_are_named_on_every_rank_and_the_next_call_works(steps_alike: int) -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        with pytest.raises(hp.CommunicationError) as caught:
            _differently(exchange, steps_alike)
        assert (
            "allreduce of allreduce.x failed: the ranks asked for different things under this name: "
            "allreduce of float32[2, 3] by Sum on ranks 0, 2; allreduce of float32[3, 2] by Sum on rank 1"
        ) in str(caught.value)
        for _ in range(3):
            result = exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(2, 3), ReduceOp.SUM))
            assert torch.equal(result, torch.full((2, 3), 3.0))
        exchange.close()

    run_threads(3, work)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda e: e.all_reduce("x", torch.ones(2, dtype=[torch.float32, torch.int64][e.rank]), ReduceOp.SUM),
            r"float32\[2\] by Sum on rank 0; allreduce of int64\[2\] by Sum on rank 1",
        ),
        (
            lambda e: e.all_reduce("x", torch.ones(2), [ReduceOp.SUM, ReduceOp.MAX][e.rank]),
            "by Sum on rank 0; .* by Max on rank 1",
        ),
        (lambda e: e.all_reduce("x", torch.ones(2), ReduceOp.SUM, 1.0 + e.rank), "prescale 2, postscale 1"),
        (lambda e: e.broadcast("x", torch.ones(2), e.rank), "from rank 0 on rank 0; .* from rank 1 on rank 1"),
        (
            lambda e: e.all_gather("x", torch.ones(2, 3 + e.rank)),
            r"float32\[\*, 3\] on rank 0; allgather of float32\[\*, 4\] on rank 1",
        ),
        (lambda e: e.all_gather("x", torch.tensor(1.0)), "rank 0: expected rows .* got a tensor without dimensions"),
        (lambda e: e.reduce_scatter("x", torch.tensor(1.0), ReduceOp.SUM), "got a tensor without dimensions"),
        (lambda e: e.all_to_all("x", torch.ones(3), None), "expected rows that 2 ranks can share evenly, got 3"),
        (
            lambda e: e.all_to_all("x", torch.ones(3), [1, 2] if e.rank else [1, 3]),
            r"rank 0: expected 2 splits of 0 or more that add up to 3 rows, got \[1, 3\]",
        ),
        (lambda e: e.barrier("x") if e.rank else e.broadcast("x", torch.ones(1), 0), "broadcast of .*; barrier on"),
    ],
)
def test_what_cannot_be_is_told_to_all_ranks(ask: Any, message: str) -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        with pytest.raises(hp.CommunicationError, match=message):
            exchange.finished(ask(exchange))
        exchange.finished(exchange.barrier("y"))
        exchange.close()

    run_threads(2, work)


def test_a_name_in_flight_is_refused_and_free_again_afterwards() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        if group.rank == 0:
            operation = exchange.all_reduce("allreduce.x", torch.ones(1), ReduceOp.SUM)
            with pytest.raises(ValueError, match=r"allreduce\.x: expected a name that is not in flight"):
                exchange.all_reduce("allreduce.x", torch.ones(1), ReduceOp.SUM)
        else:
            time.sleep(0.1)
            operation = exchange.all_reduce("allreduce.x", torch.ones(1), ReduceOp.SUM)
        exchange.finished(operation)
        exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(1), ReduceOp.SUM))
        exchange.close()

    run_threads(2, work)
    exchange = Exchange(hp.Group.alone())
    with pytest.raises(TypeError, match=r"expected float32, .* got torch.bool; cast it first"):
        exchange.all_reduce("x", torch.ones(1, dtype=torch.bool), ReduceOp.SUM)
    exchange.close()


def test_a_name_that_others_never_ask_for_fails_in_time_and_says_who_did(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=2, stall_seconds=0.5)
        ours = exchange.all_reduce(f"allreduce.{'mine' if group.rank == 0 else 'ours'}", torch.ones(1), ReduceOp.SUM)
        exchange.finished(ours)

    errors = errors_of(3, work)
    told = [str(error) for error in errors]
    assert all(isinstance(error, hp.CommunicationError) for error in errors), told
    assert any(
        "allreduce.mine failed: time-out of 2 s: asked for by rank 0, not by ranks 1, 2" in text for text in told
    ) or any(
        "allreduce.ours failed: time-out of 2 s: asked for by ranks 1, 2, not by rank 0" in text for text in told
    ), told
    assert any("waited for" in record.message for record in caplog.records)


def test_a_rank_that_closes_early_is_an_error_for_those_who_wait() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=20)
        exchange.finished(exchange.barrier("start"))
        if group.rank == 0:
            exchange.close()
            with pytest.raises(hp.CommunicationError, match="shut down on this rank"):
                exchange.barrier("more")
            return
        began = time.monotonic()
        with pytest.raises(hp.CommunicationError):
            exchange.finished(exchange.all_reduce("allreduce.x", torch.ones(1), ReduceOp.SUM))
        assert time.monotonic() - began < 25
        exchange.close()

    run_threads(2, work, timeout=5)


def test_threads_of_one_rank_may_ask_at_once() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        wrong: list[str] = []

        def many(thread: int) -> None:
            for step in range(10):
                for part in range(3):
                    tensor = torch.full((2,), float(step + group.rank))
                    operation = exchange.all_reduce(f"allreduce.{thread}.{part}", tensor, ReduceOp.SUM)
                    if not torch.equal(exchange.finished(operation), torch.full((2,), 2.0 * step + 1)):
                        wrong.append(f"{thread}.{part}.{step}")

        threads = [threading.Thread(target=many, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        exchange.close()

    run_threads(2, work)


def test_tasks_run_in_one_order_and_what_they_raise_is_raised() -> None:
    def work(group: Any) -> None:
        exchange = Exchange(group, timeout=30)
        asked = [exchange.together(name, name, lambda: group.all_gather_json(group.rank)) for name in "ab"]
        assert [exchange.finished(one) for one in asked] == [[0, 1], [0, 1]]

        def fails() -> None:
            raise ValueError("not like this")

        with pytest.raises(ValueError, match="not like this"):
            exchange.finished(exchange.together("c", "c", fails))
        with pytest.raises(hp.CommunicationError, match="task one on rank 0; task two on rank 1"):
            exchange.finished(exchange.together("d", ["one", "two"][group.rank], lambda: None))
        exchange.close()

    run_threads(2, work)
