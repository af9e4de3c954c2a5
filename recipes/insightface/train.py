"""Train a recogniser: the backbone replicated, the classification head cut by class across ranks.

    torchrun --standalone --nproc-per-node 2 -m recipes.insightface.train glyphs
    torchrun --standalone --nproc-per-node 8 -m recipes.insightface.train records --data.path faces/ --data.bins lfw.bin
    mpirun -n 2 python -m recipes.insightface.train folders --data.path people/
    python -m recipes.insightface.train glyphs --help          # every option

A run writes into --run.out: checkpoints/, metrics.jsonl, tensorboard/, plots/, export/. Started again with the same
command it goes on from its newest checkpoint, on any number of ranks.
"""

from __future__ import annotations

import hybridpar as hp
from recipes.common.metrics import read_metrics
from recipes.common.start import join, one_line_errors, parse, run_to_the_end, say_where_resumed
from recipes.insightface.config import TrainConfig
from recipes.insightface.inputs import open_data
from recipes.insightface.learner import BuildLearner, TorchLearner
from recipes.insightface.presets import PRESETS
from recipes.insightface.trainer import Trainer


def main(config: TrainConfig, build_learner: BuildLearner = TorchLearner) -> None:
    """Train to the end (or to SIGTERM), then verify, plot and export."""
    group = join(config)
    dataset, pairs = hp.together(group, lambda: open_data(config))
    trainer = Trainer(config, dataset, pairs, group, build_learner)
    resumed = trainer.resume()
    if trainer.chief:
        announce(trainer, len(dataset))
        say_where_resumed(resumed)
    finished = run_to_the_end(trainer)
    # The other ranks are done: they do not wait while rank 0 draws and exports.
    trainer.learner.close()
    group.barrier()
    group.close()
    if trainer.chief and finished:
        report(trainer)


def announce(trainer: Trainer, samples: int) -> None:
    """Say what is about to happen."""
    config, group = trainer.config, trainer.group
    print(
        f"{config.mode}: {group.size} ranks, {samples:,} images of {trainer.num_classes:,} identities, "
        f"{config.model.name} ({trainer.learner.framework}) -> {config.model.embedding_size}, "
        f"{trainer.steps:,} steps of {config.batch}"
    )


def report(trainer: Trainer) -> None:
    """On rank 0, at the end: the table, the plots, the exports, and where they are."""
    # Libraries that draw and export are large, and nobody else needs them.
    from recipes.insightface import export
    from recipes.insightface.evaluate import Evaluation, format_table, write_report
    from recipes.insightface.plots import plot_run
    from recipes.insightface.verification import raw_pixel_result

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
    config = parse(PRESETS, program=program, description=description)
    with one_line_errors():
        main(config, build_learner)


if __name__ == "__main__":
    cli("recipes.insightface.train", __doc__, TorchLearner)
