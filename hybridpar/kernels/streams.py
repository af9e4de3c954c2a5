"""Side streams: a communication thread works on CUDA tensors while the caller's streams go on computing.

# Note [crossings]
A CUDA stream is a queue; queues know of each other only what events tell them. A bucket crosses over and back:

1. ``submitted``: a tensor is ready in the order of the stream that is current now. Several streams may take part.
2. ``complete``: an event on each of these streams. Later work of the caller is not waited for, so it overlaps.
3. ``sending``: on the communication thread; the side stream waits for those events, and for the last reading of the
   bucket by the caller, before it may be overwritten. At the end it records an event.
4. ``delivering``: the caller's stream waits for that event, reads the bucket, and records when it has.

The host never waits.

# Note [memory across streams]
torch gives freed memory out again in the order of the stream on which it was allocated. So what one stream allocates
and another uses must not be freed before the other's work is ordered before the first's. Submitted tensors: while
``sending``, the bucket's owner holds them, and at the end of a round every stream that submitted one waits for the side
stream. Tensors made while ``sending`` and given to the caller belong to the side stream's memory: ``adopt`` them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Crossing:
    """One bucket's way to a side stream and back, round after round: Note [crossings].

    This class serves devices where everything happens in the order in which it is called: it does nothing.
    """

    def submitted(self) -> None:
        """A tensor of the bucket is ready, in the order of this thread's current stream."""

    def complete(self) -> None:
        """No more tensors in this round. On the thread of the last ``submitted``, before ``sending``."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        """What the communication thread does with the bucket. Inside, the side stream is current."""
        yield

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """What the caller does with the result, on any stream. ``sending`` has ended. Ends the round."""
        yield

    def adopt(self, tensor: torch.Tensor) -> None:
        """Within ``delivering``: ``tensor`` was made while sending, and from now on belongs to the caller."""

    def reset(self) -> None:
        """End a round that cannot be delivered."""


class SideStream:
    """What one pipeline of a communication thread uses. Base class: for devices without streams."""

    def crossing(self) -> Crossing:
        """A new crossing, for one bucket."""
        return Crossing()


def side_stream(device: torch.device) -> SideStream:
    """A side stream of ``device``."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()


class CudaSideStream(SideStream):
    """A CUDA stream of high priority: what it is given is short, and other ranks wait for it.

    Args:
        device: a CUDA device.
        api: ``torch.cuda``, or what stands for it in a test.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self.device, self.api = device, api
        self.stream = api.Stream(device, priority=-1)

    def crossing(self) -> Crossing:
        return CudaCrossing(self)


class CudaCrossing(Crossing):
    """The crossing of CUDA tensors. Each method is called by one thread at a time."""

    def __init__(self, side: CudaSideStream) -> None:
        self._side = side
        self._streams: list[Any] = []
        self._ready: list[Any] = []
        self._sent: Any = None
        self._read: Any = None

    def submitted(self) -> None:
        current = self._current()
        if current not in self._streams:
            self._streams.append(current)

    def complete(self) -> None:
        self._ready = [stream.record_event() for stream in self._streams]

    @contextmanager
    def sending(self) -> Iterator[None]:
        side = self._side
        with side.api.stream(side.stream):
            for event in self._ready:
                side.stream.wait_event(event)
            if self._read is not None:
                side.stream.wait_event(self._read)
            try:
                yield
            finally:  # after a failure too: what was started still reads the tensors
                self._sent = side.stream.record_event()

    @contextmanager
    def delivering(self) -> Iterator[None]:
        if self._sent is None:
            raise RuntimeError("expected a bucket that was sent in this round, got one that was not")
        current = self._current()
        current.wait_event(self._sent)
        yield
        self._read = current.record_event()
        self.reset()

    def adopt(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._current())

    def reset(self) -> None:
        if self._sent is not None:  # Note [memory across streams]
            for stream in self._streams:
                stream.wait_event(self._sent)
        self._streams, self._ready, self._sent = [], [], None

    def _current(self) -> Any:
        return self._side.api.current_stream(self._side.device)
