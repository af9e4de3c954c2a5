"""The last bucket travels on the caller's thread where the caller waits for it at once, and else on its track's."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.engine import engine as engine_module
from hybridpar.comm.engine import held_back
from hybridpar.comm.engine.codec import DenseCodec
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.errors import CommunicationError
from tests.head.cases import errors_of
from tests.ranks import run_processes, run_threads


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that exchanged a bucket, in the order in which they did."""
    found: list[int] = []
    original = DenseCodec.exchange

    def exchange(self: DenseCodec, lane: Any) -> None:
        found.append(threading.get_ident())
        original(self, lane)

    monkeypatch.setattr(DenseCodec, "exchange", exchange)
    return found


def _engine(group: Any, tensors: int = 1, **arguments: Any) -> Engine:
    engine = Engine(group, **arguments)
    engine.register([f"layer {i}" for i in range(tensors)], [torch.empty(2) for _ in range(tensors)])
    return engine


def test_the_caller_sends_what_it_waited_for_at_once_in_the_round_before(
    monkeypatch: pytest.MonkeyPatch, senders: list[int]
) -> None:
    def work(group: Any) -> list[bool]:
        engine = _engine(group)
        for seconds in (0.0, math.inf, math.inf, 0.0, 0.0):  # how long a caller that comes at once may take
            monkeypatch.setattr(engine_module, "_AT_ONCE", seconds)
            tensor = torch.ones(2)
            engine.submit(0, tensor)
            engine.flush()
            assert tensor.tolist() == [1.0, 1.0]
        assert engine.report()["buckets"][0]["sent"] > 0
        return [sender == threading.get_ident() for sender in senders]

    assert run_threads(1, work) == [[False, False, True, True, False]]


def test_a_bucket_that_only_flush_completes_is_sent_by_the_caller(senders: list[int]) -> None:
    def work(group: Any) -> list[bool]:
        engine = _engine(group, 2)
        engine.submit(0, torch.ones(2))
        engine.flush()
        return [sender == threading.get_ident() for sender in senders]

    assert run_threads(1, work) == [[True]]


def test_it_goes_to_its_track_where_the_round_is_closed_or_another_bucket_sent(
    monkeypatch: pytest.MonkeyPatch, senders: list[int]
) -> None:
    monkeypatch.setattr(engine_module, "_AT_ONCE", math.inf)

    def work(group: Any) -> list[bool]:
        first, second = _engine(group), _engine(group)
        for engine in (first, second):
            engine.flush()
        senders.clear()
        first.submit(0, torch.ones(2))
        second.submit(0, torch.ones(2))
        first.flush()
        second.flush()
        on_track = [sender != threading.get_ident() for sender in senders]
        senders.clear()
        first.submit(0, torch.ones(2))
        first.close_round()
        first.deliver(0)
        return [*on_track, senders != [threading.get_ident()]]

    assert run_threads(1, work) == [[True, True, True]]


def test_a_bucket_behind_others_is_held_back_only_when_they_are_done(
    monkeypatch: pytest.MonkeyPatch, senders: list[int]
) -> None:
    monkeypatch.setattr(engine_module, "_AT_ONCE", math.inf)

    def work(group: Any) -> None:
        engine = _engine(group, 2, plan=Plan(8, tracks=1))
        engine.submit(0, torch.ones(2))
        engine.submit(1, torch.ones(2))
        engine.flush()
        busy, go_on = threading.Event(), threading.Event()

        def occupy() -> None:
            busy.set()
            assert go_on.wait(30)

        senders.clear()
        engine._rounds[0].track.submit(occupy)
        assert busy.wait(30)
        engine.submit(0, torch.ones(2))
        engine.submit(1, torch.ones(2))
        go_on.set()
        engine.flush()
        assert len(set(senders)) == 1 and threading.get_ident() not in senders

    run_threads(1, work)


def _flush_in_opposite_orders(group: Any) -> list[list[float]]:
    engine_module._AT_ONCE = math.inf
    engines = [_engine(group), _engine(group)]
    for engine in engines:
        engine.flush()
    tensors = [torch.full((2,), 1.0 + group.rank), torch.full((2,), 10.0)]
    order = [0, 1] if group.rank == 0 else [1, 0]
    for index in order:
        engines[index].submit(0, tensors[index])
    for index in order:
        engines[index].flush()
    return [tensor.tolist() for tensor in tensors]


