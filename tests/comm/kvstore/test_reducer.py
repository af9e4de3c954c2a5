from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import Group
from hybridpar.comm.kvstore.compression import Half, TwoBit
from hybridpar.comm.kvstore.reducer import Reducer
from tests.ranks import run_processes, run_threads


def each(size: int, work: Any, timeout: float = 20.0) -> list[Any]:
    """``work(reducer)`` on every rank."""

    def run(group: Group) -> Any:
        reducer = Reducer(group, timeout=timeout, stall_seconds=60.0)
        try:
            return work(reducer)
        finally:
            reducer.close()

    return run_threads(size, run, timeout=timeout)


def of(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_values_of_rank_0_are_what_all_begin_with(size: int) -> None:
    def work(reducer: Reducer) -> Any:
        flat, strided = of(reducer.rank, 3, 4), of(reducer.rank + 10, 4, 3).T
        reducer.init_many([1, 2], [flat, strided])
        return flat, strided

    for flat, strided in each(size, work):
        assert torch.equal(flat, of(0, 3, 4)) and torch.equal(strided, of(10, 4, 3).T)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", lambda values: values.sum(0)),
        ("max", lambda values: values.amax(0)),
        ("min", lambda values: values.amin(0)),
        ("mean", lambda values: values.mean(0)),
    ],
)
def test_operations_combine_over_the_ranks_in_place(op: Any, expected: Any) -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init("w", torch.zeros(5))
        mine = of(reducer.rank, 5)
        return reducer.submit("w", mine, op=op).result() is mine, mine

    values = torch.stack([of(rank, 5) for rank in range(3)])
    for same, result in each(3, work):
        assert same
        torch.testing.assert_close(result, expected(values))


def test_keys_may_be_submitted_in_another_order_on_every_rank() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(range(20), [torch.zeros(3) for _ in range(20)])
        order = torch.randperm(20, generator=torch.Generator().manual_seed(reducer.rank)).tolist()
        futures = {key: reducer.submit(key, torch.full((3,), float(key + reducer.rank))) for key in order}
        return [futures[key].result()[0].item() for key in range(20)]

    assert each(3, work) == [[3 * key + 3 for key in range(20)]] * 3


def test_submissions_come_from_any_thread() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(range(8), [torch.zeros(1) for _ in range(8)])
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda key=key: found.update({key: reducer.submit(key, torch.ones(1))}))
            for key in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait(found.values())
        return sum(future.result().item() for future in found.values())

    assert each(2, work) == [16, 16]


def test_two_bits_add_up_and_what_was_not_sent_is_kept_for_the_key() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(["w", "v"], [torch.zeros(2), torch.zeros(2)])
        reducer.use(TwoBit(1.0))
        found = []
        for _ in range(3):
            value = torch.tensor([0.75, -0.25]) * (1 + reducer.rank)
            found.append(reducer.submit("w", value, compression=TwoBit(1.0)).result().tolist())
        fresh = reducer.submit("v", torch.full((2,), 0.75), compression=TwoBit(1.0)).result().tolist()
        return found, fresh

    # Rank 0 sends 0, 1, 1 of 0.75, 1.5, 2.25; rank 1 sends 1, 1, 1 of 1.5, 3, 4.5, and of -0.5, -1, -1.5 0, -1, 0.
    assert each(2, work) == [([[1, 0], [2, -1], [2, 0]], [0, 0])] * 2


