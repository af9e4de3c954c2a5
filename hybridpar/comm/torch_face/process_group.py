"""torch.distributed's face: ``init_process_group("hybridpar")``.

CPU tensors travel on a lane: through shared memory inside a host, by the hierarchical route across hosts. What a lane
does not know (point to point, gather, scatter, products, rare dtypes) goes to a gloo of the group's own.
CUDA tensors go to NCCL, with torch's own streams and works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from hybridpar.comm.group import connect
from hybridpar.comm.lanes.torch_lane import new_gloo, new_nccl
from hybridpar.comm.torch_face import checks, collectives
from hybridpar.comm.torch_face.collectives import Reduction
from hybridpar.comm.torch_face.work import Calls, TorchWork, named
from hybridpar.topology import Topology, detect

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")

# Options by which torch's own callers mean "as usual".
_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_BROADCAST = c10d.BroadcastOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_BARRIER = c10d.BarrierOptions()
_GATHER = c10d.GatherOptions()
_SCATTER = c10d.ScatterOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()


@dataclass(frozen=True)
class ProcessGroupOptions:
    """``pg_options`` of ``init_process_group`` and ``new_group``. Further groups inherit those of the default group.

    Attributes:
        cuda: what carries CUDA tensors. NCCL wants a GPU for each rank; gloo works without.
        shared_memory, interfaces: as for ``hybridpar.init``.
    """

    cuda: Literal["nccl", "gloo"] = "nccl"
    shared_memory: bool = True
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cuda not in ("nccl", "gloo"):
            raise ValueError(f"ProcessGroupOptions.cuda: expected 'nccl' or 'gloo', got {self.cuda!r}")


# torch's stub lists overloads that none of its own callers use.
_ProcessGroup: Any = dist.ProcessGroup


class HybridProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks as torch.distributed sees it. Made by ``init_process_group`` and ``new_group``.

    Where a rank is gone, calls raise ``hybridpar.CommunicationError`` within the time-out, and so does every later one.

    Args:
        store: that all members reach, with a prefix that only this group uses.
        rank: in the group.
        ranks: number of each member in the whole job.
        timeout: how long one collective may wait for the other ranks.
        options: see there.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, options: ProcessGroupOptions
    ) -> None:
        super().__init__(rank, len(ranks))
        self._store, self._ranks, self._timeout, self.hybridpar_options = store, list(ranks), timeout, options
        self._splits: Counter[tuple[int, ...]] = Counter()
        seconds = timeout.total_seconds()
        group = connect(
            PrefixStore("lane/", store), ranks[rank], ranks, topology=_topology(ranks[rank], len(ranks)),
            timeout=seconds, shared_memory=options.shared_memory, interfaces=options.interfaces,
        )  # fmt: skip
        self._calls = Calls(group, seconds)
        interface = options.interfaces[0] if options.interfaces else None
        self._gloo: Any = new_gloo(PrefixStore("gloo/", store), rank, len(ranks), seconds, interface)
        self._cuda: Any = None
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        if torch.cuda.is_available():
            self._connect_cuda()

    def _connect_cuda(self) -> None:
        if self.hybridpar_options.cuda == "gloo":
            self._cuda = self._gloo
            self._register_backend(_CUDA, dist.ProcessGroup.BackendType.GLOO, self._gloo)
            return
        self._cuda = new_nccl(self._store, self.rank(), self.size(), self._timeout.total_seconds())
        self._cuda._set_sequence_number_for_group()
        self._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, self._cuda)

    def getBackendName(self) -> str:  # noqa: N802
        """What DDP logs."""
        return "hybridpar"

    def get_group_store(self) -> Store:
        return self._store

    def __repr__(self) -> str:
        return f"HybridProcessGroup(rank={self.rank()}, ranks={self._ranks})"

    # Reductions

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: c10d.AllreduceOptions = _ALL_REDUCE) -> dist.Work:
        given = [tensors] if isinstance(tensors, Tensor) else tensors
        reduction = self._reduction(given[0], opts.reduceOp, "all_reduce")
        if reduction is None:
            return self._torch("all_reduce", given, "allreduce", given, opts)
        return self._calls.run("all_reduce", opts, given, collectives.all_reduce, given, reduction)

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: c10d.AllreduceOptions = _ALL_REDUCE_COALESCED
    ) -> dist.Work:
        reductions = [self._reduction(tensor, opts.reduceOp, "all_reduce") for tensor in tensors]
        if None in reductions:
            return self._torch("all_reduce", tensors, "allreduce_coalesced", tensors, opts)
        return self._calls.run("all_reduce", opts, tensors, collectives.all_reduce, tensors, reductions[0])

    def reduce(self, tensors: list[Tensor], opts: c10d.ReduceOptions = _REDUCE) -> dist.Work:
        reduction = self._reduction(tensors[0], opts.reduceOp, "reduce")
        if reduction is None:
            return self._torch("reduce", tensors, "reduce", tensors, opts)
        return self._calls.run("reduce", opts, tensors, collectives.reduce, tensors[0], opts.rootRank, reduction)

    def reduce_scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> dist.Work:
        output, inputs = output_tensors[0], input_tensors[0]
        checks.one_each("reduce_scatter", inputs, self.size(), "input")
        checks.own_size("reduce_scatter", inputs[self.rank()], output, "output")
        reduction = self._reduction(output, opts.reduceOp, "reduce_scatter")
        if reduction is None:
            involved = [output, *inputs]
            return self._torch("reduce_scatter", involved, "reduce_scatter", output_tensors, input_tensors, opts)
        run, function = self._calls.run, collectives.reduce_scatter
        return run("reduce_scatter", opts, output_tensors, function, output, inputs, reduction)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole("reduce_scatter", tensor, "input", output, "output", self.size())
        reductions = [self._reduction(output, opts.reduceOp, "reduce_scatter") for output in outputs]
        if None in reductions:
            pairs = list(zip(outputs, inputs, strict=True))
            return self._torch_pairs("reduce_scatter", "_reduce_scatter_base", pairs, opts)
        run, function = self._calls.run, collectives.reduce_scatter_single
        return run("reduce_scatter", opts, outputs, function, outputs, inputs, reductions[0])

    # Copies

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: c10d.BroadcastOptions = _BROADCAST) -> dist.Work:
        given = [tensors] if isinstance(tensors, Tensor) else tensors
        if not _is_plain(given[0]):
            return self._torch("broadcast", given, "broadcast", given, opts)
        return self._calls.run("broadcast", opts, given, collectives.broadcast, given[0], opts.rootRank)

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> dist.Work:
        outputs, tensor = output_tensors[0], input_tensors[0]
        if not _is_plain(tensor):
            return self._torch("all_gather", [tensor, *outputs], "allgather", output_tensors, input_tensors, opts)
        checks.one_each("all_gather", outputs, self.size(), "output")
        checks.own_size("all_gather", outputs[self.rank()], tensor, "input")
        return self._calls.run("all_gather", opts, outputs, collectives.all_gather, outputs, tensor)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> dist.Work:
        """``output_lists[r][i]`` becomes ``input_list[i]`` of rank r."""
        works = [
            self.allgather([[outputs[index] for outputs in output_lists]], [tensor], opts)
            for index, tensor in enumerate(input_list)
        ]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def all_gather_single(self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions = _ALL_GATHER) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole("all_gather", output, "output", tensor, "input", self.size())
        if not all(map(_is_plain, inputs)):
            pairs = list(zip(outputs, inputs, strict=True))
            return self._torch_pairs("all_gather", "_allgather_base", pairs, opts)
        return self._calls.run("all_gather", opts, outputs, collectives.all_gather_single, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: c10d.AllToAllOptions = _ALL_TO_ALL,
    ) -> dist.Work:
        """Sizes are rows; none stand for parts of equal sizes."""
        if not (_is_plain(output) and _is_plain(input)):
            arguments = output, input, output_split_sizes, input_split_sizes, opts
            return self._torch("all_to_all", [output, input], "alltoall_base", *arguments)
        checks.one_dtype("all_to_all", [output, input])
        rows = [
            checks.splits(tensor, sizes, self.size(), name)
            for tensor, sizes, name in ((output, output_split_sizes, "output"), (input, input_split_sizes, "input"))
        ]
        function = collectives.all_to_all_single
        return self._calls.run("all_to_all", opts, [output], function, output, input, *rows)

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: c10d.AllToAllOptions = _ALL_TO_ALL
    ) -> dist.Work:
        involved = [*output_tensors, *input_tensors]
        if not all(map(_is_plain, involved)):
            return self._torch("all_to_all", involved, "alltoall", output_tensors, input_tensors, opts)
        for parts, name in ((output_tensors, "output"), (input_tensors, "input")):
            checks.one_each("all_to_all", parts, self.size(), name)
        checks.one_dtype("all_to_all", involved)
        function = collectives.all_to_all
        return self._calls.run("all_to_all", opts, output_tensors, function, output_tensors, input_tensors)

    def barrier(self, opts: c10d.BarrierOptions = _BARRIER) -> dist.Work:
        if opts.device is not None and opts.device.type == "cuda" and self._cuda is not None:
            return cast("dist.Work", self._cuda.barrier(opts))
        return self._calls.run("barrier", opts, [], collectives.barrier)

    # What a lane does not know

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: c10d.GatherOptions = _GATHER
    ) -> dist.Work:
        involved = [input_tensors[0], *(output_tensors[0] if output_tensors else [])]
        return self._torch("gather", involved, "gather", output_tensors, input_tensors, opts)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: c10d.ScatterOptions = _SCATTER
    ) -> dist.Work:
        involved = [output_tensors[0], *(input_tensors[0] if input_tensors else [])]
        return self._torch("scatter", involved, "scatter", output_tensors, input_tensors, opts)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> dist.Work:
        return self._torch(f"send to rank {self._ranks[dst_rank]}", tensors, "send", tensors, dst_rank, tag)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> dist.Work:
        return self._torch(f"receive from rank {self._ranks[src_rank]}", tensors, "recv", tensors, src_rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._torch("receive from any rank", tensors, "recv_anysource", tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As ``dist.monitored_barrier``: rank 0 names the ranks that do not come.

        Raises:
            CommunicationError: a rank did not come in time.
        """
        try:
            self._gloo.monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)
        except RuntimeError as error:
            raise self._calls.error(str(error), "monitored_barrier", []) from error

    # The names before torch 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Life

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> HybridProcessGroup | None:
        """The group of some of these ranks, in ascending order. Collective over them; None on all other ranks."""
        if self.rank() not in new_ranks:
            return None
        members = tuple(sorted(new_ranks))
        self._splits[members] += 1
        name = group_name or f"{self.group_name}:{'_'.join(map(str, members))}:{self._splits[members]}"
        store = PrefixStore(f"{name}/", self._store)
        ranks = [self._ranks[member] for member in members]
        options = opts if isinstance(opts, ProcessGroupOptions) else self.hybridpar_options
        group = HybridProcessGroup(store, members.index(self.rank()), ranks, timeout or self._timeout, options)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    splitGroup = split_group  # the name by which C++ asks

    def shutdown(self) -> None:
        """Finish what was begun and free the connections."""
        self._calls.close()
        if self._cuda is not None and self._cuda is not self._gloo:
            self._cuda.shutdown()

    def abort(self) -> None:
        """Make present and later calls of all ranks fail, as far as they can be told."""
        self._calls.abort()
        self._gloo.abort()
        if self._cuda is not None and self._cuda is not self._gloo:
            self._cuda.abort()

    # Choosing

    def _reduction(self, tensor: Tensor, op: dist.ReduceOp, operation: str) -> Reduction | None:
        """How the lane reduces it; None if it cannot."""
        if not _is_plain(tensor):
            return None
        reduction = collectives.reduction_of(op)
        if reduction is None or not collectives.can_reduce(tensor, reduction):
            return None
        if reduction.average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"{operation}: expected floating point for AVG, got {tensor.dtype}; use SUM and divide")
        return reduction

    def _torch(self, operation: str, tensors: Sequence[Tensor], method: str, *arguments: Any) -> dist.Work:
        """Let torch's own backend for these tensors do it."""
        try:
            work = cast("dist.Work", getattr(self._backend(operation, tensors), method)(*arguments))
        except RuntimeError as error:
            raise self._calls.error(f"{self._calls.blame()}{error}", operation, tensors) from error
        on_nccl = tensors[0].is_cuda and self._cuda is not self._gloo
        return work if on_nccl else TorchWork(work, self._calls, operation, tensors)

    def _torch_pairs(
        self, operation: str, method: str, pairs: Sequence[tuple[Tensor, Tensor]], options: Any
    ) -> dist.Work:
        """The same for pairs of output and input, of which NCCL makes one launch."""
        if len(pairs) > 1 and pairs[0][0].is_cuda and self._cuda not in (None, self._gloo):
            self._cuda._start_coalescing()
            for pair in pairs:
                getattr(self._cuda, method)(*pair, options)
            return cast("dist.Work", self._cuda._end_coalescing())
        works = [self._torch(operation, pair, method, *pair, options) for pair in pairs]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def _backend(self, operation: str, tensors: Sequence[Tensor]) -> Any:
        first = tensors[0]
        if first.is_cuda and self._cuda is not None:
            return self._cuda
        if not first.is_cpu:
            raise TypeError(f"{operation}: expected CPU or CUDA tensors, got {named(tensors)} on {first.device}")
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_contiguous():
                raise ValueError(
                    f"{operation}: expected contiguous tensors, got strides {tensor.stride()}; call contiguous() first"
                )
        return self._gloo


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided


def _topology(rank: int, size: int) -> Topology:
    """Of a rank that a launcher started, or that was given its number by hand."""
    found = detect()
    return found if found.rank == rank else Topology(rank, max(size, rank + 1), host=found.host, launcher="torch")
