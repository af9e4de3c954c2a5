"""The any-order engine's results are torch's, whatever is submitted when; and what it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.any_order.engine import AnyOrderEngine
from tests.comm.lanes.layouts import strided
from tests.head.cases import errors_of
from tests.ranks import run_threads

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
SHAPES = [(), (1,), (5,), (0,), (3, 4), (2, 3, 2, 2), (7, 1)]
OPS = ["sum", "max", "min"]


def _values(case: dict[str, Any], rank: int, index: int, number: int) -> Tensor:
    """Small whole numbers: exact in every dtype, in any order."""
    shape, dtype = case["kinds"][index]
    seed = 10_000 * number + 100 * rank + index
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 3))
    kinds = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=7))
    indices = draw(st.lists(st.sampled_from(range(len(kinds))), max_size=12))
    return {
        "ranks": ranks,
        "kinds": kinds,
        "limit": draw(st.sampled_from([1, 16, 60, 1 << 20])),
        # Each rank submits the same tensors equally often, in an order of its own.
        "orders": [draw(st.permutations(indices)) for _ in range(ranks)],
        "ops": draw(st.lists(st.sampled_from(OPS), min_size=len(kinds), max_size=len(kinds))),
        "layouts": draw(st.lists(st.integers(0, 3), min_size=len(kinds), max_size=len(kinds))),
        "scales": [draw(st.lists(st.sampled_from([1.0, 0.5]), min_size=13, max_size=13)) for _ in range(ranks)],
        "priorities": [draw(st.lists(st.integers(-2, 2), min_size=13, max_size=13)) for _ in range(ranks)],
    }


def _scale(case: dict[str, Any], rank: int, index: int, number: int) -> float:
    scale: float = case["scales"][rank][number]
    return scale if case["kinds"][index][1] in FLOATS else 1.0


def _play(group: Any, case: dict[str, Any]) -> dict[tuple[int, int], Tensor]:
    engine = AnyOrderEngine(group, bucket_bytes=case["limit"], timeout=30)
    engine.register([f"tensor {i}" for i in range(len(case["kinds"]))], [_values(case, 0, i, 0) for i in _all(case)])
    numbers, futures = [0] * len(case["kinds"]), {}
    for index in case["orders"][group.rank]:
        number = numbers[index] = numbers[index] + 1
        tensor = strided(_values(case, group.rank, index, number), case["layouts"][index])
        strides = tensor.stride()
        future = engine.submit(
            index,
            tensor,
            op=case["ops"][index],
            scale=_scale(case, group.rank, index, number),
            priority=case["priorities"][group.rank][number],
        )
        futures[index, number] = (future, tensor, strides)
    engine.wait_all()
    engine.close()
    for future, tensor, strides in futures.values():
        assert future.result(0) is tensor and tensor.stride() == strides
    return {key: tensor for key, (_, tensor, _) in futures.items()}


def _all(case: dict[str, Any]) -> range:
    return range(len(case["kinds"]))


@settings(max_examples=50)
@given(_cases())
def test_results_are_those_of_torch_in_any_order(case: dict[str, Any]) -> None:
    combine = {"sum": lambda rows: rows.sum(0), "max": lambda rows: rows.amax(0), "min": lambda rows: rows.amin(0)}
    per_rank = run_threads(case["ranks"], _play, case)
    for (index, number), result in per_rank[0].items():
        everyone = [
            _values(case, rank, index, number).double() * _scale(case, rank, index, number)
            for rank in range(case["ranks"])
        ]
        expected = combine[case["ops"][index]](torch.stack(everyone)).to(result.dtype)
        for results in per_rank:
            assert torch.equal(results[index, number], expected), (index, number)


def _engine(group: Any, *names: str, **settings: Any) -> AnyOrderEngine:
    """An engine with tensors of two elements."""
    engine = AnyOrderEngine(group, **settings)
    assert engine.register(names, [torch.empty(2)] * len(names)) == range(len(names))
    return engine


def test_tensors_alone_in_their_bucket_large_frozen_and_trained_ones() -> None:
    def work(group: Any) -> None:
        engine = AnyOrderEngine(group, bucket_bytes=1000)
        large = torch.full((100_000,), 1.0 + group.rank)
        with torch.inference_mode():
            frozen = torch.ones(2)
        trained = torch.ones(2, requires_grad=True)
        tensors = [large, frozen, trained, torch.full((2,), torch.nan if group.rank else torch.inf)]
        engine.register(list("abcd"), tensors)
        for index, tensor in enumerate(tensors):
            engine.submit(index, tensor, scale=0.5).result(10)
        assert bool((large == 1.5).all()) and frozen.tolist() == trained.tolist() == [1, 1]
        assert tensors[3].isnan().all()
        engine.close()

    run_threads(2, work)


def test_one_tensor_may_be_submitted_again_and_again_with_the_sums_of_sums() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "a", "b")
        tensor = torch.ones(2)
        futures = [engine.submit(0, tensor) for _ in range(5)]
        engine.submit(1, torch.ones(2))
        engine.wait_all()
        assert tensor.tolist() == [3**5] * 2 and all(future.result(0) is tensor for future in futures)
        assert not futures[0].cancel()
        engine.close()

    run_threads(3, work)


def test_threads_of_a_rank_submit_side_by_side() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, *map(str, range(6)))
        results: list[list[float]] = []

        def submit(indices: range) -> None:
            for number in range(20):
                for index in indices:
                    tensor = torch.full((2,), float(number * (group.rank + 1) + index))
                    results.append([float(number * 3 + 2 * index), *engine.submit(index, tensor).result(30).tolist()])

        threads = [threading.Thread(target=submit, args=(range(first, 6, 3),)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 120 and all(wanted == a == b for wanted, a, b in results)
        engine.wait_all()
        engine.close()

    run_threads(2, work)


def test_more_tensors_may_be_registered_while_others_travel() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "a")
        waiting = None if group.rank else engine.submit(0, torch.ones(2))
        for number in range(1, 20):
            assert engine.register([f"k{number}"], [torch.empty(number)]) == range(number, number + 1)
            order = range(1, number + 1) if group.rank else range(number, 0, -1)
            tensors = {index: torch.full((index,), 1.0 + group.rank) for index in order}
            futures = [engine.submit(index, tensor) for index, tensor in tensors.items()]
            assert all(bool((future.result(30) == 3).all()) for future in futures)
        engine.register([], [])
        waiting = waiting or engine.submit(0, torch.ones(2))
        assert waiting.result(30).tolist() == [2, 2]
        engine.close()

    run_threads(2, work)


def test_of_what_is_agreed_together_the_highest_priority_arrives_first() -> None:
    # Of each pass, rank and tensor. The higher one counts.
    priorities = [([0, 0, 5, -1, 2, 2], [0, 3, 0, -1, 2, 2]), ([0, 1, 2, 3, 4, 4], [0, -9, 2, 3, 4, -4])]

    def work(group: Any) -> list[list[int]]:
        engine = _engine(group, *map(str, range(6)), bucket_bytes=1)  # each in a bucket of its own
        passes = []
        for priority in priorities:
            # The first tensor holds the communication thread until all others have been submitted.
            arrived: list[int] = []
            gate = threading.Event()
            engine.submit(0, torch.ones(2)).add_done_callback(lambda _, gate=gate: gate.wait(30))  # type: ignore[misc]
            own = priority[group.rank]
            order = [4, 2, 3, 5, 1] if group.rank else [1, 2, 3, 4, 5]
            if group.rank:
                futures = [engine.submit(index, torch.ones(2), priority=own[index]) for index in order]
            else:
                tensors = [torch.ones(2) for _ in order]
                futures = engine.submit_many(order, tensors, priority=[own[index] for index in order])
            for index, future in zip(order, futures, strict=True):
                future.add_done_callback(lambda _, index=index, to=arrived: to.append(index))  # type: ignore[misc]
            gate.set()
            engine.wait_all()
            passes.append(arrived)
        engine.close()
        return passes

    assert run_threads(2, work) == [[[2, 1, 4, 5, 3], [4, 5, 3, 2, 1]]] * 2


@pytest.mark.gpu
def test_cuda_tensors_are_read_after_their_stream_and_may_be_used_on_any() -> None:
    engine = AnyOrderEngine(hp.Group.alone())
    tensors = [torch.zeros(1000, device="cuda") for _ in range(3)]
    engine.register(list("abc"), tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors:
            tensor.fill_(3)
        futures = [engine.submit(index, tensor, scale=0.5) for index, tensor in enumerate(tensors)]
    assert all(future.result(30).unique().tolist() == [1.5] for future in futures)
    engine.close()


def test_different_operations_fail_on_every_rank_and_the_engine_goes_on() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "loss", "weight")
        other = engine.submit(1, torch.ones(2))
        future = engine.submit(0, torch.ones(2), op="max" if group.rank == 1 else "sum")
        with pytest.raises(hp.CommunicationError, match=r"loss failed.* sum on ranks 0, 2 and max on rank 1"):
            future.result(30)
        with pytest.raises(hp.CommunicationError, match="different operations"):
            engine.wait_all()
        engine.wait_all()
        assert engine.submit(0, torch.ones(2), op="max").result(30).tolist() == [1, 1]
        assert other.result(30).tolist() == [3, 3]
        engine.close()

    run_threads(3, work)


def test_mistakes_are_refused_at_once_and_change_nothing() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "weight", "bias")
        engine.register(["count"], [torch.empty(3, dtype=torch.int64)])
        right = torch.ones(2)
        for wrong, text in (
            (torch.ones(3), r"weight: expected float32\[2\] on cpu as registered, got float32\[3\] on cpu"),
            (torch.ones(2).double(), r"got float64\[2\]"),
            (torch.ones(2, device="meta"), "on meta"),
            (torch.ones(1).expand(2), r"own memory.*call .contiguous\(\)"),
        ):
            with pytest.raises(ValueError, match=text):
                engine.submit(0, wrong)
        for index in (-1, 3):
            with pytest.raises(ValueError, match=f"one of 3 registered tensors, got {index}"):
                engine.submit(index, right)
        for options, text in (
            ({"op": "mean"}, "weight: expected op 'sum', 'max' or 'min', got 'mean'"),
            ({"scale": float("nan")}, "weight: expected a finite scale"),
            ({"priority": 1 << 63}, "weight: expected a priority within 64 bits"),
        ):
            with pytest.raises(ValueError, match=text):
                engine.submit(0, right, **options)
        with pytest.raises(ValueError, match=r"count: .*1 for whole numbers, got 0.5 for torch.int64"):
            engine.submit(2, torch.ones(3, dtype=torch.int64), scale=0.5)
        assert engine.submit(0, right).result(30).tolist() == [2, 2]
        engine.close()

    run_threads(2, work)


def test_registrations_that_differ_are_named_on_every_rank() -> None:
    def names(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a", "x" if group.rank == 1 else "b"], [torch.empty(2)] * 2)

    def shapes(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a"], [torch.empty(3 if group.rank == 1 else 2)])

    def dtypes(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a"], [torch.empty(2, dtype=torch.float64 if group.rank == 1 else torch.float32)])

    def complex_ones(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a"], [torch.empty(2, dtype=torch.complex64 if group.rank == 1 else torch.float32)])

    def devices(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a"], [torch.empty(2, device="meta" if group.rank == 1 else "cpu")])

    def too_few(group: Any, engine: AnyOrderEngine) -> None:
        engine.register(["a"], [torch.empty(2)] * (2 if group.rank == 1 else 1))

    cases = [
        (names, hp.CommunicationError, r"position 1: b: float32\[2\] on ranks 0, 2; x: float32\[2\] on rank 1"),
        (shapes, hp.CommunicationError, r"a: float32\[2\] on ranks 0, 2; a: float32\[3\] on rank 1"),
        (dtypes, hp.CommunicationError, r"float32\[2\] on ranks 0, 2; a: float64\[2\] on rank 1"),
        (complex_ones, TypeError, "a: expected float32, .* got torch.complex64"),
        (devices, ValueError, "one device, got .*cpu.*meta"),
        (too_few, ValueError, "got 1 names for 2 tensors"),
    ]

    def work(group: Any) -> None:
        engine = _engine(group, "first")
        for register, kind, text in cases:
            with pytest.raises(kind, match=text):
                register(group, engine)
        assert engine.submit(0, torch.ones(2)).result(30).tolist() == [3, 3]
        engine.close()

    run_threads(3, work)


def test_arguments_that_differ_or_make_no_sense_are_refused() -> None:
    for error in errors_of(2, lambda group: AnyOrderEngine(group, bucket_bytes=100 + group.rank)):
        assert type(error) is ValueError and "same bucket_bytes on every rank" in str(error)
    for wrong in ({"bucket_bytes": 0}, {"stall_seconds": 0}, {"timeout": -1}, {"timeout": float("nan")}):
        with pytest.raises(ValueError, match="above 0"):
            AnyOrderEngine(hp.Group.alone(), **wrong)  # type: ignore[arg-type]


def test_a_callback_may_submit_but_not_wait() -> None:
    def work(group: Any) -> None:
        engine = _engine(group, "a", "b")
        second: Future[Future[Tensor]] = Future()
        refused: Future[BaseException] = Future()

        def on_arrival(_: Future[Tensor]) -> None:
            second.set_result(engine.submit(1, torch.ones(2)))
            try:
                engine.wait_all()
            except RuntimeError as error:
                refused.set_result(error)

        engine.submit(0, torch.ones(2)).add_done_callback(on_arrival)
        assert second.result(30).result(30).tolist() == [2, 2]
        assert "expected a thread of your own" in str(refused.result(30))
        engine.close()

    run_threads(2, work)


def test_two_engines_and_groups_of_one() -> None:
    def work(group: Any) -> None:
        engines = [_engine(group, "a") for _ in range(2)]
        tensors = [torch.full((2,), float(10**number)) for number in range(2)]
        for number in (0, 1) if group.rank else (1, 0):
            engines[number].submit(0, tensors[number])
        for engine in engines:
            engine.wait_all()
            engine.close()
        assert [tensor[0].item() for tensor in tensors] == [3.0, 30.0]

    run_threads(3, work)
    alone = _engine(hp.Group.alone(), "a", "b")
    assert alone.submit(1, torch.ones(2), scale=0.25, op="max").result(30).tolist() == [0.25, 0.25]
    alone.close()