def test_compressions_serve_keys_that_come_later_and_leave_alone_what_is_narrow() -> None:
    def work(reducer: Reducer) -> Any:
        half = Half(torch.bfloat16)
        reducer.use(half)
        reducer.use(half)
        reducer.init_many(["wide", "narrow"], [torch.zeros(3), torch.zeros(3, dtype=torch.float16)])
        wide = torch.full((3,), 1.00390625)  # is 1 in bfloat16
        narrow = torch.full((3,), 1.0009765625, dtype=torch.float16)
        mean = reducer.submit("wide", wide.clone(), op="mean", compression=half).result()
        return (
            reducer.submit("wide", wide, compression=half).result().tolist(),
            reducer.submit("narrow", narrow, compression=half).result().tolist(),
            mean.tolist(),
        )

    assert each(2, work) == [([2.0] * 3, [2.001953125] * 3, [1.0] * 3)] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_are_summed_over_the_ranks_and_the_union_is_sorted(size: int) -> None:
    asked = [[3, 1, 3], [], [1, 5]]

    def mine(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(asked[rank], dtype=torch.int64), of(rank, len(asked[rank]), 2)

    def work(reducer: Reducer) -> Any:
        reducer.init("table", torch.zeros(6, 2))
        return reducer.rows("table", *mine(reducer.rank)).result()

    dense = torch.zeros(6, 2)
    for rank in range(size):
        dense.index_add_(0, *mine(rank))
    for indices, values in each(size, work):
        assert indices.tolist() == sorted({row for rank in range(size) for row in asked[rank]})
        torch.testing.assert_close(torch.zeros(6, 2).index_copy_(0, indices, values), dense)


def test_rows_may_be_reused_at_once() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init("table", torch.zeros(4))
        indices, values = torch.tensor([1, 2]), torch.ones(2)
        future = reducer.rows("table", indices, values)
        indices.zero_(), values.zero_()
        return [part.tolist() for part in future.result()]

    assert each(2, work) == [[[1, 2], [2.0, 2.0]]] * 2


def test_rows_of_different_keys_raise_on_every_rank_and_are_not_added() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(["a", "b"], [torch.zeros(4), torch.zeros(4)])
        with pytest.raises(CommunicationError, match="rows of different keys: key 'a' on rank 0; key 'b' on rank 1"):
            reducer.rows("ab"[reducer.rank], torch.tensor([1]), torch.ones(1)).result(10)
        with pytest.raises(RuntimeError, match="earlier operation of this communication thread failed"):
            reducer.rows("a", torch.tensor([1]), torch.ones(1)).result(10)
        return True

    assert each(2, work) == [True, True]


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (lambda rank: (["w"], [torch.zeros(3 + rank)]), r"key 'w': float32\[3\] on rank 0; .* float32\[4\] on rank 1"),
        (
            lambda rank: (["w"], [torch.zeros(3, dtype=[torch.float32, torch.float64][rank])]),
            r"key 'w': float32\[3\] on rank 0; .* float64\[3\] on rank 1",
        ),
        (
            lambda rank: (["ab"[rank]], [torch.zeros(3)]),
            r"key 'a': float32\[3\] on rank 0; key 'b': float32\[3\] on rank 1",
        ),
    ],
)
def test_keys_that_differ_between_ranks_raise_everywhere_and_are_named(mine: Any, text: str) -> None:
    def work(reducer: Reducer) -> None:
        with pytest.raises(CommunicationError, match=text):
            reducer.init_many(*mine(reducer.rank))

    each(2, work)


def test_a_key_that_one_rank_has_already_raises_everywhere() -> None:
    def work(reducer: Reducer) -> None:
        reducer.init("w", torch.zeros(3))
        with pytest.raises(ValueError, match="key 'w' is initialised already"):
            reducer.init(["w", "v"][reducer.rank], torch.zeros(3))

    each(2, work)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r: r.submit("x", torch.zeros(3)), ValueError, "key 'x' is not known.*call init first"),
        (lambda r: r.submit("w", torch.zeros(4)), ValueError, r"key 'w': expected float32\[3\] .* got float32\[4\]"),
        (lambda r: r.submit("w", torch.zeros(3), op="prod"), ValueError, "expected op 'sum', 'max', 'min' or 'mean'"),
        (lambda r: r.submit("i", torch.zeros(3, dtype=torch.int32), op="mean"), TypeError, "for 'mean', got int32"),
        (lambda r: r.submit("w", torch.zeros(3), compression=TwoBit(2)), ValueError, r"announced with use\(\)"),
        (lambda r: r.submit("w", torch.zeros(4), compression=TwoBit()), ValueError, r"got float32\[4\]"),
        (lambda r: r.submit("w", torch.zeros(3), op="max", compression=TwoBit()), ValueError, "expected op 'sum'"),
        (
            lambda r: r.submit("i", torch.zeros(3, dtype=torch.int32), compression=TwoBit()),
            TypeError,
            "2bit compression of key 'i': expected float32, got int32",
        ),
        (lambda r: r.init_many(["a", "a"], [torch.zeros(1)] * 2), ValueError, "key 'a' is initialised already"),
        (lambda r: r.init_many(["a"], []), ValueError, "expected one value for each key, got 0 for 1"),
        (lambda r: r.init("a", torch.zeros(2, dtype=torch.bool)), TypeError, "key 'a': expected .*, got torch.bool"),
        (lambda r: r.rows("x", torch.tensor([0]), torch.ones(1)), ValueError, "key 'x' is not known"),
        (lambda r: r.rows("s", torch.tensor([0]), torch.ones(1)), ValueError, "got a key without dimensions"),
        (lambda r: r.rows("w", torch.tensor([3]), torch.ones(1)), ValueError, r"indices in \[0, 3\), got 3 to 3"),
        (lambda r: r.rows("w", torch.tensor([-1]), torch.ones(1)), ValueError, "got -1 to -1"),
        (lambda r: r.rows("w", torch.tensor([0, 1]), torch.ones(1)), ValueError, r"got \[2\] and \[1\]"),
        (
            lambda r: r.rows("w", torch.tensor([0]), torch.ones(1).double()),
            TypeError,
            "expected int64 indices and float32",
        ),
        (lambda r: r.rows("w", torch.tensor([0], dtype=torch.int32), torch.ones(1)), TypeError, "got int32"),
    ],
)
def test_what_does_not_fit_raises_before_anything_is_sent(call: Any, error: type[Exception], text: str) -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(["w", "i", "s"], [torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(())])
        reducer.use(TwoBit())
        with pytest.raises(error, match=text):
            call(reducer)
        return reducer.submit("w", torch.ones(3)).result().tolist()

    assert each(2, work) == [[2.0] * 3] * 2


