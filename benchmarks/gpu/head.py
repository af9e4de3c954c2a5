"""A classification head on a CUDA device: whole steps and single kernels, against references and the roofline.

    PYTHONPATH=benchmarks python benchmarks/gpu/head.py [--json FILE] [--seconds 240] [--dry-run]

First table, whole steps (forward, backward, rows stepped on the way) of an hp.ShardedClassifier on one device: ArcFace,
rows and momentum in bfloat16, products of bfloat16 summed in float32; all of 10 million classes, for several sizes of
chunk, and a tenth of 100 million without momentum (half as many, and so on, where memory does not allow that).
Milliseconds are medians of the wall clock, from a device with nothing to do to one with nothing to do; `references` is
the same head by PyTorch alone, with rows rounded to the nearest (at random they would take the processor's time).

The roofline is the larger of the time in which a matmul of this run would do the head's products, three and the logits
once more in the backward pass, and the time in which a copy of this run would move every row that takes part (read
twice, written once) and its momentum (read and written once). `share` is the roofline over ours.

Second table, the kernels on one chunk with rows and products out of the cache: microseconds on the device, and the
time that a copy takes for the bytes that each must read and write at least.

Ours and the references must give the same loss, or it fails. With --dry-run everything runs on the CPU with its
kernels, at sizes that say nothing about a device, and the output says so.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest import mock

import torch
from support.device_timing import device_medians
from support.launch import available_memory
from support.report import table, write_json

import hybridpar as hp
from hybridpar import kernels
from hybridpar.kernels import Chunk, Gradient, Own, Rounding, Rows, cuda, rows_reference, softmax_reference

REFERENCES = {
    softmax_reference: ("add_exponentials", "to_probabilities"),
    rows_reference: (
        "load_rows", "measure_rows", "project_gradient", "step_sgd", "step_adamw", "step_adagrad", "advance_rows",
    ),
}  # fmt: skip
# Relative; logits of float32 products, added up in another order.
LOSS_TOLERANCE = 1e-3
# Of the memory, for what is not rows and momentum: chunks, features, the context.
RESERVE_BYTES = 4 << 30
# More than the cache of any device holds.
COLD_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        exact, sampled: classes.
        chunks: classes of a chunk, for the exact case; None for the head's own choice.
        steps, repeats: how often steps and kernels are timed.
    """

    device: str
    exact: int
    sampled: int
    chunks: Sequence[int | None]
    batch: int
    width: int
    rate: float
    kernel_classes: int
    steps: int
    repeats: int


DEVICE_SIZES = Sizes("cuda", 10_000_000, 100_000_000, (4096, 16384, 65536, None), 1024, 512, 0.1, 16384, 5, 20)
DRY_SIZES = Sizes("cpu", 20_000, 50_000, (1024, None), 32, 64, 0.1, 1024, 2, 3)


@dataclass(frozen=True)
class Machine:
    """What the device has shown in this run: bytes a second of a copy, operations a second of a matmul."""

    bandwidth: float
    operations: float

    @classmethod
    def measured(cls, sizes: Sizes) -> Machine:
        count, side = (1 << 30, 8192) if sizes.device == "cuda" else (1 << 24, 512)
        source = torch.empty(count, dtype=torch.uint8, device=sizes.device).fill_(1)
        target = torch.empty_like(source)
        left, right = (torch.randn(side, side, device=sizes.device, dtype=torch.bfloat16) for _ in range(2))
        works = {"copy": partial(target.copy_, source), "matmul": partial(torch.mm, left, right)}
        taken = device_medians(works, sizes.repeats, device=sizes.device)
        return cls(2e6 * count / taken["copy"], 2e6 * side**3 / taken["matmul"])


@contextmanager
def references() -> Iterator[None]:
    with ExitStack() as stack:
        for module, names in REFERENCES.items():
            for name in names:
                stack.enter_context(mock.patch.object(kernels, name, getattr(module, name)))
        yield


