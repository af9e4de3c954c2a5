"""The lane of a group whose ranks share a host: CPU tensors through shared memory, all others over torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.comm.lanes.lane import Lane, Op
from hybridpar.comm.lanes.shm_lane import DTYPES, ShmLane

_LOG = logging.getLogger(__name__)
_LOGGED: set[str] = set()
_LOCK = threading.Lock()


class HostLane(Lane):
    """Two lanes of the same ranks, of which each tensor takes one by its device and dtype, equal on all ranks."""

    def __init__(self, shared: ShmLane, other: Lane) -> None:
        self.rank, self.size, self.ranks = shared.rank, shared.size, shared.ranks
        self._shared, self._other = shared, other

    def _lane_of(self, tensor: Tensor) -> Lane:
        return self._shared if tensor.is_cpu and tensor.dtype in DTYPES else self._other

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        self._lane_of(tensor).all_reduce(tensor, op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._lane_of(tensor).all_gather(outputs, tensor)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        self._lane_of(output).reduce_scatter(output, inputs)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        # Which is all bytes: any dtype goes through the memory.
        lane: Lane = self._shared if inputs[0].is_cpu else self._other
        lane.all_to_all(outputs, inputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._lane_of(tensor).broadcast(tensor, root)

    def barrier(self) -> None:
        self._shared.barrier()

    def split(self, members: Sequence[int]) -> Lane:
        return with_shared_memory(self._other.split(members), self._shared.timeout)

    def close(self) -> None:
        self._shared.close()
        self._other.close()

    def abort(self, why: str = "") -> None:
        self._shared.abort(why)
        self._other.abort(why)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu" and dtype in DTYPES:
            try:
                return self._shared.allocate(numel, dtype, device)
            except OSError as error:
                _log_missing(str(error))
        return super().allocate(numel, dtype, device)


def with_shared_memory(lane: Lane, timeout: float) -> Lane:
    """Collective: ``lane``, with shared memory for its CPU tensors if all its ranks are on one host that has some."""
    if lane.size == 1:
        return lane
    try:
        return HostLane(ShmLane(lane, timeout), lane)
    except ValueError as error:  # several hosts
        _LOG.info("CPU tensors travel over torch: %s", error)
    except OSError as error:
        _log_missing(str(error))
    return lane


def _log_missing(reason: str) -> None:
    # Ranks may be threads, which functools.cache would let in at the same time.
    with _LOCK:
        if reason in _LOGGED:
            return
        _LOGGED.add(reason)
    _LOG.warning("CPU tensors take a slower way than shared memory: %s", reason)