def test_ranks_may_flush_several_engines_in_different_orders() -> None:
    assert run_processes(2, _flush_in_opposite_orders) == [[[3.0, 3.0], [20.0, 20.0]]] * 2


def test_what_goes_wrong_on_the_callers_thread_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_AT_ONCE", math.inf)
    original = DenseCodec.exchange

    def work(group: Any) -> None:
        engine = _engine(group)
        engine.flush()

        def exchange(self: DenseCodec, lane: Any) -> None:
            if lane.rank == 0:
                raise MemoryError("no memory")
            original(self, lane)

        group.barrier()
        monkeypatch.setattr(DenseCodec, "exchange", exchange)
        engine.submit(0, torch.ones(2))
        try:
            engine.flush()
        finally:
            assert engine.failed
            with pytest.raises(RuntimeError, match="earlier operation of this engine failed"):
                engine.submit(0, torch.ones(2))

    first, second = errors_of(2, work)
    assert isinstance(first, MemoryError)
    assert isinstance(second, CommunicationError) and "layer 0" in second.tensor


def test_a_closed_engine_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_AT_ONCE", math.inf)

    def work(group: Any) -> None:
        engine = _engine(group)
        engine.flush()
        engine.close()
        with pytest.raises(RuntimeError, match="expected an open communication thread"):
            engine.submit(0, torch.ones(2))
        closed, other = _engine(group), _engine(group)
        closed.flush()
        closed.submit(0, torch.ones(2))  # is held back
        closed.close()
        tensor = torch.ones(2)
        other.submit(0, tensor)
        other.flush()
        assert tensor.tolist() == [1.0, 1.0]

    run_threads(1, work)


class Meet(torch.autograd.Function):
    """The identity, in whose backward pass a rank meets those of another group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: hp.Group) -> Tensor:
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.group.barrier()
        return gradients[0], None


def _in_a_ring(group: hp.Group) -> None:
    """Rank 0 waits for rank 2, which waits for rank 1, which waits for the gradients of rank 0."""
    pairs = {pair: group.split(pair) for pair in ((0, 1), (0, 2), (1, 2)) if group.rank in pair}
    parallel = hp.DataParallel(nn.Linear(4, 4), group=pairs[0, 1]) if group.rank < 2 else None
    for _ in range(30):
        if parallel is None:
            pairs[1, 2].barrier()
            pairs[0, 2].barrier()
            continue
        parallel.zero_grad()
        inputs = torch.ones(2, 4, requires_grad=True)
        parallel(Meet.apply(inputs, pairs[0, 2]) if group.rank == 0 else inputs).sum().backward()
        if group.rank == 1:
            pairs[1, 2].barrier()


def test_ranks_that_wait_for_each_other_elsewhere_are_not_held_up() -> None:
    run_processes(3, _in_a_ring, timeout=50)


def test_what_is_held_for_long_is_handed_over() -> None:
    handed_over = threading.Event()

    class Bucket:
        def hand_over(self) -> None:
            handed_over.set()

    started = time.monotonic()
    bucket = Bucket()
    held_back.hold(bucket)
    assert handed_over.wait(5)
    assert time.monotonic() - started >= held_back._LOOK
    assert not held_back.take(bucket)


def test_the_thread_that_looks_after_them_ends_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_back, "_LOOK", 0.001)
    for _ in range(2):
        test_what_is_held_for_long_is_handed_over()
        end = time.monotonic() + 10
        while any(thread.name == "hybridpar-held-back" for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_one_bucket_is_held_back_at_most() -> None:
    handed_over = []

    class Bucket:
        def __init__(self, name: str) -> None:
            self.name = name

        def hand_over(self) -> None:
            handed_over.append(self.name)

    first, second = Bucket("first"), Bucket("second")
    held_back.hold(first)
    held_back.hold(second)
    assert handed_over == ["first"]
    assert not held_back.take(first)
    assert held_back.take(second)
    assert not held_back.take(second)
    held_back.hold(Bucket("third"))
    held_back.let_go()
    held_back.let_go()
    assert handed_over == ["first", "third"]
