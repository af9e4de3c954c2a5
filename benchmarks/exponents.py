"""Compressed exponents: how fast, and how few bits the gradients of real trainings take.

    python benchmarks/exponents.py [--values 2097152] [--steps 1 50 400] [--json FILE]

First table: drawn values, one thread; GB/s of the values, median of the repeats. *add* is expanding, and adding to what
is there, as a rank does with what another one sent; *copy* is torch's copy of as many bytes; *zlib* is zlib at its
fastest level, on the same bytes. Bits are those that a value takes; *least* is what the entropy of exponents leaves,
if sign and mantissa are noise.

Second table: gradients of the replicated parameters in the trainings of `recipes/insightface` (preset glyphs: a
convolutional network) and `recipes/bert` (preset embedded), one rank, at some of their first steps, as one bucket; the
speed is that of compressing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.report import Row, table, write_json
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import hybridpar as hp
from hybridpar.comm.lanes.exponents import compress, compressed_bound, expand

sys.path.insert(0, str(Path(__file__).parents[1]))

import recipes.bert.presets as bert_presets
import recipes.insightface.presets as face_presets
from recipes.bert.tasks import open_task
from recipes.bert.trainer import Trainer as BertTrainer
from recipes.common.loop import Run
from recipes.insightface.inputs import open_data
from recipes.insightface.trainer import Trainer as FaceTrainer

DTYPES = (torch.bfloat16, torch.float32)
REPEATS = 15


def seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def bits(values: Tensor) -> float:
    """That a value takes."""
    form = torch.empty(compressed_bound(values.numel(), values.dtype), dtype=torch.uint8)
    return 8 * compress(values, form) / values.numel()


def least_bits(values: Tensor) -> float:
    """Sign, mantissa, and the entropy of the exponents, each seen by itself."""
    kind, mantissa = (torch.int16, 7) if values.dtype is torch.bfloat16 else (torch.int32, 23)
    exponents = (values.view(kind) >> mantissa) & 255
    shares = torch.bincount(exponents.to(torch.int64)) / values.numel()
    shares = shares[shares > 0]
    return 1 + mantissa - float((shares * shares.log2()).sum())


def samples(count: int) -> dict[str, Tensor]:
    """What gradients may look like: float32 [count]."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(count, generator=generator)
    noise = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32).view(torch.float32)
    return {
        "normal": normal,
        "half of them zero": torch.where(torch.rand(count, generator=generator) < 0.5, normal, 0.0),
        "third powers": normal**3,
        "random bits": noise,
    }


def speed(name: str, values: Tensor) -> Row:
    dtype, count = values.dtype, values.numel()
    form = torch.empty(compressed_bound(count, dtype), dtype=torch.uint8)
    length = compress(values, form)
    target = values.clone()
    raw = values.view(torch.uint8).numpy().tobytes()
    taken = {
        "compress": seconds(lambda: compress(values, form)),
        "expand": seconds(lambda: expand(form[:length], target)),
        "add": seconds(lambda: expand(form[:length], target, add=True)),
        "copy": seconds(lambda: target.copy_(values)),
        "zlib": seconds(lambda: zlib.compress(raw, 1), 1),
    }
    row: dict[str, object] = {"format": str(dtype).removeprefix("torch."), "values": name}
    row |= {f"{what} GB/s": f"{values.nbytes / 1e9 / each:.2f}" for what, each in taken.items()}
    row |= {
        "bits": f"{8 * length / count:.2f}",
        "least bits": f"{least_bits(values):.2f}",
        "zlib bits": f"{8 * len(zlib.compress(raw, 1)) / count:.2f}",
    }
    return row


def glyphs(folder: Path, group: hp.Group) -> Run[Any]:
    config = face_presets.PRESETS["glyphs"][1]
    config = replace(config, run=replace(config.run, out=folder))
    return FaceTrainer(config, *open_data(config), group)


def bert(folder: Path, group: hp.Group) -> Run[Any]:
    config = bert_presets.PRESETS["embedded"][1]
    config = replace(config, run=replace(config.run, out=folder))
    return BertTrainer(config, open_task(config, group), group)


TRAININGS: dict[str, Callable[[Path, hp.Group], Run[Any]]] = {"glyphs": glyphs, "bert": bert}


def gradients(trainer: Run[Any], steps: int) -> Iterator[Tensor]:
    """Of every step, those of all parameters that every rank holds, one behind the other in float32."""
    seen: dict[int, Tensor] = {}

    def look(optimizer: Optimizer, *_: object) -> None:
        seen.update({
            id(parameter): parameter.grad.reshape(-1).float().clone()
            for settings in optimizer.param_groups
            for parameter in settings["params"]
            if parameter.grad is not None and not hasattr(parameter, "hybridpar_group")
        })  # fmt: skip

    handle = register_optimizer_step_pre_hook(look)
    try:
        batch = trainer.settings.batch
        batches = trainer.batches(0, steps * batch)
        for step in range(steps):
            seen.clear()
            trainer.learn(batches, trainer.settings.optimizer.rate(step, trainer.steps))
            yield torch.cat(list(seen.values()))
    finally:
        handle.remove()


def real(name: str, steps: list[int], folder: Path) -> Iterator[Row]:
    trainer = TRAININGS[name](folder / name, hp.Group.alone())
    for step, values in enumerate(gradients(trainer, max(steps)), 1):
        if step in steps:
            row: dict[str, object] = {"training": name, "values": f"{values.numel():,}", "step": step}
            for dtype in DTYPES:
                kind, sent = str(dtype).removeprefix("torch."), values.to(dtype)
                form = torch.empty(compressed_bound(sent.numel(), dtype), dtype=torch.uint8)
                row[f"{kind} bits"] = f"{bits(sent):.2f}"
                row[f"{kind} GB/s"] = f"{sent.nbytes / 1e9 / seconds(partial(compress, sent, form)):.2f}"
            yield row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--values", type=int, default=1 << 21, help="of the first table")
    parser.add_argument("--trainings", nargs="*", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 50, 400], help="of the trainings, from 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write both tables there, too")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    fast = [speed(name, values.to(dtype)) for dtype in DTYPES for name, values in samples(options.values).items()]
    print(table(fast, text_columns=2), flush=True)
    few: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.trainings:
            few += real(name, options.steps, Path(folder))
    if few:
        print("\n" + table(few, text_columns=1))
    if options.json:
        write_json(options.json, {"speed": fast, "trainings": few})


if __name__ == "__main__":
    main()
