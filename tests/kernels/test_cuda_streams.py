"""Crossings order the work of streams: checked on streams that only note what must come before what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybridpar.kernels.streams import Crossing, CudaCrossing, CudaSideStream, side_stream

DEVICE = torch.device("cuda", 0)


@dataclass
class Point:
    """Something done on a stream, with what is ordered before it."""

    name: str
    after: list[Point]

    def follows(self, name: str) -> bool:
        return any(point.name == name or point.follows(name) for point in self.after)


@dataclass(eq=False)
class NotedStream:
    device: torch.device
    priority: int = 0
    points: list[Point] = field(default_factory=list)

    def run(self, name: str, *more: Point) -> Point:
        self.points.append(Point(name, [*self.points[-1:], *more]))
        return self.points[-1]

    def record_event(self) -> Point:
        return self.run("event")

    def wait_event(self, event: Point) -> None:
        self.run("wait", event)


class NotedCuda:
    """What crossings use of torch.cuda; the current stream is each thread's own."""

    Stream = NotedStream

    def __init__(self) -> None:
        self._default = NotedStream(DEVICE)
        self._local = threading.local()

    def current_stream(self, device: torch.device) -> NotedStream:
        assert device == DEVICE
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        before = self.current_stream(DEVICE)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def run(self, name: str) -> Point:
        return self.current_stream(DEVICE).run(name)


def on_another_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def new() -> tuple[NotedCuda, CudaSideStream, Crossing]:
    cuda = NotedCuda()
    side = CudaSideStream(DEVICE, cuda)
    return cuda, side, side.crossing()


def send(cuda: NotedCuda, crossing: Crossing, name: str = "send") -> Point:
    points = []

    def work() -> None:
        with crossing.sending():
            points.append(cuda.run(name))

    on_another_thread(work)
    return points[0]


def one_round(cuda: NotedCuda, crossing: Crossing, name: str) -> tuple[Point, Point]:
    cuda.run(f"gradient {name}")
    crossing.submitted()
    crossing.complete()
    sent = send(cuda, crossing, f"send {name}")
    with crossing.delivering():
        return sent, cuda.run(f"read {name}")


def test_sending_follows_every_tensor_whatever_stream_it_is_from() -> None:
    cuda, side, crossing = new()
    cuda.run("first")
    crossing.submitted()
    other = NotedStream(DEVICE)
    with cuda.stream(other):
        cuda.run("second")
        crossing.submitted()
    cuda.run("third")
    crossing.submitted()
    crossing.complete()
    sent = send(cuda, crossing)
    assert all(sent.follows(name) for name in ("first", "second", "third"))
    assert sent is side.stream.points[-2]


def test_sending_waits_for_nothing_that_the_caller_starts_later() -> None:
    cuda, _, crossing = new()
    crossing.submitted()
    crossing.complete()
    cuda.run("rest of backward")
    assert not send(cuda, crossing).follows("rest of backward")


def test_the_caller_reads_after_the_sum_and_is_not_held_up_before() -> None:
    cuda, _, crossing = new()
    crossing.submitted()
    crossing.complete()
    send(cuda, crossing)
    assert not cuda.run("rest of backward").follows("send")
    with crossing.delivering():
        assert cuda.run("read").follows("send")


def test_a_bucket_is_overwritten_only_after_it_was_read_on_whatever_stream() -> None:
    cuda, _, crossing = new()
    with cuda.stream(NotedStream(DEVICE)):
        one_round(cuda, crossing, "1")
    with cuda.stream(NotedStream(DEVICE)):
        sent, _ = one_round(cuda, crossing, "2")
    assert sent.follows("read 1")


def test_buckets_of_one_side_stream_do_not_wait_for_each_others_readers() -> None:
    cuda, side, first = new()
    second = side.crossing()
    for crossing in (first, second):
        crossing.submitted()
        crossing.complete()
    send(cuda, first, "send first")
    with first.delivering():
        cuda.run("read first")
    sent = send(cuda, second, "send second")
    assert sent.follows("send first")
    assert not sent.follows("read first")


@pytest.mark.parametrize("delivered", [True, False])
def test_freed_gradients_are_not_reused_before_they_were_sent(delivered: bool) -> None:
    cuda, _, crossing = new()
    other = NotedStream(DEVICE)
    with cuda.stream(other):
        crossing.submitted()
    crossing.submitted()
    crossing.complete()
    send(cuda, crossing)
    if delivered:
        with crossing.delivering():
            pass
    else:
        crossing.reset()
    assert cuda.run("reuse").follows("send")
    assert other.run("reuse").follows("send")


def test_a_failed_send_still_orders_what_it_had_started() -> None:
    cuda, _, crossing = new()
    crossing.submitted()
    crossing.complete()

    def fail() -> None:
        with crossing.sending():
            cuda.run("pack")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    crossing.reset()
    assert cuda.run("reuse").follows("pack")


def test_tensors_made_while_sending_are_kept_for_the_callers_stream() -> None:
    cuda, _, crossing = new()
    kept = []

    class Made:
        def record_stream(self, stream: NotedStream) -> None:
            kept.append(stream)

    crossing.complete()
    send(cuda, crossing)
    caller = NotedStream(DEVICE)
    with cuda.stream(caller), crossing.delivering():
        crossing.adopt(Made())  # type: ignore[arg-type]
    assert kept == [caller]


def test_delivering_what_was_not_sent_is_refused() -> None:
    _, _, crossing = new()
    with pytest.raises(RuntimeError, match="expected a bucket that was sent in this round"), crossing.delivering():
        pass


def test_the_side_stream_goes_before_the_callers_work() -> None:
    _, side, _ = new()
    assert side.stream.priority == -1


def test_other_devices_need_no_crossing() -> None:
    crossing = side_stream(torch.device("cpu")).crossing()
    assert not isinstance(crossing, CudaCrossing)
    crossing.submitted()
    crossing.complete()
    with crossing.sending(), crossing.delivering():
        crossing.adopt(torch.ones(1))
    crossing.reset()
