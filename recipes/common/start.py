"""From a command line to ranks that know each other, and from an expected error to one line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro

import hybridpar as hp
from hybridpar.topology import detect
from recipes.common.config import TrainingConfig
from recipes.common.loop import Run
from recipes.common.metrics import MetricsWriter

ConfigT = TypeVar("ConfigT")


def join(config: TrainingConfig) -> hp.Group:
    """Meet the other ranks, load plugins, and see that the run can write. Collective."""
    group = hp.init(timeout=config.timeout, interfaces=config.gradients.interfaces)
    logging.basicConfig(format="%(message)s")
    for name in ("hybridpar", "recipes"):
        logging.getLogger(name).setLevel(logging.INFO if group.rank == 0 else logging.WARNING)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.threads or max(1, cores // group.topology.local_size))
    load_plugins(config.plugins)
    prepare_output(config.run.out, group)
    return group


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


def say_where_resumed(resumed: hp.checkpoint.Checkpoint | None) -> None:
    """On rank 0: which checkpoint a run goes on from, and which could not be used."""
    if resumed is not None:
        print(f"resumed from {resumed.path}, step {resumed.step}" + "".join(f"; skipped {s}" for s in resumed.skipped))


def run_to_the_end(run: Run[Any]) -> bool:
    """Train, with a record of it on rank 0, or only evaluate what is trained. Returns whether the end was reached."""
    with contextlib.ExitStack() as stack:
        metrics = None
        if run.chief:
            options = run.settings.run
            writer = MetricsWriter(options.out, resumed_step=run.step, tensorboard=options.tensorboard)
            metrics = stack.enter_context(writer)
        if run.step >= run.steps:
            run.evaluate()
        finished = run.train(metrics)
    if run.chief and not finished:
        print(f"stopped at step {run.step} of {run.steps}; the same command goes on from there")
    return finished


def parse(presets: dict[str, tuple[str, ConfigT]], *, program: str, description: str | None) -> ConfigT:
    """A configuration: a preset named on the command line, and the options that change it."""
    return tyro.extras.overridable_config_cli(
        presets,
        prog=f"python -m {program}",
        description=description,
        console_outputs=detect().rank == 0,
    )


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that a user can do something about end the program with one line each."""
    try:
        yield
    except (ValueError, OSError, hp.CommunicationError, hp.NonFiniteError) as error:
        sys.exit(f"error: {error}")
