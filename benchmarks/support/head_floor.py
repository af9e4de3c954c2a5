"""What no step of an exact head can be faster than on this machine: its products and its memory traffic alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.head_cases import Work

# Rows whose products are timed: with the batch and their products they stay in a core's own cache.
_CHUNK = 896
FLOOR_BYTES = 256 << 20


def floor_seconds(work: Work) -> float:
    """Of one step on this rank, while all ranks measure: see the head of this file."""
    ranks = dist.get_world_size()
    batch, width = work.batch * ranks, work.embedding
    rows = torch.randn(_CHUNK, width).bfloat16()
    features, products = torch.randn(batch, width).bfloat16(), torch.empty(_CHUNK, batch).bfloat16()
    to_features, to_rows = torch.empty(batch, width).bfloat16(), torch.empty(_CHUNK, width).bfloat16()
    memory = torch.ones(FLOOR_BYTES // 4)

    def four_products() -> None:
        for _ in range(2):  # logits are computed in both passes
            torch.mm(rows, features.T, out=products)
        torch.mm(products.T, rows, out=to_features)
        torch.mm(products, features, out=to_rows)

    chunks = math.ceil(work.classes / ranks) / _CHUNK
    moved = 2 * 4 * width * math.ceil(work.classes / ranks)  # rows and momentum
    return chunks * seconds_of(four_products, 200) + moved / FLOOR_BYTES * seconds_of(lambda: memory.mul_(1.0), 4)


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Of one call, the median of several measurements that all ranks begin together."""
    measured = []
    for _ in range(5):
        call()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            call()
        measured.append((time.perf_counter() - start) / times)
    return statistics.median(measured)
