"""pack and unpack against plain PyTorch doing the same work, and against the memory's own speed. One thread.

    python benchmarks/pack.py [--json FILE] [--repeats 15]

Columns: ours; `copy`, torch._foreach_copy_ into views of the bucket made beforehand (no scale, no check); `same work`,
that copy, a scale and a count of non-finite values; the ratio of `same work` to ours; the floor, the time that a plain
contiguous copy of as many bytes takes here. Milliseconds, median of the repeats, taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from support.report import table, write_json

from hybridpar.kernels import pack, unpack

Work = Callable[[], object]


def bottleneck_sizes() -> list[tuple[int, ...]]:
    """Parameter shapes of a 50-layer residual network with bottlenecks for 1,000 classes: 161 tensors, 25.6 M."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, inputs, 1, 1)] if block == 0 else []
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


CASES: list[tuple[str, list[tuple[int, ...]], torch.memory_format]] = [
    ("1,000 x 1,000", [(1000,)] * 1000, torch.contiguous_format),
    ("one of 16 M", [(1 << 24,)], torch.contiguous_format),
    ("ResNet-50", bottleneck_sizes(), torch.contiguous_format),
    ("ResNet-50, channels last", bottleneck_sizes(), torch.channels_last),
]
WIRES = [torch.float32, torch.bfloat16, torch.float16]


def medians(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Milliseconds of each work; they take turns, so that a busy moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def same_work_pack(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> object:
    torch._foreach_copy_(list(views), list(tensors))
    nonfinite = bucket.isfinite().logical_not_().sum()
    bucket.mul_(0.5)
    return int(nonfinite)


def same_work_unpack(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], bucket: torch.Tensor) -> object:
    nonfinite = bucket.isfinite().logical_not_().sum()
    torch._foreach_copy_(list(tensors), list(views))
    torch._foreach_mul_(list(tensors), 0.5)
    return int(nonfinite)


def measure(
    name: str, shapes: list[tuple[int, ...]], layout: torch.memory_format, wire: torch.dtype, repeats: int
) -> list[dict[str, object]]:
    tensors = [torch.randn(shape) for shape in shapes]
    if layout == torch.channels_last:
        tensors = [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in tensors]
    counts = [tensor.numel() for tensor in tensors]
    bucket = torch.empty(sum(counts), dtype=wire)
    views = [part.view(shape) for part, shape in zip(bucket.split(counts), shapes, strict=True)]
    moved = sum(counts) * (4 + wire.itemsize)
    source, target = torch.ones(moved // 2, dtype=torch.uint8), torch.empty(moved // 2, dtype=torch.uint8)
    directions: dict[str, dict[str, Work]] = {
        "pack": {
            "ours": lambda: pack(tensors, counts, bucket, 0.5),
            "copy": lambda: torch._foreach_copy_(views, tensors),
            "same work": lambda: same_work_pack(views, tensors, bucket),
        },
        "unpack": {
            "ours": lambda: unpack(bucket, counts, tensors, 0.5),
            "copy": lambda: torch._foreach_copy_(tensors, views),
            "same work": lambda: same_work_unpack(tensors, views, bucket),
        },
    }
    rows = []
    for direction, works in directions.items():
        taken = medians({**works, "floor": lambda: target.copy_(source)}, repeats)
        rows.append(
            {
                "case": name,
                "wire": str(wire).removeprefix("torch."),
                "way": direction,
                **{f"{key} ms": round(value, 3) for key, value in taken.items()},
                "same work / ours": round(taken["same work"] / taken["ours"], 2),
                "copy / ours": round(taken["copy"] / taken["ours"], 2),
                "ours / floor": round(taken["ours"] / taken["floor"], 2),
                "ours GB/s": round(moved / taken["ours"] / 1e6, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, besides the table")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for name, shapes, layout in CASES
        for wire in WIRES
        for row in measure(name, shapes, layout, wire, options.repeats)
    ]
    print(table(rows, text_columns=3))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
