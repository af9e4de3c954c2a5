"""Tracks: pipelines side by side, each a communicator with a thread of its own.

# Note [tracks on CUDA]
Libraries such as NCCL demand that several communicators are used in the same order on every rank. So on CUDA all tracks
share one thread, which only hands work to the device, in plan order; side by side are their streams. On the caller's
own stream the sums would hold up the rest of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.compose import Route
from hybridpar.comm.lanes.lane import Lane
from hybridpar.comm.worker import Worker
from hybridpar.kernels.streams import side_stream


class Track:
    """One pipeline: runs what it is given in order.

    Attributes:
        number, lane: its own.
        side: the stream on which it works.
        row: of the timeline.
    """

    def __init__(self, number: int, lane: Lane, worker: Worker, device: torch.device) -> None:
        self.number, self.lane, self.row = number, lane, f"lane {number}"
        self.side = side_stream(device)
        self._worker = worker

    def submit(self, function: Callable[[], None]) -> Future[Any]:
        """Run it after all that was submitted before, and return at once."""
        return self._worker.submit(function)

    def submit_for(self, future: Future[Any], function: Callable[[], None]) -> None:
        """As ``submit``, with a future that there is already."""
        self._worker.submit_for(future, function)

    def check_open(self) -> None:
        """Raises RuntimeError where ``submit`` would."""
        self._worker.check_open()


class Tracks:
    """The communicators and threads of an engine. Those of one route are used again by the next plan."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self._lanes: dict[tuple[Route, bool], list[Lane]] = {}
        self._workers: list[Worker] = []

    def arrange(self, plan: Plan, device: torch.device) -> list[Track]:
        """Collective: as many tracks as the plan asks for. Those arranged before must be idle."""
        assert plan.tracks is not None, "the engine resolves its plans"
        kind = plan.route, plan.compress_exponents
        lanes = self._lanes.setdefault(kind, [])
        while len(lanes) < plan.tracks:
            lanes.append(self._group.new_lane(*kind))
        # Note [tracks on CUDA]
        threads = 1 if device.type == "cuda" else plan.tracks
        while len(self._workers) < threads:
            self._workers.append(Worker(self._name))
        return [Track(number, lanes[number], self._workers[number % threads], device) for number in range(plan.tracks)]

    def abort(self, why: str) -> None:
        """This rank cannot go on: make what the others wait for fail."""
        for lane in self._all_lanes():
            lane.abort(why)

    def close(self) -> None:
        """Free threads and communicators. Collective where the library demands it."""
        for worker in self._workers:
            worker.close()
        for lane in self._all_lanes():
            lane.close()

    def _all_lanes(self) -> list[Lane]:
        return [lane for lanes in self._lanes.values() for lane in lanes]