class Step:
    """A head, and batches to train it with."""

    def __init__(self, sizes: Sizes, classes: int, *, rate: float | None, momentum: float, chunk: int | None) -> None:
        self.sizes, self.classes, self.rate = sizes, classes, rate
        optimizer = hp.RowSGD(0.1, momentum=momentum, weight_decay=1e-4, state_dtype=torch.bfloat16)
        self.head = hp.ShardedClassifier(
            sizes.width, classes, dtype=torch.bfloat16, optimizer=optimizer, chunk_classes=chunk,
            sampler=None if rate is None else hp.UniformSampler(rate=rate), group=hp.Group.alone(), device=sizes.device,
        )  # fmt: skip
        random = torch.Generator().manual_seed(0)
        features = torch.randn(4, sizes.batch, sizes.width, generator=random).to(sizes.device)
        labels = torch.randint(classes, (4, sizes.batch), generator=random).to(sizes.device)
        self.batches = [(one.detach().requires_grad_(), two) for one, two in zip(features, labels, strict=True)]
        self.turns = cycle(self.batches)

    def __call__(self) -> None:
        features, labels = next(self.turns)
        features.grad = None
        self.head(features, labels).backward()

    def milliseconds(self, steps: int) -> float:
        """Of a step, after one more."""
        taken = []
        for _ in range(steps + 1):
            synchronize(self.sizes)
            start = time.perf_counter()
            self()
            synchronize(self.sizes)
            taken.append(1e3 * (time.perf_counter() - start))
        return statistics.median(taken[1:])

    @torch.no_grad()
    def loss(self) -> float:
        """Over all classes."""
        self.head.eval()
        loss = float(self.head(*self.batches[0]))
        self.head.train()
        return loss

    def round_to_the_nearest(self) -> None:
        assert self.head.row_optimizer is not None
        self.head.row_optimizer.policy = replace(self.head.row_optimizer.policy, stochastic_rounding=False)

    def floor(self, machine: Machine, *, momentum: bool) -> float:
        """Milliseconds of the roofline."""
        taking_part = self.classes * (1 if self.rate is None else self.rate)
        operations = 4 * 2 * taking_part * self.sizes.batch * self.sizes.width
        moved = taking_part * self.sizes.width * torch.bfloat16.itemsize * (5 if momentum else 3)
        return 1e3 * max(operations / machine.operations, moved / machine.bandwidth)


