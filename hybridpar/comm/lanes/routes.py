"""Routes: lanes made of lanes. How a tensor crosses several networks, or a host's memory and then a network.

# Note [same on every rank]
Which lanes a call takes, and how much of a tensor goes on each, is a pure function of what all ranks know: sizes, the
place of the ranks, and shares that they have agreed on. Measured times enter only by way of an exchange. Anything else
would let two ranks wait for each other on different lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.lanes.attendance import Attendance
from hybridpar.comm.lanes.lane import Lane, Op, check_reducible, describe, written
from hybridpar.comm.lanes.memory import bytes_of
from hybridpar.comm.lanes.parcels import Parcels
from hybridpar.comm.worker import Worker

# Pieces begin at multiples of this many elements: cache lines, and the vectors of the kernels.
_ALIGN = 64
# Below this a second lane saves less than its own latency.
_STRIPED_BYTES = 128 << 10
# Shares are agreed anew after this many striped calls; the first time earlier, so that a bad start does not last.
_FIRST_AGREEMENT, _AGREEMENT = 2, 16
# A lane always carries a little, or its recovery would never be seen.
_LEAST_SHARE = 0.01
# Old measurements count for this much of the next ones.
_MEMORY = 0.5


class StripedLane(Lane):
    """Several lanes of the same ranks side by side, each with a share of every tensor that is large enough.

    Args:
        lanes: of the same ranks, over different networks.
        shares: first share of each, positive, by default equal. They are agreed anew from the measured speeds.
        adapt: False keeps the first shares.
    """

    def __init__(self, lanes: Sequence[Lane], shares: Sequence[float] | None = None, *, adapt: bool = True) -> None:
        first = lanes[0]
        self.rank, self.size, self.ranks = first.rank, first.size, first.ranks
        self._lanes, self._adapt = list(lanes), adapt
        given = [1.0] * len(lanes) if shares is None else list(shares)
        if len(given) != len(lanes) or min(given) <= 0:
            raise ValueError(f"shares: expected {len(lanes)} positive numbers, got {given}")
        self.shares = [share / sum(given) for share in given]
        # The caller's thread serves the first lane.
        self._workers = [Worker(f"hybridpar-stripe-{number}") for number in range(1, len(lanes))]
        self._speeds = [0.0] * len(lanes)
        self._calls = 0

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        check_reducible("all_reduce", tensor)
        if (lane := self._lane_alone(tensor, tensor.nbytes)) is not None:
            lane.all_reduce(tensor, op)
            return
        pieces = self._pieces(tensor)
        calls = [_call(lane.all_reduce, piece, op) for lane, piece in zip(self._lanes, pieces, strict=True)]
        self._run(calls, [piece.nbytes for piece in pieces])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if (lane := self._lane_alone(tensor, sum(output.nbytes for output in outputs))) is not None:
            lane.all_gather(outputs, tensor)
            return
        columns = [list(column) for column in zip(*map(self._pieces, outputs), strict=True)]
        parts = zip(self._lanes, columns, self._pieces(tensor), strict=True)
        calls = [_call(lane.all_gather, column, piece) for lane, column, piece in parts]
        self._run(calls, [sum(piece.nbytes for piece in column) for column in columns])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        check_reducible("reduce_scatter", output)
        if (lane := self._lane_alone(output, sum(part.nbytes for part in inputs))) is not None:
            lane.reduce_scatter(output, inputs)
            return
        columns = [list(column) for column in zip(*map(self._pieces, inputs), strict=True)]
        parts = zip(self._lanes, self._pieces(output), columns, strict=True)
        calls = [_call(lane.reduce_scatter, piece, column) for lane, piece, column in parts]
        self._run(calls, [sum(piece.nbytes for piece in column) for column in columns])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if inputs[0].is_cuda:
            self._lanes[0].all_to_all(outputs, inputs)
            return
        # Note [pairs on stripes]: what a pair exchanges is known to no third rank, so each pair decides for itself
        # whether to divide it, and every lane is called, be it with nothing.
        received, sent = self._columns(outputs), self._columns(inputs)
        parts = zip(self._lanes, received, sent, strict=True)
        calls = [_call(lane.all_to_all, to, of) for lane, to, of in parts]
        sizes = [sum(piece.nbytes for piece in (*to, *of)) for to, of in zip(received, sent, strict=True)]
        # What is small says nothing of the speed of a lane.
        self._run(calls, sizes if sum(sizes) >= _STRIPED_BYTES else [0] * len(sizes))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        if (lane := self._lane_alone(tensor, tensor.nbytes)) is not None:
            lane.broadcast(tensor, root)
            return
        pieces = self._pieces(tensor)
        calls = [_call(lane.broadcast, piece, root) for lane, piece in zip(self._lanes, pieces, strict=True)]
        self._run(calls, None)  # its root is done before its data has arrived, which says nothing of the lane

    def barrier(self) -> None:
        self._fastest.barrier()

    def split(self, members: Sequence[int]) -> Lane:
        return StripedLane([lane.split(members) for lane in self._lanes], self.shares, adapt=self._adapt)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        for lane in self._lanes:
            lane.close()

    def abort(self, why: str = "") -> None:
        for lane in self._lanes:
            lane.abort(why)

    @property
    def _fastest(self) -> Lane:
        return self._lanes[max(range(len(self.shares)), key=self.shares.__getitem__)]

    def _lane_alone(self, tensor: Tensor, total: int) -> Lane | None:
        """The lane that carries all of a call, if one does. The order of CUDA work between threads would be open."""
        if tensor.is_cuda:
            return self._lanes[0]
        return self._fastest if total < _STRIPED_BYTES else None

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        return _cut(tensor.view(-1), self.shares)

    def _columns(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """What goes on each lane of the bytes for or from each rank. Note [pairs on stripes]."""
        fastest = self._lanes.index(self._fastest)
        alone = [float(number == fastest) for number in range(len(self._lanes))]
        rows = []
        for tensor in tensors:
            divided = tensor.nbytes * self.size >= _STRIPED_BYTES
            rows.append(_cut(bytes_of(tensor), self.shares if divided else alone))
        return [list(column) for column in zip(*rows, strict=True)]

    def _run(self, calls: Sequence[Callable[[], None]], sizes: Sequence[int] | None) -> None:
        """Make one call on each lane at the same time and, given the bytes of each, note how fast the lanes were."""
        futures: list[Future[float]] = [
            worker.submit(_timed, call) for worker, call in zip(self._workers, calls[1:], strict=True)
        ]
        try:
            seconds = [_timed(calls[0])]
            seconds += [future.result() for future in futures]
        except BaseException as error:
            self.abort(str(error))  # the other lanes would wait for ranks that will not come
            wait(futures)  # nobody may write into the tensor any more
            raise
        if sizes is None:
            return
        for number, (size, taken) in enumerate(zip(sizes, seconds, strict=True)):
            before, speed = self._speeds[number], size / taken
            if size:
                self._speeds[number] = _MEMORY * before + (1 - _MEMORY) * speed if before else speed
        self._calls += 1
        if self._adapt and (self._calls == _FIRST_AGREEMENT or self._calls % _AGREEMENT == 0):
            self._agree()

    def _agree(self) -> None:
        """Collective: new shares, in proportion to the speeds.

        A rank that comes first sees the time that it waits for the others, too; the last to come sees the lane alone.
        So the highest of the ranks' speeds is that of the lane.
        """
        speeds = torch.tensor(self._speeds, dtype=torch.float64)
        self._fastest.all_reduce(speeds, "max")
        if float(speeds.min()) == 0:
            return  # a lane has carried nothing yet
        shares = [max(float(share), _LEAST_SHARE) for share in speeds / speeds.sum()]
        self.shares = [share / sum(shares) for share in shares]


class HierarchicalLane(Lane):
    """First inside each host, then across hosts, then inside each host again.

    As many ranks of every host as the smallest host has, the carriers, each take a slice across: the carrier with
    local rank l works with those of local rank l on the other hosts. So a tensor crosses the network once for each
    host, however many ranks the hosts have, and every carrier does it on connections of its own.

    Args:
        local: the ranks of this rank's host, in the order of ``hosts``.
        cross: for a carrier, the carriers of its local rank, in the order of ``hosts``; None for all other ranks.
        hosts: the ranks of each host; together all ranks of the lane.
        rank: this rank.
        ranks: numbers of the members in the job.
        divide: makes what ``split`` returns.
        attendance: of the whole lane.
    """

    def __init__(
        self,
        local: Lane,
        cross: Lane | None,
        hosts: Sequence[Sequence[int]],
        *,
        rank: int,
        ranks: Sequence[int],
        divide: Callable[[Sequence[int]], Lane],
        attendance: Attendance,
    ) -> None:
        self.rank, self.size, self.ranks = rank, sum(map(len, hosts)), tuple(ranks)
        self._local, self._cross, self._divide, self._attendance = local, cross, divide, attendance
        self._hosts = [list(host) for host in hosts]
        self._here = next(number for number, host in enumerate(self._hosts) if rank in host)
        self._carriers = min(map(len, self._hosts))
        # Note [layers]: carrier l answers for the ranks of its host with local rank l, l + carriers, and so on.
        self._layers = -(-max(map(len, self._hosts)) // self._carriers)
        self._parcels = Parcels(local, cross, self._hosts, self._here)
        self._shares = [1 / self._carriers] * self._carriers + [0.0] * (local.size - self._carriers)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        check_reducible("all_reduce", tensor)
        slices = _cut(tensor.view(-1), self._shares)
        own = slices[self._local.rank]
        with self._together("all_reduce", tensor):
            if op == "sum":
                self._local.reduce_scatter(own, slices)
            else:
                self._local.all_reduce(tensor, op)
            if self._cross is not None and own.numel():
                self._cross.all_reduce(own, op)
            self._local.all_gather(slices, own)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if outputs[self.rank].data_ptr() != tensor.data_ptr():
            outputs[self.rank].copy_(tensor)
        with self._together("all_gather", tensor):
            if self._layers > 1:  # a carrier needs what it answers for
                self._local.all_gather([outputs[rank] for rank in self._hosts[self._here]], tensor)
            if self._cross is not None:
                for layer in range(self._layers):
                    parts = [self._answered(outputs, host, layer, self._local.rank) for host in self._hosts]
                    self._cross.all_gather(parts, parts[self._here])
            for number, host in enumerate(self._hosts):
                if self._layers == 1 or number != self._here:
                    for layer in range(self._layers):
                        parts = [self._answered(outputs, host, layer, mate) for mate in range(self._local.size)]
                        self._local.all_gather(parts, parts[self._local.rank])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        check_reducible("reduce_scatter", output)
        mates = range(self._local.size)
        with self._together("reduce_scatter", output):
            for layer in range(self._layers):
                sums = []
                for host in self._hosts:
                    parts = [self._answered(inputs, host, layer, mate) for mate in mates]
                    sums.append(torch.empty_like(parts[self._local.rank]))
                    self._local.reduce_scatter(sums[-1], parts)
                # For layer 0 that is this rank's own part, for later ones what a rank without connections waits for.
                mine = self._answered(inputs, self._hosts[self._here], layer, self._local.rank)
                total = output if layer == 0 and self._cross is not None else torch.empty_like(mine)
                if self._cross is not None:
                    self._cross.reduce_scatter(total, sums)
                if layer > 0:
                    self._hand_over(output, inputs, layer, total)

    def _hand_over(self, output: Tensor, inputs: Sequence[Tensor], layer: int, total: Tensor) -> None:
        """Note [layers]: carriers give the sums of a later layer to the ranks of their host that they are for."""
        host = self._hosts[self._here]
        parts = [torch.empty_like(self._answered(inputs, host, layer, mate)) for mate in range(self._local.size)]
        self._local.all_gather(parts, total)
        place = self._local.rank - layer * self._carriers
        if 0 <= place < self._carriers:
            output.copy_(parts[place])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        with self._together("all_to_all", inputs):
            received, sent = [bytes_of(output) for output in outputs], [bytes_of(part) for part in inputs]
            home = self._hosts[self._here]
            self._local.all_to_all([received[rank] for rank in home], [sent[rank] for rank in home])
            self._parcels.exchange(received, sent)
        written(*outputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        slices = _cut(tensor.view(-1), self._shares)
        home = next(number for number, host in enumerate(self._hosts) if root in host)
        with self._together("broadcast", tensor):
            if self._here == home:
                self._local.broadcast(tensor, self._hosts[home].index(root))
            if self._cross is not None and slices[self._local.rank].numel():
                self._cross.broadcast(slices[self._local.rank], home)
            if self._here != home:
                self._local.all_gather(slices, slices[self._local.rank])

    def barrier(self) -> None:
        with self._together("barrier", None):
            self._local.barrier()
            if self._cross is not None:
                self._cross.barrier()
            self._local.barrier()

    def split(self, members: Sequence[int]) -> Lane:
        return self._divide(members)

    def close(self) -> None:
        self._attendance.close()
        self._local.close()
        if self._cross is not None:
            self._cross.close()

    def abort(self, why: str = "") -> None:
        self._attendance.give_up(why)
        self._local.abort(why)
        if self._cross is not None:
            self._cross.abort(why)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._local.allocate(numel, dtype, device)

    def _answered(self, tensors: Sequence[Tensor], host: Sequence[int], layer: int, mate: int) -> Tensor:
        """Note [layers]: the tensor of the rank of ``host`` for which the carrier with local rank ``mate`` answers."""
        place = layer * self._carriers + mate
        if mate < self._carriers and place < len(host):
            return tensors[host[place]]
        return tensors[0].new_empty(0)

    @contextmanager
    def _together(self, operation: str, tensor: Tensor | Sequence[Tensor] | None) -> Iterator[None]:
        """If a part fails, so does the whole: ranks that wait in the other part must hear of it."""
        self._attendance.begin()
        try:
            yield
        except CommunicationError as error:
            # A part knows only whom it waited for itself.
            reason = self._attendance.blame(error.reason)
            self.abort(reason)
            text = error.tensor if tensor is None else describe(tensor)
            raise CommunicationError(reason, rank=self.ranks[self.rank], operation=operation, tensor=text) from error
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise


def _call(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, 1e-9)


def _cut(flat: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """Neighbouring parts of a vector, in proportion to shares that add up to 1."""
    numel = flat.numel()
    bounds = [0]
    for filled in accumulate(shares):
        exact = numel if filled > 1 - 1e-9 else int(numel * filled)
        bounds.append(max(bounds[-1], min(numel, -(-exact // _ALIGN) * _ALIGN)))
    return [flat[begin:end] for begin, end in pairwise(bounds)]
