"""The engine's sums are torch's sums, whatever is submitted where and when; and what happens when a rank is lost."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.kernels.pack_table import PackTable
from tests.comm.lanes.layouts import strided
from tests.head.cases import errors_of
from tests.ranks import run_program, run_threads

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (5,), (0,), (3, 4), (2, 3, 2, 2), (7, 1)]


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers: their sums over a few ranks are exact in every dtype, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def _rounds(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 3))
    kinds = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=8))
    # For each round and rank: the tensors that are submitted, in the order of submission, and their layouts.
    subsets = st.lists(st.sampled_from(range(len(kinds))), unique=True)
    return {
        "ranks": ranks,
        "kinds": kinds,
        "order": draw(st.permutations(range(len(kinds)))),
        "limit": draw(st.sampled_from([1, 16, 60, 1 << 20])),
        "scale": draw(st.sampled_from([1.0, 0.5])),
        "submitted": draw(st.lists(st.tuples(*[subsets] * ranks), min_size=1, max_size=3)),
        "layouts": draw(st.lists(st.integers(0, 3), min_size=len(kinds), max_size=len(kinds))),
    }


def _play(group: Any, case: dict[str, Any]) -> list[dict[int, Tensor]]:
    engine = Engine(group, plan=Plan(bucket_bytes=case["limit"]), scale=case["scale"])
    names = [f"tensor {index}" for index in range(len(case["kinds"]))]
    engine.register(names, [torch.empty(shape, dtype=dtype) for shape, dtype in case["kinds"]], case["order"])
    results = []
    for number, submitted in enumerate(case["submitted"]):
        mine = {
            index: strided(_values(*case["kinds"][index], _seed(number, group.rank, index)), case["layouts"][index])
            for index in submitted[group.rank]
        }
        for index, tensor in mine.items():
            assert not engine.submitted(index)
            engine.submit(index, tensor)
            assert engine.submitted(index)
        received = engine.flush()
        assert not received.keys() & mine.keys()
        results.append(mine | received)
    engine.close()
    return results


def _seed(number: int, rank: int, index: int) -> int:
    return 10_000 * number + 100 * rank + index


@settings(max_examples=60)
@given(_rounds())
def test_sums_are_those_of_torch_on_every_rank(case: dict[str, Any]) -> None:
    per_rank = run_threads(case["ranks"], _play, case)
    for number, submitted in enumerate(case["submitted"]):
        for index, (shape, dtype) in enumerate(case["kinds"]):
            senders = [rank for rank in range(case["ranks"]) if index in submitted[rank]]
            if not senders:
                assert all(index not in results[number] for results in per_rank)
                continue
            parts = [_values(shape, dtype, _seed(number, rank, index)).double() for rank in senders]
            expected = (torch.stack(parts).sum(0) * case["scale"]).to(dtype)
            for results in per_rank:
                assert results[number][index].dtype == dtype
                assert torch.equal(results[number][index], expected)


def test_the_submitted_tensor_itself_holds_the_sum_and_keeps_its_strides() -> None:
    def work(group: Any) -> None:
        engine = Engine(group)
        engine.register(["image"], [torch.empty(2, 3, 4, 5)])
        tensor = torch.full((2, 3, 4, 5), float(group.rank + 1)).contiguous(memory_format=torch.channels_last)
        strides = tensor.stride()
        engine.submit(0, tensor)
        assert engine.flush() == {}
        assert tensor.stride() == strides and bool((tensor == 3).all())

    run_threads(2, work)


def test_nothing_registered_or_submitted_is_an_empty_round() -> None:
    def work(group: Any) -> None:
        engine = Engine(group)
        assert engine.flush() == {}
        engine.register([], [])
        assert engine.flush() == {}
        engine.register(["a"], [torch.empty(2)])
        assert engine.flush() == {}

    run_threads(2, work)


def test_infinities_and_nan_of_one_rank_reach_all() -> None:
    def work(group: Any) -> list[float]:
        engine = Engine(group)
        engine.register(["a"], [torch.empty(3)])
        tensor = torch.tensor([1.0, torch.inf, torch.nan]) if group.rank == 1 else torch.ones(3)
        engine.submit(0, tensor)
        engine.flush()
        return tensor.tolist()

    for values in run_threads(2, work):
        assert values[:2] == [2.0, torch.inf] and values[2] != values[2]


def test_a_second_submission_in_one_round_is_refused_and_changes_nothing() -> None:
    def work(group: Any) -> None:
        engine = Engine(group)
        engine.register(["weight", "bias"], [torch.empty(2), torch.empty(1)])
        first = torch.ones(2)
        engine.submit(0, first)
        with pytest.raises(RuntimeError, match="weight was submitted twice"):
            engine.submit(0, torch.zeros(2))
        engine.flush()
        assert first.tolist() == [2, 2]
        engine.submit(0, first)  # a new round
        engine.flush()
        assert first.tolist() == [4, 4]

    run_threads(2, work)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3).bfloat16()]
)
def test_a_tensor_other_than_registered_is_refused_at_once(wrong: Tensor) -> None:
    def work(group: Any) -> None:
        engine = Engine(group)
        engine.register(["weight"], [torch.empty(2, 3)])
        with pytest.raises(ValueError, match=r"weight: expected float32\[2, 3\] on cpu as registered, got"):
            engine.submit(0, wrong)

    run_threads(2, work)


def test_what_cannot_be_summed_is_refused_when_registered() -> None:
    def work(group: Any) -> None:
        engine = Engine(group)
        with pytest.raises(TypeError, match=r"counts: expected float32, .* got torch.int64"):
            engine.register(["counts"], [torch.empty(2, dtype=torch.int64)])
        with pytest.raises(ValueError, match=r"one device, got .*cpu.*meta"):
            engine.register(["a", "b"], [torch.empty(2), torch.empty(2, device="meta")])

    run_threads(2, work)


def test_ranks_that_register_different_things_all_learn_of_it() -> None:
    def names(group: Any) -> None:
        Engine(group).register(["a" if group.rank else "b"], [torch.empty(2)])

    def order(group: Any) -> None:
        Engine(group).register(["a", "b"], [torch.empty(2)] * 2, [1, 0] if group.rank else [0, 1])

    def limits(group: Any) -> None:
        Engine(group, plan=Plan(bucket_bytes=100 + group.rank)).register(["a"], [torch.empty(2)])

    def scales(group: Any) -> None:
        Engine(group, scale=1.0 + group.rank).register(["a"], [torch.empty(2)])

    for work, kind in ((names, hp.CommunicationError), (order, hp.CommunicationError)):
        assert all(type(error) is kind for error in errors_of(2, work))
    for work, name in ((limits, "bucket_bytes"), (scales, "scale")):
        for error in errors_of(2, work):
            assert type(error) is ValueError and f"same {name} on every rank" in str(error)


def test_a_rank_that_never_flushes_ends_in_an_error_that_names_the_tensors() -> None:
    def work(group: Any) -> Exception | None:
        engine = Engine(group, plan=Plan(bucket_bytes=8))
        engine.register(["stem", "neck", "tail"], [torch.empty(2), torch.empty(1), torch.empty(1)])
        if group.rank == 1:
            return None
        engine.submit(0, torch.ones(2))
        with pytest.raises(
            hp.CommunicationError, match=r"all_reduce of the gradients of stem \.\. stem failed"
        ) as caught:
            engine.flush()
        assert (caught.value.rank, caught.value.operation) == (group.rank, "all_reduce")
        # The ranks are out of step now: nothing may travel as if it were the next round.
        engine.submit(1, torch.ones(1))
        with pytest.raises(RuntimeError, match="earlier operation"):
            engine.flush()
        return caught.value

    first, second, third = run_threads(3, work, timeout=1.0)
    assert second is None and first is not None and third is not None


def test_a_rank_whose_packing_fails_sends_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second bucket would otherwise meet the other rank's first one, which has the same size."""
    original, poisoned = PackTable.pack, torch.full((2,), 7.0)

    def pack(table: PackTable, tensors: Any, *arguments: Any) -> Any:
        if tensors[0] is poisoned:
            raise MemoryError("no memory")
        return original(table, tensors, *arguments)

    monkeypatch.setattr(PackTable, "pack", pack)

    def work(group: Any) -> Exception | None:
        engine = Engine(group, plan=Plan(bucket_bytes=8))
        engine.register(["stem", "tail"], [torch.empty(2), torch.empty(2)])
        engine.submit(0, poisoned if group.rank == 0 else torch.ones(2))
        engine.submit(1, torch.ones(2))
        try:
            engine.flush()
        except Exception as error:
            return error
        return None

    first, second = run_threads(2, work, timeout=1.0)
    assert type(first) is MemoryError
    assert isinstance(second, hp.CommunicationError) and "stem" in second.tensor


