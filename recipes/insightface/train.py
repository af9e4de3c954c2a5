"""Train a recogniser: the backbone replicated, the classification head cut by class across ranks.

    torchrun --standalone --nproc-per-node 2 -m recipes.insightface.train glyphs
    torchrun --standalone --nproc-per-node 8 -m recipes.insightface.train records --data.path faces/ --data.bins lfw.bin
    mpirun -n 2 python -m recipes.insightface.train folders --data.path people/
    python -m recipes.insightface.train glyphs --help          # every option

A run writes into --run.out: checkpoints/, metrics.jsonl, tensorboard/, plots/, export/. Started again with the same
command it goes on from its newest checkpoint, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path

import torch
import tyro

import hybridpar as hp
from hybridpar.topology import detect
from recipes.insightface import export
from recipes.insightface.config import TrainConfig
from recipes.insightface.evaluate import Evaluation, format_table, write_report
from recipes.insightface.inputs import open_data
from recipes.insightface.learner import BuildLearner, TorchLearner
from recipes.insightface.metrics import MetricsWriter, read_metrics
from recipes.insightface.plots import plot_run
from recipes.insightface.presets import PRESETS
from recipes.insightface.trainer import Trainer
from recipes.insightface.verification import raw_pixel_result


def main(config: TrainConfig, build_learner: BuildLearner = TorchLearner) -> None:
    """Train to the end (or to SIGTERM), then verify, plot and export."""
    group = hp.init(timeout=config.timeout, interfaces=config.gradients.interfaces)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hybridpar").setLevel(logging.INFO if group.rank == 0 else logging.WARNING)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.threads or max(1, cores // group.topology.local_size))
    load_plugins(config.plugins)
    prepare_output(config.run.out, group)

    dataset, pairs = hp.together(group, lambda: open_data(config))
    trainer = Trainer(config, dataset, pairs, group, build_learner)
    resumed = trainer.resume()
    if trainer.chief:
        announce(trainer, len(dataset), resumed)

    with contextlib.ExitStack() as stack:
        metrics = None
        if trainer.chief:
            writer = MetricsWriter(config.run.out, resumed_step=trainer.step, tensorboard=config.run.tensorboard)
            metrics = stack.enter_context(writer)
        if trainer.step >= trainer.steps:
            trainer.evaluate()
        finished = trainer.train(metrics)
    # The other ranks are done: they do not wait while rank 0 draws and exports.
    trainer.learner.close()
    group.barrier()
    group.close()
    if trainer.chief and finished:
        report(trainer)
    elif trainer.chief:
        print(f"stopped at step {trainer.step} of {trainer.steps}; the same command goes on from there")


def load_plugins(plugins: tuple[str, ...]) -> None:
    """Import files (``*.py``) or modules for what they register.

    Raises:
        ValueError: there is no such file or module.
    """
    for plugin in plugins:
        if not plugin.endswith(".py"):
            try:
                importlib.import_module(plugin)
            except ModuleNotFoundError as error:
                raise ValueError(f"--plugins: expected a module or a .py file, got {plugin!r} ({error})") from error
            continue
        specification = importlib.util.spec_from_file_location(Path(plugin).stem, plugin)
        if specification is None or specification.loader is None or not Path(plugin).is_file():
            raise ValueError(f"--plugins: expected a Python file, got {plugin!r}")
        specification.loader.exec_module(importlib.util.module_from_spec(specification))


def prepare_output(out: Path, group: hp.Group) -> None:
    """Make the output folder and see that it can be written to, before hours of work. Collective.

    Raises:
        OSError: it cannot; on every rank.
    """

    def probe() -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".probe").write_text("")
        (out / ".probe").unlink()

    try:
        hp.together(group, probe if group.rank == 0 else lambda: None)
    except OSError as error:
        raise OSError(f"--run.out {out}: expected a folder that can be written to: {error}") from error


def announce(trainer: Trainer, samples: int, resumed: hp.checkpoint.Checkpoint | None) -> None:
    """Say what is about to happen."""
    config, group = trainer.config, trainer.group
    print(
        f"{config.mode}: {group.size} ranks, {samples:,} images of {trainer.num_classes:,} identities, "
        f"{config.model.name} ({trainer.learner.framework}) -> {config.model.embedding_size}, "
        f"{trainer.steps:,} steps of {config.batch}"
    )
    if resumed is not None:
        print(f"resumed from {resumed.path}, step {resumed.step}" + "".join(f"; skipped {s}" for s in resumed.skipped))


def report(trainer: Trainer) -> None:
    """On rank 0, at the end: the table, the plots, the exports, and where they are."""
    config = trainer.config
    evaluations = [Evaluation(trainer.results[pairs.name], raw_pixel_result(pairs)) for pairs in trainer.pairs]
    plots = config.run.out / "plots"
    plots.mkdir(exist_ok=True)
    raw_pixels = {each.raw_pixels.name: each.raw_pixels.accuracy for each in evaluations}
    model = f"{config.model.name} ({trainer.learner.framework})"
    title = f"{config.data.kind}, {model}, {config.mode}, {trainer.group.size} ranks"
    written = plot_run(read_metrics(config.run.out), plots, title=title, raw_pixels=raw_pixels)
    if evaluations:
        written += write_report(evaluations, plots, step=trainer.step)
        print("\nVerification on identities never trained:\n" + format_table(evaluations))
    print("\nplots      ", *written)
    print("checkpoint ", hp.checkpoint.newest(trainer.checkpoints))
    if config.run.export:
        folder = config.run.out / "export"
        export.main(export.Options(checkpoint=trainer.checkpoints, out=folder))
        for path in trainer.learner.export(folder):
            print(path)


def cli(program: str, description: str | None, build_learner: BuildLearner) -> None:
    """Parse the command line, train, and turn expected errors into one line each."""
    config = tyro.extras.overridable_config_cli(
        PRESETS,
        prog=f"python -m {program}",
        description=description,
        console_outputs=detect().rank == 0,
    )
    try:
        main(config, build_learner)
    except (ValueError, OSError, hp.CommunicationError, hp.NonFiniteError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    cli("recipes.insightface.train", __doc__, TorchLearner)
