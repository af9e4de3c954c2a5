"""Collectives by name between the ranks of a group, asked for in any order, from any thread."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.any_order.sender import FLOATS, INTEGERS
from hybridpar.comm.errors import CommunicationError
from hybridpar.comm.group import DEFAULT_TIMEOUT, Group
from hybridpar.comm.horovod.reduce_op import ReduceOp
from hybridpar.comm.horovod.request import Operation, Request
from hybridpar.comm.horovod.rounds import MADE_UP, Rounds


class Exchange:
    """Collectives by name. Collective: construct it on all ranks, with equal arguments.

    A call returns at once with an ``Operation``, of which ``finished`` gives the result. Tensors may be anywhere in
    any order of strides; they are read and, in place, written some time later. See Note [any order of names] in
    ``hybridpar.comm.horovod.rounds``.

    Args:
        group: the ranks. Nobody else may use it.
        timeout: seconds that a name may wait for the other ranks to ask for it. When it is over everything fails.
        stall_seconds: a warning says who has asked for a name and who has not when it has waited for so long.
    """

    def __init__(self, group: Group, *, timeout: float = DEFAULT_TIMEOUT, stall_seconds: float = 10.0) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._flying: dict[str, Operation] = {}
        self._unnamed: Counter[str] = Counter()
        self._process = os.getpid()
        self._rounds = Rounds(group, self._flying, timeout=timeout, stall_seconds=stall_seconds)
        self._registered = self._rounds.registered
        atexit.register(self._close_at_exit)

    def named(self, kind: str, name: str | None) -> str:
        """The kind and the name; without one, how many calls of that kind have had none since the last join."""
        if name is not None:
            return f"{kind}.{name}"
        self._unnamed[kind] += 1
        return f"{kind}{MADE_UP}{self._unnamed[kind]}"

    def all_reduce(
        self,
        name: str,
        tensor: Tensor,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        *,
        detail: str = "",
    ) -> Operation:
        """Combine ``tensor`` over the ranks, in place.

        Args:
            name: a whole one, of ``named``.
            detail: what is in it, equal on all ranks; parts are separated by semicolons.

        Raises:
            TypeError: of its dtype there is no sum.
            ValueError: the name is in flight.
            CommunicationError: the exchange has failed before.
        """
        kind = tensor.device.type
        known = self._registered.get((name, tensor.dtype, tensor.shape, kind, op, prescale, postscale, detail))
        if known is None:
            if tensor.dtype not in FLOATS + INTEGERS:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS + INTEGERS)
                raise TypeError(f"{name}: expected {names}, got {tensor.dtype}; cast it first")
            shape = tuple(tensor.shape)
            request = Request("allreduce", _name(tensor.dtype), shape, kind, op, prescale, postscale, detail=detail)
            scaling = request.scaling(self.size)
            return self.ask(Operation(name, request, tensor, scaling=scaling if scaling.finishes else None))
        self._check(name)
        scaling = known.scaling
        if known.factor != scaling.before:
            with torch.no_grad():
                scaling.start(tensor)
        future = known.engine.submit(known.index, tensor, op=known.op, scale=known.factor)
        operation = Operation(
            name, known.request, tensor, scaling=scaling if scaling.finishes else None, future=future, direct=True
        )
        self._flying[name] = operation
        return operation

    def all_gather(self, name: str, tensor: Tensor) -> Operation:
        """[rows, ...] -> [sum of all ranks' rows, ...] and how many rows each had; they may differ."""
        problem = "" if tensor.dim() else "expected rows to put one behind the other, got a tensor without dimensions"
        request = Request("allgather", _name(tensor.dtype), tuple(tensor.shape[1:]), tensor.device.type)
        return self.ask(Operation(name, request, tensor, own=list(tensor.shape[:1]), problem=problem))

    def broadcast(self, name: str, tensor: Tensor, root: int) -> Operation:
        """Overwrite ``tensor`` with that of rank ``root``."""
        request = Request("broadcast", _name(tensor.dtype), tuple(tensor.shape), tensor.device.type, root=root)
        return self.ask(Operation(name, request, tensor))

    def all_to_all(self, name: str, tensor: Tensor, splits: Sequence[int] | None) -> Operation:
        """[sum of splits, ...] -> what all ranks send to this one, and how many rows each sent."""
        problem = ""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not tensor.dim():
            problem = "expected rows to deal out, got a tensor without dimensions"
        elif splits is None and rows % self.size:
            problem = f"expected rows that {self.size} ranks can share evenly, got {rows}; pass splits"
        elif splits is not None and (len(splits) != self.size or sum(splits) != rows or min(splits) < 0):
            problem = f"expected {self.size} splits of 0 or more that add up to {rows} rows, got {list(splits)}"
        own = [rows // self.size] * self.size if splits is None else list(splits)
        request = Request("alltoall", _name(tensor.dtype), tuple(tensor.shape[1:]), tensor.device.type)
        return self.ask(Operation(name, request, tensor, own=own, problem=problem))

    def reduce_scatter(
        self, name: str, tensor: Tensor, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> Operation:
        """[rows, ...] -> this rank's share of the rows of the sum; the first ranks get one more where it is uneven.

        Raises:
            TypeError: of its dtype there is no sum.
        """
        if tensor.dtype not in FLOATS + INTEGERS:
            raise TypeError(f"{name}: expected a dtype of which there are sums, got {tensor.dtype}; cast it first")
        problem = "" if tensor.dim() else "expected rows to deal out, got a tensor without dimensions"
        shape, kind = tuple(tensor.shape), tensor.device.type
        request = Request("reducescatter", _name(tensor.dtype), shape, kind, op, prescale, postscale)
        scaling = request.scaling(self.size)
        finish = scaling if scaling.finishes else None
        return self.ask(Operation(name, request, tensor, problem=problem, scaling=finish))

    def barrier(self, name: str) -> Operation:
        """Done when all ranks have asked for it."""
        return self.ask(Operation(name, Request("barrier")))

    def together(self, name: str, detail: str, task: Callable[[], Any], problem: str = "") -> Operation:
        """Run ``task`` on all ranks, in an order with everything else that is the same on all of them.

        Args:
            detail: what it does, equal on all ranks.
            task: runs on the thread of the exchange. May use the group. What it raises, the operation raises.
            problem: why this rank cannot, for all ranks to hear.
        """
        return self.ask(Operation(name, Request("task", detail=detail), task=task, problem=problem))

    def ask(self, operation: Operation) -> Operation:
        """See the calls above."""
        self._check(operation.name)
        if operation.tensor is not None and operation.request.kind in ("allreduce", "broadcast"):
            _check_writable(operation.name, operation.tensor)
        operation.future.set_running_or_notify_cancel()
        tensor = operation.tensor
        if tensor is not None and tensor.is_cuda:
            operation.ready = torch.cuda.current_stream(tensor.device).record_event()
        self._flying[operation.name] = operation
        self._rounds.ask(operation)
        return operation

    def finished(self, operation: Operation) -> Any:
        """The operation's result, when it is there; from then on its name may be used again.

        Raises:
            CommunicationError: a rank was lost or late, or the ranks asked for different things.
        """
        try:
            return operation.wait()
        finally:
            if self._flying.get(operation.name) is operation:
                del self._flying[operation.name]

    def join(self) -> int:
        """Go along with what the others reduce until all ranks have called this. Returns the rank that did so last.

        Values of this rank change no result: zeros in a sum, ones in a product, infinity in a minimum. An average is
        still divided by the number of all ranks.

        Raises:
            CommunicationError: a rank was lost.
        """
        wait([operation.future for operation in list(self._flying.values())])
        last = self._rounds.join().result()
        self._rounds.wait_for_return()
        self._unnamed.clear()
        return last

    def close(self) -> None:
        """End the thread and free the communicators. What is in flight fails, here and on the other ranks."""
        atexit.unregister(self._close_at_exit)
        self._rounds.close()

    def _close_at_exit(self) -> None:
        """A thread that comes out of a library's call while the interpreter goes down takes the process with it."""
        if os.getpid() == self._process:
            self._rounds.close()

    def _check(self, name: str) -> None:
        """Raises where nothing, or not this name, can be asked for."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{name} in a forked child: expected the process that called hvd.init(); start workers with "
                "multiprocessing's spawn, or fork before hvd.init()"
            )
        if self._rounds.failure is not None:
            raise CommunicationError(
                self._rounds.failure, rank=self.group.ranks[self.rank], operation="call", tensor=name
            )
        flying = self._flying.get(name)
        if flying is not None and not flying.future.done():
            raise ValueError(
                f"{name}: expected a name that is not in flight, got that of an earlier call that is not finished; "
                "synchronize() its handle first, or use another name"
            )


def _check_writable(name: str, tensor: Tensor) -> None:
    shared = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if shared and tensor.numel():
        raise ValueError(
            f"{name}: expected elements that each have their own memory, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; call .contiguous() on it first"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