def _engine_threads() -> int:
    return sum(thread.name == "hybridpar-engine" for thread in threading.enumerate())


def _await_engine_threads(count: int) -> None:
    deadline = time.monotonic() + 10
    while _engine_threads() > count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert _engine_threads() <= count


def test_the_thread_ends_after_close_and_when_the_engine_is_dropped() -> None:
    gc.collect()
    before = _engine_threads()

    def closed(group: Any) -> None:
        engine = Engine(group)
        engine.register(["a"], [torch.empty(2)])
        engine.flush()
        engine.close()
        group.barrier()  # an error on one rank makes whatever the other one still does fail
        engine.submit(0, torch.ones(2))

    def dropped(group: Any) -> None:
        engine = Engine(group)
        engine.register(["a"], [torch.empty(2)])
        engine.submit(0, torch.ones(2))
        engine.flush()

    def lost(group: Any) -> None:
        engine = Engine(group)
        engine.register(["a"], [torch.empty(2)])
        if group.rank == 0:
            with pytest.raises(hp.CommunicationError):
                engine.flush()

    for error in errors_of(2, closed):
        assert isinstance(error, RuntimeError) and "closed" in str(error)
    _await_engine_threads(before)
    run_threads(2, dropped)
    _await_engine_threads(before)
    run_threads(2, lost, timeout=0.3)
    _await_engine_threads(before)


