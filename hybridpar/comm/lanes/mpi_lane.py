"""The lane on MPI (mpi4py): CPU tensors, between processes that an mpirun started.

# Note [sums in MPI]
Large sums are cut into pieces, some of them on their way at a time: they stay in the caches, and the network is busy
while sums are taken. MPI adds up whole numbers, float32 and float64. Half types, which MPI does not know, are sent as
bytes to the rank that adds them up, in rank order and in float32, and rounds once. So are all reduce-scatters, which is
faster than the libraries' own; and maxima and minima of floating numbers, because what MPI makes of NaN may differ
between ranks.

# Note [pairs in MPI]
An all-to-all is a message from each rank to each, and not MPI_Alltoallv: that counts in C ints, wants all parts in one
piece of memory, and cannot be cut, since no rank knows how much the others have to send. Messages of a pair arrive in
order, so each pair cuts for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.lanes.attendance import Observer
from hybridpar.comm.lanes.lane import Lane, Op, describe, written
from hybridpar.comm.lanes.memory import bytes_of
from hybridpar.comm.lanes.mpi_link import DATA, Link, Requests, Work

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)
_COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
# As measured with three libraries: what is summed at a time; and up to where each rank gathers everything and adds up
# for itself, in one exchange instead of two.
PIECE_BYTES = 1 << 20
GATHERED_BYTES = 1 << 14
# MPI counts in C ints.
MOST_BYTES = 1 << 30


class MpiLane(Lane):
    """A lane on a communicator of MPI. CPU tensors: any dtype is gathered and broadcast, those of DTYPES are reduced.

    Half types are summed in float32 and rounded once. Every rank gets the same bits; from run to run, the bits of
    float32 and float64 all-reduces are as reproducible as the library's.

    Once a call has failed the lane is of no use: every later call raises at once, and ranks that wait in the lane are
    told (or are the next time they wait). Nothing here ends the job (MPI_Abort), but most launchers do when a rank
    dies; ``mpirun -disable-auto-cleanup`` (mpich, Intel MPI) and ``--with-ft ulfm`` (Open MPI) let the others live.
    See Note [leaving MPI] for how a process ends then.

    ``close`` is collective for lanes that ``split`` or ``clone`` made, unless they have failed.

    Lanes may be used side by side, each by one thread. Whoever else calls MPI in this process must hold the lock of
    ``mpi_library`` where MPI has less than MPI_THREAD_MULTIPLE.

    Args:
        comm: an intracommunicator of mpi4py that nobody else uses. It is never freed.
        timeout: seconds that a wait for the other ranks may last. A large transfer is many waits.
        ranks: number of each member in the job.
        watch: knows which ranks are gone.

    Raises:
        ValueError: ``comm`` has another number of members; mpi4py is missing.
    """

    def __init__(self, comm: Any, timeout: float, ranks: Sequence[int], watch: Observer | None = None) -> None:
        self._be(Link(comm, timeout, ranks, watch))

    def _be(self, link: Link) -> None:
        self._link, self._comm, self._mpi = link, link.comm, link.mpi
        self.rank, self.size, self.ranks = link.rank, link.size, link.ranks

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        _check_reducible("all_reduce", tensor)
        if not tensor.numel():
            return
        flat = _flat(tensor)
        pieces = flat.split(PIECE_BYTES // flat.itemsize) if flat.nbytes > PIECE_BYTES else (flat,)
        with self._link.call("all_reduce", tensor):
            if (native := self._native(tensor.dtype, op)) is not None:
                self._link.drive(self._reduce_natively(piece, *native) for piece in pieces)
            elif flat.nbytes * self.size <= GATHERED_BYTES:
                self._reduce_gathered(flat, op)
            else:
                self._link.drive(self._reduce_by_exchange(piece, op) for piece in pieces)
        written(tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        for one in (tensor, *outputs):
            _check("all_gather", one)
        own = outputs[self.rank]
        if own.data_ptr() != tensor.data_ptr():
            own.detach().copy_(tensor)
        with self._link.call("all_gather", tensor):
            self._gather([bytes_of(output) for output in outputs])
        written(*outputs)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        for one in (output, *inputs):
            _check_reducible("reduce_scatter", one)
        result, parts = _flat(output), [_flat(part) for part in inputs]
        count, longest = PIECE_BYTES // output.itemsize, max(part.numel() for part in parts)
        with self._link.call("reduce_scatter", output):
            self._link.drive(
                self._reduce_exchanged(result[at : at + count], [part[at : at + count] for part in parts], "sum")
                for at in range(0, longest, count)
            )
        written(output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for one in (*outputs, *inputs):
            _check("all_to_all", one)
        received, sent = [bytes_of(output) for output in outputs], [bytes_of(part) for part in inputs]
        longest = max(part.numel() for part in (*received, *sent))
        with self._link.call("all_to_all", inputs):
            received[self.rank].copy_(sent[self.rank])
            self._link.drive(  # Note [pairs in MPI]
                self._swap(*([part[at : at + MOST_BYTES] for part in parts] for parts in (sent, received)))
                for at in range(0, longest, MOST_BYTES)
            )
        written(*outputs)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        _check("broadcast", tensor)
        with self._link.call("broadcast", tensor):
            self._link.drive(self._broadcast_piece(piece, root) for piece in bytes_of(tensor).split(MOST_BYTES))
        if self.rank != root:
            written(tensor)

    def barrier(self) -> None:
        with self._link.call("barrier"):
            with self._link.lock:
                request = self._comm.Ibarrier()
            self._link.wait([request])

    def split(self, members: Sequence[int]) -> Lane:
        lane = MpiLane.__new__(MpiLane)
        lane._be(self._link.split(members))
        return lane

    def close(self) -> None:
        self._link.close()

    def abort(self, why: str = "") -> None:
        self._link.abort(why)

    def _native(self, dtype: torch.dtype, op: Op) -> tuple[Any, Any] | None:
        """MPI's own datatype and operator, if they do what is wanted."""
        mpi = self._mpi
        if dtype == torch.bool:
            return mpi.C_BOOL, mpi.LAND if op == "min" else mpi.LOR
        if dtype in _HALF or (dtype.is_floating_point and op != "sum"):
            return None
        kinds = {
            torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE, torch.int64: mpi.INT64_T, torch.int32: mpi.INT32_T,
            torch.int16: mpi.INT16_T, torch.int8: mpi.INT8_T, torch.uint8: mpi.UINT8_T,
        }  # fmt: skip
        return kinds[dtype], {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[op]

    def _reduce_natively(self, piece: Tensor, kind: Any, operator: Any) -> Work:
        with self._link.lock:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, [self._memory(piece), kind], operator)
        yield [request]

    def _reduce_gathered(self, tensor: Tensor, op: Op) -> None:
        rows = torch.empty(self.size, tensor.numel(), dtype=tensor.dtype)
        rows[self.rank] = tensor
        self._gather(list(bytes_of(rows).split(tensor.nbytes)))
        _combine(rows, op, tensor)

    def _reduce_by_exchange(self, piece: Tensor, op: Op) -> Work:
        parts = piece.tensor_split(self.size)
        yield from self._reduce_exchanged(parts[self.rank], parts, op)
        yield self._start_gather([bytes_of(part) for part in parts])

    def _reduce_exchanged(self, output: Tensor, inputs: Sequence[Tensor], op: Op) -> Work:
        """Every rank sends each other its part, and reduces what arrives."""
        rows = torch.empty(self.size, output.numel(), dtype=output.dtype)
        yield self._start_swap([bytes_of(part) for part in inputs], [bytes_of(row) for row in rows])
        rows[self.rank] = inputs[self.rank]
        _combine(rows, op, output)

    def _gather(self, outputs: list[Tensor]) -> None:
        """Bytes of all ranks; this one's are in their place already."""
        if sum(output.numel() for output in outputs) <= MOST_BYTES and _are_neighbours(outputs):
            self._link.wait(self._start_gather(outputs))
            return
        longest = max(output.numel() for output in outputs)
        self._link.drive(
            self._spread([output[at : at + MOST_BYTES] for output in outputs]) for at in range(0, longest, MOST_BYTES)
        )

    def _spread(self, outputs: list[Tensor]) -> Work:
        yield from self._swap([outputs[self.rank]] * self.size, outputs)

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Work:
        yield self._start_swap(sent, received)

    def _start_gather(self, outputs: list[Tensor]) -> Requests:
        """Bytes of all ranks, neighbours in memory."""
        sizes = [output.numel() for output in outputs]
        places = [0, *accumulate(sizes[:-1])]
        first = next((output for output in outputs if output.numel()), outputs[0])
        memory = self._mpi.buffer.fromaddress(first.data_ptr(), sum(sizes))
        with self._link.lock:
            return [self._comm.Iallgatherv(self._mpi.IN_PLACE, [memory, sizes, places, self._mpi.BYTE])]

    def _start_swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Requests:
        """Bytes to and from each other rank; no message where there are none."""
        requests = []
        for start, tensors in ((self._comm.Irecv, received), (self._comm.Isend, sent)):
            for other in self._link.others:
                if tensors[other].numel():
                    with self._link.lock:
                        requests.append(start([self._memory(tensors[other]), self._mpi.BYTE], other, DATA))
        return requests

    def _broadcast_piece(self, piece: Tensor, root: int) -> Work:
        with self._link.lock:
            request = self._comm.Ibcast([self._memory(piece), self._mpi.BYTE], root)
        yield [request]

    def _memory(self, tensor: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _combine(rows: Tensor, op: Op, output: Tensor) -> None:
    """Reduce the rows [ranks, numel], which are overwritten, in rank order."""
    total = rows[0].float() if rows.dtype in _HALF else rows[0]
    for row in rows[1:]:
        _COMBINE[op](total, row, out=total)
    output.copy_(total)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _are_neighbours(tensors: Sequence[Tensor]) -> bool:
    """Whether the bytes of each follow upon those of the one before."""
    full = [tensor for tensor in tensors if tensor.numel()]
    return all(one.data_ptr() + one.numel() == two.data_ptr() for one, two in pairwise(full))


def _check(operation: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise TypeError(f"{operation} through MPI: expected a CPU tensor, got one on {tensor.device}; move it there")
    assert tensor.is_contiguous(), "the lane's contract"


def _check_reducible(operation: str, tensor: Tensor) -> None:
    _check(operation, tensor)
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{operation} through MPI: expected one of {names}, got {describe(tensor)}; cast it")
