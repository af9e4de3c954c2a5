"""pack and unpack of CUDA tensors against plain PyTorch doing the same work, and against the device's copy bandwidth.

    PYTHONPATH=benchmarks python benchmarks/gpu/pack.py [--json FILE] [--repeats 20]

Columns: ours; `copy`, torch._foreach_copy_ into views of the bucket made beforehand (no scale, no check); `same work`,
that copy, a scale and a count of non-finite values; the ratio of `same work` to ours; the floor, the time that a plain
contiguous copy of as many bytes takes here, and ours over it; ours in GB/s, bytes read and written counted; what the
host spends on a call when it knows the tensors, and when their addresses are new. Microseconds, medians. Device times
are by events, the works in turns; inputs change places so that they do not stay in the device's cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch
from support.device_timing import Work, device_medians, host_median
from support.gradients import bert_base, resnet50
from support.report import table, write_json

from hybridpar.kernels import cuda, pack, pack_cuda, unpack

DEVICE = torch.device("cuda")
CASES: list[tuple[str, list[tuple[int, ...]], torch.dtype, torch.memory_format]] = [
    ("ResNet-50", resnet50(), torch.float32, torch.contiguous_format),
    ("ResNet-50, channels last", resnet50(), torch.float32, torch.channels_last),
    ("BERT-base", bert_base(), torch.float32, torch.contiguous_format),
    ("BERT-base in bfloat16", bert_base(), torch.bfloat16, torch.contiguous_format),
    ("10,000 x 1,000", [(1000,)] * 10_000, torch.float32, torch.contiguous_format),
    ("10,000 x 1,001", [(1001,)] * 10_000, torch.float32, torch.contiguous_format),
    ("one of 64 M", [(1 << 26,)], torch.float32, torch.contiguous_format),
    ("one bucket of 4 MB", [(1 << 20,)], torch.float32, torch.contiguous_format),
]
WIRES = [torch.float32, torch.bfloat16, torch.float16]
# More than the cache of any device holds.
COLD_BYTES = 256 << 20


class Case:
    """Gradients, their bucket, and copies of both to take turns with."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, layout: torch.memory_format, wire: torch.dtype
    ) -> None:
        self.counts = [torch.Size(shape).numel() for shape in shapes]
        self.moved = sum(self.counts) * (dtype.itemsize + wire.itemsize)
        self.sets = []
        for _ in range(max(2, -(-COLD_BYTES // self.moved))):
            tensors = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]
            if layout == torch.channels_last:
                tensors = [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in tensors]
            bucket = torch.randn(sum(self.counts), device=DEVICE, dtype=wire)
            views = [part.view(shape) for part, shape in zip(bucket.split(self.counts), shapes, strict=True)]
            self.sets.append((tensors, bucket, views))
        self.turns = cycle(self.sets)

    def pack(self) -> None:
        tensors, bucket, _ = next(self.turns)
        pack(tensors, self.counts, bucket, 0.5)

    def unpack(self) -> None:
        tensors, bucket, _ = next(self.turns)
        unpack(bucket, self.counts, tensors, 0.5)

    def pack_anew(self) -> None:
        """As for tensors that were never seen before."""
        pack_cuda._table.cache_clear()
        self.pack()

    def copy_in(self) -> None:
        tensors, _, views = next(self.turns)
        torch._foreach_copy_(views, tensors)

    def copy_out(self) -> None:
        tensors, _, views = next(self.turns)
        torch._foreach_copy_(tensors, views)

    def same_work_in(self) -> None:
        tensors, bucket, views = next(self.turns)
        torch._foreach_copy_(views, tensors)
        bucket.isfinite().logical_not_().sum()
        bucket.mul_(0.5)

    def same_work_out(self) -> None:
        tensors, bucket, views = next(self.turns)
        bucket.isfinite().logical_not_().sum()
        torch._foreach_copy_(tensors, views)
        torch._foreach_mul_(tensors, 0.5)


def measure(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    layout: torch.memory_format,
    wire: torch.dtype,
    repeats: int,
) -> list[dict[str, object]]:
    case = Case(shapes, dtype, layout, wire)
    plain = cycle([torch.randint(100, (2, case.moved // 2), dtype=torch.uint8, device=DEVICE) for _ in case.sets])

    def floor() -> None:
        halves = next(plain)
        halves[0].copy_(halves[1])

    ways: list[tuple[str, dict[str, Work]]] = [
        ("pack", {"ours": case.pack, "copy": case.copy_in, "same work": case.same_work_in, "floor": floor}),
        ("unpack", {"ours": case.unpack, "copy": case.copy_out, "same work": case.same_work_out, "floor": floor}),
    ]
    rows: list[dict[str, object]] = []
    for way, works in ways:
        taken = device_medians(works, repeats)
        known = host_median(works["ours"], repeats)
        anew = host_median(case.pack_anew, repeats) if way == "pack" else None
        rows.append(
            {
                "case": name,
                "wire": str(wire).removeprefix("torch."),
                "way": way,
                **{f"{key} us": round(value, 1) for key, value in taken.items()},
                "same work / ours": round(taken["same work"] / taken["ours"], 2),
                "ours / floor": round(taken["ours"] / taken["floor"], 2),
                "ours GB/s": round(case.moved / taken["ours"] / 1e3),
                "host us": round(known, 1),
                "host us, new": "" if anew is None else round(anew, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, besides the table")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if cuda.find_module("pack", DEVICE) is None:
        raise SystemExit("expected the compiled kernels, got none: see the warning above")
    rows = [
        row
        for name, shapes, dtype, layout in CASES
        for wire in WIRES
        for row in measure(name, shapes, dtype, layout, wire, options.repeats)
    ]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(table(rows, text_columns=3))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
