"""What a rank asks for under a name: the same on every rank, but for what may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.horovod.reduce_op import ReduceOp, Scaling


@dataclass(frozen=True, slots=True)
class Request:
    """One collective, as all ranks must ask for it.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier, or task.
        dtype: name of torch's, empty where no tensor is sent.
        shape: of the tensor; of allgather and alltoall without the first dimension, which may differ between ranks.
        device: type of device on which the tensor lies.
        op, prescale, postscale: of allreduce and reducescatter.
        root: of broadcast, a rank of the process set.
        detail: of a task: what is to be done; of allreduce: what is in the tensor, parts separated by semicolons.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    detail: str = ""

    @classmethod
    def read(cls, values: Sequence[Any]) -> Request:
        """The inverse of ``values``."""
        kind, dtype, shape, *rest = values
        return cls(kind, dtype, tuple(shape), *rest)

    def values(self) -> list[Any]:
        """As JSON carries it."""
        return [
            self.kind, self.dtype, self.shape, self.device, int(self.op), self.prescale, self.postscale, self.root,
            self.detail,
        ]  # fmt: skip

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the tensor."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def uneven(self) -> bool:
        """Whether the first dimension may differ between the ranks."""
        return self.kind in ("allgather", "alltoall")

    def scaling(self, size: int) -> Scaling:
        """Of a reduction among ``size`` ranks."""
        return Scaling.of(ReduceOp(self.op), self.prescale, self.postscale, self.torch_dtype, size)

    def __str__(self) -> str:
        if not self.dtype:
            return f"{self.kind} {self.detail}".rstrip()
        shape = ", ".join(["*"] * self.uneven + [str(extent) for extent in self.shape])
        text = f"{self.kind} of {self.dtype}[{shape}]"
        if self.kind in ("allreduce", "reducescatter"):
            text += f" by {ReduceOp(self.op).name.capitalize()}"
            if (self.prescale, self.postscale) != (1, 1):
                text += f" (prescale {self.prescale:g}, postscale {self.postscale:g})"
        if self.kind == "broadcast":
            text += f" from rank {self.root}"
        return text if self.device == "cpu" else f"{text} on {self.device}"


@dataclass(eq=False, slots=True)
class Operation:
    """A request of this rank on its way.

    Attributes:
        name: with the kind before it.
        tensor: what is sent; of allreduce and broadcast also where the result goes.
        own: what other ranks may have different: rows of allgather, or splits of alltoall.
        problem: why this rank cannot take part, for all ranks to hear.
        task: of a task: what this rank does.
        scaling: what is still to be done to the result.
        future: resolves to the result.
        since: when it was asked for, by ``time.monotonic``.
        direct: whether it went to the engine without a round.
        refused: why the result is not one, where the engine had the tensor when the ranks found that they disagree.
        ready: on CUDA: when the tensor holds its values.
    """

    name: str
    request: Request
    tensor: Tensor | None = None
    own: list[int] = field(default_factory=list)
    problem: str = ""
    task: Callable[[], Any] | None = None
    scaling: Scaling | None = None
    future: Future[Any] = field(default_factory=Future)
    since: float = field(default_factory=monotonic)
    direct: bool = False
    refused: Exception | None = None
    ready: torch.cuda.Event | None = None

    def wait(self) -> Any:
        """The result, when it is there. Raises CommunicationError."""
        result = self.future.result()
        if self.refused is not None:
            raise self.refused
        scaling, self.scaling = self.scaling, None
        if scaling is not None:
            with torch.no_grad():
                scaling.finish(result)
        return result

    def arrive(self, result: Any) -> None:
        """The result is there, unless the operation has failed before."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """The result will not come; where it came already, it stays."""
        if not self.future.done():
            self.future.set_exception(error)
