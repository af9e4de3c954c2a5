"""Crossings on a real device: wrong order would give wrong numbers, because every stream is kept busy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hybridpar.kernels import pack, unpack
from hybridpar.kernels.streams import Crossing, CudaSideStream, side_stream
from tests.gpu.device import DEVICE, busy

pytestmark = pytest.mark.gpu

COUNT = 1 << 20


def on_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def send(crossing: Crossing, tensors: list[torch.Tensor], bucket: torch.Tensor) -> None:
    def work() -> None:
        with crossing.sending():
            busy(5)
            pack(tensors, [tensor.numel() for tensor in tensors], bucket)
            bucket.mul_(2)  # in place of a sum over two ranks

    on_another_thread(work)


def deliver(crossing: Crossing, tensors: list[torch.Tensor], bucket: torch.Tensor) -> None:
    with crossing.delivering():
        unpack(bucket, [tensor.numel() for tensor in tensors], tensors)


def test_a_cuda_device_has_side_streams() -> None:
    assert isinstance(side_stream(DEVICE), CudaSideStream)


def test_rounds_on_changing_streams_give_the_right_sums() -> None:
    crossing, bucket = side_stream(DEVICE).crossing(), torch.zeros(2 * COUNT, device=DEVICE)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for number in range(1, 13):
        tensors = []
        for stream in (streams[number % 3], streams[(number + 1) % 3]):
            with torch.cuda.stream(stream):
                busy(3)
                tensors.append(torch.full((COUNT,), float(number), device=DEVICE))
                crossing.submitted()
        with torch.cuda.stream(streams[(number + 1) % 3]):
            crossing.complete()
        send(crossing, tensors, bucket)
        with torch.cuda.stream(streams[(number + 2) % 3]):
            deliver(crossing, tensors, bucket)
            results.append(torch.stack([tensor.mean() for tensor in tensors]))
    torch.cuda.synchronize()
    assert [result.tolist() for result in results] == [[2.0 * number] * 2 for number in range(1, 13)]


def test_the_callers_stream_computes_while_a_bucket_is_sent() -> None:
    crossing, bucket = side_stream(DEVICE).crossing(), torch.zeros(COUNT, device=DEVICE)
    tensor = torch.ones(COUNT, device=DEVICE)
    torch.cuda.synchronize()
    crossing.submitted()
    crossing.complete()

    def work() -> None:
        with crossing.sending():
            busy(300)
            pack([tensor], [COUNT], bucket)

    on_another_thread(work)
    rest = torch.ones(COUNT, device=DEVICE).sum()
    done = torch.cuda.current_stream().record_event()
    done.synchronize()
    assert float(rest) == COUNT
    assert not side_is_idle(crossing), "the caller waited"
    with crossing.delivering():
        unpack(bucket, [COUNT], [tensor], 3.0)
    assert tensor.eq(3).all()


def side_is_idle(crossing: Crossing) -> bool:
    sent: torch.cuda.Event = crossing._sent  # type: ignore[attr-defined]
    return bool(sent.query())


def test_gradients_freed_after_delivery_are_not_overwritten_while_they_are_read() -> None:
    crossing, bucket = side_stream(DEVICE).crossing(), torch.zeros(COUNT, device=DEVICE)
    other = torch.cuda.Stream()
    for number in range(1, 6):
        with torch.cuda.stream(other):
            tensor = torch.full((COUNT,), float(number), device=DEVICE)
            crossing.submitted()
            crossing.complete()
        send(crossing, [tensor], bucket)
        with crossing.delivering():
            result = bucket.clone()
        del tensor
        with torch.cuda.stream(other):
            torch.full((COUNT,), -1.0, device=DEVICE)  # takes the memory just freed
        assert result.eq(2 * number).all()
