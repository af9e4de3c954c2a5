"""hybridpar: replicated backbones, class-sharded heads, and one gradient engine between the ranks."""

from hybridpar import checkpoint, kvstore, partition
from hybridpar.comm import functional
from hybridpar.comm.agreement import together
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.errors import CommunicationError, NonFiniteError
from hybridpar.comm.functional import global_mean
from hybridpar.comm.group import Group, abort_thread_group, thread_groups
from hybridpar.comm.start import init
from hybridpar.comm.timeline.timeline import NoTimeline, Timeline
from hybridpar.comm.torch_face import backend as torch_backend  # noqa: F401 - registers "hybridpar" with torch
from hybridpar.comm.torch_face.ddp_hook import ddp_hook
from hybridpar.comm.torch_face.process_group import ProcessGroupOptions
from hybridpar.data_parallel import DataParallel
from hybridpar.engine_report import engine_report
from hybridpar.global_order import GlobalOrder
from hybridpar.grad_norm import clip_grad_norm_
from hybridpar.head.classifier import ShardedClassifier
from hybridpar.head.coverage import Coverage
from hybridpar.head.margins import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    Softmax,
    SphereFace,
)
from hybridpar.head.replicated import ReplicatedClassifier
from hybridpar.head.row_optimizers import RowAdagrad, RowAdamW, RowOptimizer, RowPolicy, RowSGD
from hybridpar.head.samplers import Drawn, HardSampler, Sampler, UniformSampler
from hybridpar.lamb import Lamb
from hybridpar.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "CommunicationError",
    "CosFace",
    "Coverage",
    "CurricularFace",
    "DataParallel",
    "Drawn",
    "GlobalOrder",
    "Group",
    "HardSampler",
    "Lamb",
    "MagFace",
    "Margin",
    "NoTimeline",
    "NonFiniteError",
    "Plan",
    "ProcessGroupOptions",
    "ReplicatedClassifier",
    "RowAdagrad",
    "RowAdamW",
    "RowOptimizer",
    "RowPolicy",
    "RowSGD",
    "Sampler",
    "ShardedClassifier",
    "Softmax",
    "SphereFace",
    "SyncBatchNorm",
    "Timeline",
    "UniformSampler",
    "Wire",
    "abort_thread_group",
    "checkpoint",
    "clip_grad_norm_",
    "ddp_hook",
    "engine_report",
    "functional",
    "global_mean",
    "init",
    "kvstore",
    "partition",
    "thread_groups",
    "together",
]
