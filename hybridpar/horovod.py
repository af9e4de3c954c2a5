"""Horovod's torch API: ``import hybridpar.horovod as hvd`` in place of ``import horovod.torch as hvd``.

Scripts stay as they are. torchrun and mpirun launch them; see docs/migrating.md for what differs.
"""

from __future__ import annotations

from typing import Any

from hybridpar.comm.group import Group
from hybridpar.comm.horovod.collectives import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from hybridpar.comm.horovod.compression import Compression
from hybridpar.comm.horovod.context import (
    add_process_set,
    current,
    init,
    is_initialized,
    process_set_by_id,
    remove_process_set,
    shutdown,
)
from hybridpar.comm.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hybridpar.comm.horovod.handles import poll, synchronize
from hybridpar.comm.horovod.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from hybridpar.comm.horovod.optimizer import DistributedOptimizer
from hybridpar.comm.horovod.process_sets import ProcessSet, global_process_set
from hybridpar.comm.horovod.queries import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)
from hybridpar.comm.horovod.reduce_op import ReduceOp
from hybridpar.sync_batch_norm import SyncBatchNorm as _SyncBatchNorm

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_by_id",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

_MISSING = {
    "elastic": "jobs that change their size while they run; restart from a checkpoint instead: torchrun "
    "--max-restarts starts failed ranks again, and hybridpar.checkpoint loads on any number of ranks",
    "start_timeline": "Horovod's timeline; use torch.profiler, or hybridpar.Timeline with hybridpar.DataParallel",
    "stop_timeline": "Horovod's timeline; use torch.profiler, or hybridpar.Timeline with hybridpar.DataParallel",
}


class SyncBatchNorm(_SyncBatchNorm):
    """``hybridpar.SyncBatchNorm`` with Horovod's arguments, over all ranks. CPU and CUDA.

    Construct layers, and run them, in the same order on all ranks.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d.
        group: the ranks; None means those of ``init``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group | None = None,
    ) -> None:
        ranks = current().statistics_group() if group is None else group
        super().__init__(num_features, eps, momentum, affine, track_running_stats, group=ranks)


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise AttributeError(f"hybridpar.horovod has no {name}: {_MISSING[name]}")
    raise AttributeError(f"module 'hybridpar.horovod' has no attribute {name!r}")
