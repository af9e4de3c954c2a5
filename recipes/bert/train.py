"""Train a BERT: the encoder replicated, the vocabulary head cut by token across ranks.

    torchrun --standalone --nproc-per-node 2 -m recipes.bert.train embedded
    torchrun --standalone --nproc-per-node 8 -m recipes.bert.train base --data.path corpus/ --precision bfloat16
    torchrun --standalone --nproc-per-node 2 -m recipes.bert.train classify --data.path reviews.csv \
        --model.pretrained runs/bert/export
    python -m recipes.bert.train embedded --help          # every option

A run writes into --run.out: tokenizer/, cache/, checkpoints/, metrics.jsonl, tensorboard/, plots/, export/. Started
again with the same command it goes on from its newest checkpoint, on any number of ranks.
"""

from __future__ import annotations

import json

import hybridpar as hp
from recipes.bert import export
from recipes.bert.config import TrainConfig
from recipes.bert.plots import plot_run
from recipes.bert.presets import PRESETS
from recipes.bert.report import REPORT_FILE, format_table
from recipes.bert.tasks import open_task
from recipes.bert.trainer import Trainer
from recipes.common.metrics import read_metrics
from recipes.common.start import join, one_line_errors, parse, run_to_the_end, say_where_resumed


def main(config: TrainConfig) -> None:
    """Train to the end (or to SIGTERM), then evaluate, plot and export."""
    group = join(config)
    trainer = Trainer(config, open_task(config, group), group)
    resumed = trainer.resume()
    if trainer.chief:
        announce(trainer)
        say_where_resumed(resumed)
    finished = run_to_the_end(trainer)
    group.barrier()
    group.close()
    if trainer.chief and finished:
        report(trainer)


def announce(trainer: Trainer) -> None:
    """Say what is about to happen."""
    config, bert = trainer.config, trainer.learner.encoder.config
    print(trainer.task.summary)
    print(
        f"{config.mode}: {trainer.group.size} ranks, {trainer.task.num_samples:,} sequences of up to "
        f"{config.data.length} tokens, {trainer.task.num_classes:,} classes, BERT of {bert.num_hidden_layers} layers x "
        f"{bert.hidden_size}, {trainer.steps:,} steps of {config.batch}"
    )


def report(trainer: Trainer) -> None:
    """On rank 0, at the end: the table, the plots, the export, and where they are."""
    config, baselines = trainer.config, trainer.task.baselines
    plots = config.run.out / "plots"
    plots.mkdir(exist_ok=True)
    bert = trainer.learner.encoder.config
    title = f"{config.task}, {bert.num_hidden_layers} x {bert.hidden_size}, {config.mode}, {trainer.group.size} ranks"
    unit = "token" if config.task == "mask" else "text"
    written = plot_run(read_metrics(config.run.out), plots, title=title, baselines=baselines, unit=unit)
    results = {"model": trainer.results, **baselines}
    path = plots / REPORT_FILE
    path.write_text(json.dumps({"step": trainer.step, "results": results}, indent=2) + "\n", encoding="utf-8")
    print("\nOn text never trained on:\n" + format_table(results))
    print("\nplots      ", *written, path)
    print("checkpoint ", hp.checkpoint.newest(trainer.checkpoints))
    if config.run.export:
        export.main(export.Options(checkpoint=trainer.checkpoints, out=config.run.out / "export"))


if __name__ == "__main__":
    arguments = parse(PRESETS, program="recipes.bert.train", description=__doc__)
    with one_line_errors():
        main(arguments)