def synchronize(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def classes_that_fit(sizes: Sizes, wanted: int, *, momentum: bool) -> int:
    """As many as wanted, or half, a quarter: rows begin in the host's memory, rows and momentum are on the device."""
    host, device = available_memory(), available_memory()
    if sizes.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        device = torch.cuda.mem_get_info()[0]
    row = sizes.width * torch.bfloat16.itemsize
    each = row * (2 if momentum else 1) + 4
    while wanted > 1 and (wanted * (row + 16) > host or wanted * each + RESERVE_BYTES > device):
        wanted //= 2
    return wanted


def measure_step(
    sizes: Sizes,
    machine: Machine,
    classes: int,
    *,
    rate: float | None,
    momentum: float,
    chunk: int | None,
    compare: bool,
) -> dict[str, object]:
    step = Step(sizes, classes, rate=rate, momentum=momentum, chunk=chunk)
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ours, by_reference = step.milliseconds(sizes.steps), math.nan
    memory = torch.cuda.max_memory_allocated() / 1e9 if sizes.device == "cuda" else math.nan
    if compare:
        loss = step.loss()
        with references():
            expected = step.loss()
            if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
                raise SystemExit(f"{classes} classes: expected the references' loss {expected}, got {loss}")
            step.round_to_the_nearest()
            by_reference = step.milliseconds(2)
    step.head.close()
    floor = step.floor(machine, momentum=momentum > 0)
    return {
        "case": "all" if rate is None else f"rate {rate}",
        "chunk": chunk or "own choice",
        "classes": classes,
        "ours ms": round(ours, 1),
        "roofline ms": round(floor, 1),
        "share": round(floor / ours, 3),
        "references ms": round(by_reference, 1),
        "references / ours": round(by_reference / ours, 1),
        "GB": round(memory, 1),
    }


def steps_table(sizes: Sizes, machine: Machine, left: Callable[[], bool]) -> list[dict[str, object]]:
    exact = classes_that_fit(sizes, sizes.exact, momentum=True)
    rows = []
    for chunk in sizes.chunks:
        if left():
            compare = chunk is None
            case = partial(measure_step, sizes, machine, exact, rate=None, momentum=0.9, chunk=chunk, compare=compare)
            rows.append(case())
    if left():
        sampled = classes_that_fit(sizes, sizes.sampled, momentum=False)
        rows.append(measure_step(sizes, machine, sampled, rate=sizes.rate, momentum=0.0, chunk=None, compare=True))
    return rows


class OneChunk:
    """Inputs of the kernels, several times over, so that they do not stay in the device's cache."""

    def __init__(self, sizes: Sizes) -> None:
        classes, batch, width = sizes.kernel_classes, sizes.batch, sizes.width
        make = partial(torch.randn, device=sizes.device)
        copies = max(2, -(-COLD_BYTES // (4 * classes * batch))) if sizes.device == "cuda" else 2
        self.out = torch.empty(classes, batch, device=sizes.device, dtype=torch.bfloat16)
        self.products = cycle([make(classes, batch) for _ in range(copies)])
        if sizes.device == "cpu":  # its kernels give what they are given
            self.out = torch.empty(classes, batch)
        self.maximum, self.total = (
            torch.full((batch,), 3.0, device=sizes.device),
            torch.ones(batch, device=sizes.device),
        )
        self.norms = torch.rand(classes, device=sizes.device) + 0.5
        own = torch.arange(2, device=sizes.device)
        self.own = Own(own, own, torch.ones(2, device=sizes.device))
        rows = copies * classes
        self.weight, self.state, self.other = (make(rows, width).bfloat16() for _ in range(3))
        self.other.abs_()
        self.inverse_norms = torch.ones(rows, device=sizes.device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=sizes.device)
        self.sums = torch.ones(rows, device=sizes.device)
        self.gradient = Gradient(make(classes, width), 1e-3)
        self.loaded = torch.empty(classes, width, device=sizes.device, dtype=torch.bfloat16)
        order = torch.randperm(rows, device=sizes.device).view(copies, classes)
        self.picked = cycle([one.sort().values for one in order])

    @property
    def chunk(self) -> Chunk:
        return Chunk(next(self.products), self.norms, None, 64.0)

    @property
    def rows(self) -> Rows:
        return Rows(self.weight, self.inverse_norms, 0, len(self.norms), next(self.picked))

    def works(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Each kernel, and the bytes that it must move at least."""
        logits = self.out.numel() * (4 + self.out.element_size())
        row = 2 * self.loaded.numel()
        samples = self.maximum, self.total, torch.ones_like(self.total)
        near = Rounding()
        return {
            "add_exponentials": (
                lambda: kernels.add_exponentials(self.chunk, self.own, self.maximum, self.total, self.out), logits
            ),
            "to_probabilities": (
                lambda: kernels.to_probabilities(self.chunk, self.own, *samples, self.out, None), logits
            ),
            "load_rows": (lambda: kernels.load_rows(self.rows, self.loaded), 2 * row),
            "step_sgd": (
                lambda: kernels.step_sgd(self.rows, self.gradient, self.state, kernels.Sgd(0.1, 0.9, 1e-4), near),
                6 * row,
            ),
            "step_adamw": (
                lambda: kernels.step_adamw(
                    self.rows, self.gradient, self.state, self.other, self.steps, kernels.AdamW(0.01), near
                ),
                8 * row,
            ),
            "step_adagrad": (
                lambda: kernels.step_adagrad(self.rows, self.gradient, self.sums, kernels.Adagrad(0.1), near), 4 * row
            ),
        }  # fmt: skip


def kernels_table(sizes: Sizes, machine: Machine) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (work, moved) in OneChunk(sizes).works().items():

        def by_reference(work: Callable[[], object] = work) -> None:
            with references():
                work()

        taken = device_medians({"ours": work, "references": by_reference}, sizes.repeats, device=sizes.device)
        floor = 1e6 * moved / machine.bandwidth
        rows.append(
            {
                "kernel": name,
                "ours us": round(taken["ours"], 1),
                "floor us": round(floor, 1),
                "share": round(floor / taken["ours"], 2),
                "references us": round(taken["references"], 1),
                "references / ours": round(taken["references"] / taken["ours"], 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, besides the tables")
    parser.add_argument("--seconds", type=float, default=240, help="no case is begun after so many")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at small sizes")
    options = parser.parse_args()
    sizes, start = DRY_SIZES if options.dry_run else DEVICE_SIZES, time.monotonic()
    if options.dry_run:
        print("dry run: the kernels of the CPU at small sizes, no GPU was used")
    else:
        torch.set_num_threads(os.cpu_count() or 1)  # rows begin on the host
        if any(cuda.find_module(name, torch.device("cuda")) is None for name in ("margin_softmax", "row_update")):
            raise SystemExit("expected the compiled kernels, got none: see the warning above")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    machine = Machine.measured(sizes)
    print(
        f"a copy moves {machine.bandwidth / 1e9:.0f} GB/s, a bfloat16 matmul does {machine.operations / 1e12:.2f} T/s"
    )
    print(f"batch {sizes.batch}, embedding {sizes.width}; one chunk of {sizes.kernel_classes} classes:")
    of_kernels = kernels_table(sizes, machine)
    print(table(of_kernels, text_columns=1))
    gc.collect()
    of_steps = steps_table(sizes, machine, lambda: time.monotonic() - start < options.seconds)
    print(table(of_steps, text_columns=2) if of_steps else "whole steps: no time left")
    wanted = len(sizes.chunks) + 1
    if len(of_steps) < wanted:
        print(
            f"{wanted - len(of_steps)} of {wanted} cases were not begun: more than {options.seconds:.0f} s had passed"
        )
    if options.json:
        write_json(options.json, {"dry run": options.dry_run, "kernels": of_kernels, "steps": of_steps})


if __name__ == "__main__":
    main()