def test_two_engines_at_once_keep_their_rounds_apart() -> None:
    def work(group: Any) -> None:
        engines = [Engine(group) for _ in range(2)]
        tensors = [torch.full((3,), float(10**number)) for number in range(2)]
        for engine in engines:
            engine.register(["a"], [torch.empty(3)])
        for engine, tensor in zip(engines, tensors, strict=True):
            engine.submit(0, tensor)
        for engine in reversed(engines):
            engine.flush()
        assert [tensor[0].item() for tensor in tensors] == [3.0, 30.0]

    run_threads(3, work)


PROGRAM = """
import os, signal, sys, time, torch, hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
torch.set_num_threads(1)
group = hp.init(timeout=20)
engine = Engine(group, plan=Plan(bucket_bytes=8))
engine.register(["stem", "tail"], [torch.empty(2), torch.empty(2)])
for number in range(3):
    tensors = [torch.full((2,), float(group.rank + number)) for _ in range(2)]
    for index in (1, 0) if group.rank else (0, 1):
        engine.submit(index, tensors[index])
    engine.flush()
    assert all(tensor.tolist() == [3.0 * number + 3] * 2 for tensor in tensors), tensors
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
started = time.monotonic()
engine.submit(0, torch.ones(2))
try:
    engine.flush()
except hp.CommunicationError as error:
    print(f"<{error.rank} {error.operation} {error.tensor} {time.monotonic() - started < 25}>", flush=True)
os._exit(0)
"""


def test_killed_gloo_rank_is_reported_by_the_survivors() -> None:
    _, outputs = run_program(PROGRAM, 3)
    for rank in (0, 2):
        assert f"<{rank} all_reduce the gradients of stem .. stem True>" in outputs[rank][0], outputs[rank]