def test_ranks_that_want_other_operations_raise_everywhere() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init("w", torch.zeros(3))
        with pytest.raises(CommunicationError, match=r"key 'w'.*sum on rank 0 and max on rank 1"):
            reducer.submit("w", torch.ones(3), op=["sum", "max"][reducer.rank]).result(10)  # type: ignore[arg-type]
        return True

    assert each(2, work) == [True, True]


def test_ranks_that_compress_differently_raise_everywhere() -> None:
    def work(reducer: Reducer) -> None:
        with pytest.raises(
            ValueError, match=r"TwoBit\(threshold=1.0\) on rank 0 and TwoBit\(threshold=2.0\) on rank 1"
        ):
            reducer.use(TwoBit(1.0 + reducer.rank))

    each(2, work)


def test_reducers_side_by_side_have_keys_of_their_own() -> None:
    def work(group: Group) -> Any:
        one, other = Reducer(group), Reducer(group)
        one.init("w", torch.zeros(2)), other.init("w", torch.zeros(3))
        order = [(one, 2), (other, 3)][:: 1 if group.rank else -1]
        futures = [reducer.submit("w", torch.ones(size)) for reducer, size in order]
        sizes = sorted(len(future.result()) for future in futures)
        one.close(), other.close()
        return sizes

    assert run_threads(2, work) == [[2, 3], [2, 3]]


def test_closing_fails_what_is_outstanding_on_every_rank_in_bounded_time() -> None:
    def work(reducer: Reducer) -> Any:
        reducer.init_many(["w", "table"], [torch.zeros(3), torch.zeros(3)])
        reducer.barrier()
        if reducer.rank == 0:
            return True  # closes, while the other one waits
        rows = reducer.rows("table", torch.tensor([1]), torch.ones(1))
        with pytest.raises(CommunicationError):  # at once, if the other has closed before
            reducer.submit("w", torch.ones(3)).result(20)
        return type(rows.exception(20))

    assert each(2, work, timeout=2.0)[1] is CommunicationError


def _between_processes(group: Group) -> Any:
    reducer = Reducer(group)
    reducer.init_many(["w", "table"], [torch.full((1000,), float(group.rank)), torch.zeros(9, 2)])
    reducer.use(TwoBit(0.5))
    plain = reducer.submit("w", torch.full((1000,), 1.0 + group.rank))
    coded = reducer.submit("w", torch.full((1000,), 1.0), compression=TwoBit(0.5))
    rows = reducer.rows("table", torch.tensor([group.rank, 7]), torch.ones(2, 2))
    found = plain.result()[0].item(), coded.result()[-1].item(), *(part.tolist() for part in rows.result())
    reducer.barrier()
    reducer.close()
    return found


def test_processes_reduce_as_threads_do() -> None:
    expected = (3.0, 1.0, [0, 1, 7], [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]])
    assert run_processes(2, _between_processes) == [expected, expected]
