"""``save`` and ``load``."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpar.checkpoint import files, optimizers, random_state, rows
from hybridpar.checkpoint.optimizers import Optimizers
from hybridpar.comm.agreement import together
from hybridpar.comm.group import Group
from hybridpar.data_parallel import DataParallel
from hybridpar.head.classifier import ShardedClassifier

log = logging.getLogger("hybridpar")


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded.

    Attributes:
        step: as given to ``save``.
        path: its directory.
        extra: as given to ``save``.
        skipped: newer directories that could not be used, each with the reason.
    """

    step: int
    path: Path
    extra: dict[str, Any]
    skipped: tuple[str, ...] = field(default=())


def save(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module | None = None,
    head: ShardedClassifier | None = None,
    optimizer: Optimizers | None = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    group: Group,
) -> Path:
    """Write ``directory/step-XXXXXXXX``. Collective; ``directory`` is one folder that all ranks see.

    Rank 0 writes the replicated model and its optimizer state, every rank its own rows and theirs.

    Args:
        step: steps done so far.
        model: the backbone, bare or in ``DataParallel``.
        head: the sharded head, over ``group``. One that every rank holds whole (its group has size 1) is written once.
        optimizer: one torch optimizer, or several under names, over parameters of model and head.
        extra: anything that JSON can hold: data position, schedule, configuration.
        keep: how many of the newest checkpoints up to this step to keep; None keeps all. Later ones, which a run
            that went on from an earlier checkpoint may find, are left alone.
        group: the ranks.

    Returns:
        The directory, complete and on disk.

    Raises:
        OSError: a rank could not write (on every rank). The previous checkpoints are untouched.
        ValueError: an argument cannot be saved (on every rank).
    """
    directory = Path(directory)
    names = _parameter_names(model, head)
    named_optimizers = optimizers.by_name(optimizer)
    if head is not None:
        head.settle()

    def describe() -> dict[str, Any]:
        _check_arguments(step, model, head, extra, keep, group)
        return optimizers.describe(named_optimizers, names)

    described = together(group, describe)
    partial = Path(_on_root(group, lambda: str(files.start(directory, step))))
    entries, row_description = together(
        group, lambda: _write_files(partial, group, model, head, named_optimizers, names)
    )
    all_entries = [entry for theirs in group.all_gather_json(entries) for entry in theirs]

    def finish() -> str:
        manifest = {
            "format": files.FORMAT,
            "step": step,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "topology": {"ranks": group.size, **asdict(group.topology)},
            "model": None if model is None else _shapes(_bare(model).state_dict()),
            "head": None if head is None else _describe_head(head, all_entries, row_description),
            "optimizers": described,
            "extra": {} if extra is None else extra,
            "files": all_entries,
        }
        files.finish(partial, files.step_path(directory, step), manifest)
        if keep is not None:
            files.retain(directory, keep, step)
        return str(files.step_path(directory, step))

    return Path(_on_root(group, finish))


def load(
    directory: str | Path,
    *,
    step: int | None = None,
    model: nn.Module | None = None,
    head: ShardedClassifier | None = None,
    optimizer: Optimizers | None = None,
    verify: bool = True,
    random_generators: bool = True,
    group: Group,
) -> Checkpoint:
    """Read the newest usable checkpoint of ``directory`` into model, head and optimizers. Collective.

    Works on any number of ranks and under any rule: each rank reads the rows that its layout gives it.

    Args:
        directory: as given to ``save``, or one ``step-XXXXXXXX`` in it.
        step: load this one and no other.
        model, head, optimizer: built as they were when saved; None leaves that part alone.
        verify: compare every file's sha256, the ranks sharing the work.
        random_generators: put those of torch, NumPy and Python back, too, where the number of ranks is the one that
            saved. Leave it out where nothing goes on from here, as in evaluation.
        group: the ranks.

    Raises:
        FileNotFoundError: there is no usable checkpoint; says why each was refused.
        ValueError: the checkpoint is of another architecture, class count or optimizer; names both.
    """
    directory = Path(directory)
    path, manifest, skipped = _choose(directory, step, verify, group)
    for reason in skipped if group.rank == 0 else ():
        log.warning("checkpoint skipped: %s; using %s instead", reason, path.name)
    opened = together(group, lambda: _open(path, manifest, model, head, optimizer, random_generators, group))
    together(group, lambda: _restore(manifest, opened, model, head, group))
    return Checkpoint(manifest["step"], path, manifest["extra"], tuple(skipped))


def newest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in ``directory``, without opening it; None where there is none.

    Directories that hold no manifest, because writing them was interrupted, are passed over with a warning.
    """
    for path in files.candidates(Path(directory)).values():
        if (path / files.MANIFEST).is_file():
            return path
        log.warning("%s has no %s: writing it was interrupted; looking for the one before it", path, files.MANIFEST)
    return None


def _check_arguments(
    step: int, model: nn.Module | None, head: ShardedClassifier | None, extra: Any, keep: int | None, group: Group
) -> None:
    """Raises ValueError before anything is written."""
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step: expected a whole number of at least 0, got {step!r}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected at least 1 or None, got {keep}")
    if head is not None and head.group.size not in (1, group.size):
        raise ValueError(
            f"head: expected one that is cut over all {group.size} ranks or whole on each, got one that is cut over "
            f"{head.group.size}; save it with the group that it was built with"
        )
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra: expected a value that JSON can hold, got one that it cannot: {error}") from error
    if model is None:
        return
    for name, value in _bare(model).state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(f"model: expected a state_dict of tensors, got a {type(value).__name__} as {name}")
    for name, parameter in _bare(model).named_parameters():
        if optimizers.is_cut(parameter):
            raise ValueError(
                f"model: expected parameters that every rank holds whole, got {name}, which is cut across ranks; "
                "pass the backbone as model and the sharded head as head"
            )


def _write_files(
    partial: Path, group: Group, model: nn.Module | None, head: ShardedClassifier | None,
    named_optimizers: Any, names: dict[Tensor, str],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:  # fmt: skip
    """This rank's files: their manifest entries, and the description of the shards."""
    rank, size = group.rank, group.size
    entries = [files.write_tensors(partial / _rank_name(rank, size), random_state.random_states())]
    row_description: dict[str, Any] = {}
    if head is not None and (head.group.size > 1 or rank == 0):
        shard: dict[str, Tensor] = dict(head.named_parameters())
        shard |= optimizers.tensors(named_optimizers, names, rows=True)
        if head.class_graph is not None:
            shard[rows.CLASS_GRAPH] = head.class_graph
        row_description = rows.describe_rows(shard)
        shard[rows.CLASS_IDS] = head.layout.class_ids(head.group.rank)
        entries.append(files.write_tensors(partial / rows.shard_name(head.group.rank, head.group.size), shard))
    if rank == 0:
        if model is not None:
            entries.append(files.write_tensors(partial / "model.safetensors", _separate(_bare(model).state_dict())))
        replicated = optimizers.tensors(named_optimizers, names, rows=False)
        if head is not None and head.margin_state.numel():
            replicated["margin_state"] = head.margin_state
        if head is not None and head.draws is not None:
            replicated["draws"] = head.draws
        if head is not None and head.graph_draw is not None:
            replicated["graph_draw"] = head.graph_draw
        entries.append(files.write_tensors(partial / "replicated.safetensors", replicated))
    return entries, row_description


def _choose(directory: Path, step: int | None, verify: bool, group: Group) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint that is whole, its manifest, and why newer ones are not used."""
    refused: list[str] = []
    for path in map(Path, _on_root(group, lambda: [str(p) for p in _candidates(directory, step)])):
        problem = None
        try:
            manifest = files.read_manifest(path)
            for entry in manifest["files"][group.rank :: group.size] if verify else ():
                files.check_hash(path, entry)
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = [text for text in group.all_gather_json(problem) if text is not None]
        if not problems:
            return path, manifest, refused
        refused.append(problems[0])
    why = "; ".join(refused) or "there is no directory step-* in it"
    raise FileNotFoundError(f"{directory}: expected a complete checkpoint, got none: {why}")


def _candidates(directory: Path, step: int | None) -> list[Path]:
    if files.is_step_path(directory):
        return [directory]
    found = files.candidates(directory)
    return list(found.values()) if step is None else [found.get(step, files.step_path(directory, step))]


@dataclass(frozen=True)
class _Opened:
    """What was read and found to fit before anything is changed.

    Attributes:
        names: of all parameters.
        optimizers: by name.
        model, replicated, random: what the files hold; None where it is not wanted.
        rows: this rank's, in the shards.
    """

    names: dict[Tensor, str]
    optimizers: Mapping[str, Optimizer]
    model: dict[str, Tensor] | None
    replicated: dict[str, Tensor]
    random: dict[str, Tensor] | None
    rows: rows.RowFiles | None


def _open(
    path: Path, manifest: dict[str, Any], model: nn.Module | None, head: ShardedClassifier | None,
    optimizer: Optimizers | None, random_generators: bool, group: Group,
) -> _Opened:  # fmt: skip
    """All that may be refused, so that a refusal on any rank leaves everything on all of them as it was."""
    names, named_optimizers = _parameter_names(model, head), optimizers.by_name(optimizer)
    if model is not None:
        _check_model(path, manifest["model"], _shapes(_bare(model).state_dict()))
    if head is not None:
        _check_head(path, manifest["head"], head)
    if optimizer is not None:
        optimizers.check(named_optimizers, names, manifest["optimizers"])
    saved = manifest["topology"]["ranks"]
    if random_generators and saved != group.size and group.rank == 0:
        log.info("saved by %d ranks, loaded on %d: random generators are left as they are", saved, group.size)
    random_generators = random_generators and saved == group.size
    return _Opened(
        names,
        named_optimizers,
        None if model is None else load_file(path / "model.safetensors"),
        load_file(path / "replicated.safetensors"),
        load_file(path / _rank_name(group.rank, group.size)) if random_generators else None,
        None if head is None else rows.RowFiles(path, manifest["head"]["shards"], head.layout, head.group.rank),
    )


def _restore(
    manifest: dict[str, Any], opened: _Opened, model: nn.Module | None, head: ShardedClassifier | None, group: Group
) -> None:
    replicated = opened.replicated
    row_tensors: dict[str, Tensor] = {}
    if head is not None:
        row_tensors = _restore_head(manifest["head"], opened, head)
    if model is not None and opened.model is not None:
        _bare(model).load_state_dict(opened.model)
    if head is not None:
        if manifest["head"]["margin"] == repr(head.margin):
            head.margin_state.copy_(replicated.get("margin_state", head.margin_state))
            if head.draws is not None:
                head.draws.copy_(replicated.get("draws", head.draws))
        elif group.rank == 0:
            log.warning("the checkpoint's margin was %s, it is now %s", manifest["head"]["margin"], head.margin)
        _restore_graph(head, row_tensors.get(rows.CLASS_GRAPH), replicated.get("graph_draw"))
    if opened.optimizers:
        optimizers.restore(opened.optimizers, opened.names, manifest["optimizers"], replicated, row_tensors)
    if opened.random is not None:
        random_state.set_random_states(opened.random)


def _restore_head(described: dict[str, Any], opened: _Opened, head: ShardedClassifier) -> dict[str, Tensor]:
    """Rows, in place: a second copy of them might not fit into memory. Returns all that is cut as they are."""
    head.settle()  # what rows have missed so far is not to be made up for by those that come
    wanted = rows.row_likes(described["rows"], opened.optimizers)
    if head.class_graph is None or wanted.get(rows.CLASS_GRAPH, ((), None))[0] != head.class_graph.shape[1:]:
        wanted.pop(rows.CLASS_GRAPH, None)
    own = {name: parameter.detach() for name, parameter in head.named_parameters()}
    into = own | optimizers.tensors(opened.optimizers, opened.names, rows=True)
    assert opened.rows is not None
    found = opened.rows.read(wanted, into)
    head.load_state_dict({name: found[name] for name in own if found[name] is not own[name]}, False)
    return found


def _restore_graph(head: ShardedClassifier, saved: Tensor | None, draw: Tensor | None) -> None:
    """A class graph that is not there, or has another number of neighbours, is built in the next step."""
    if head.class_graph is None or head.graph_draw is None:
        return
    if saved is None or draw is None:
        head.graph_draw.fill_(-1)
        if head.group.rank == 0:
            log.info("the checkpoint has no class graph with %d neighbours: it is built", head.class_graph.shape[1])
    else:
        head.class_graph.copy_(saved)
        head.graph_draw.copy_(draw)


def _check_model(path: Path, saved: dict[str, Any] | None, mine: dict[str, Any]) -> None:
    if saved is None:
        raise ValueError(f"{path}: expected a model in the checkpoint, got none")
    for name in sorted(set(saved) | set(mine)):
        if saved.get(name) != mine.get(name):
            raise ValueError(
                f"{path}: another architecture: {name} is {saved.get(name, 'absent')} in the checkpoint and "
                f"{mine.get(name, 'absent')} in the model; build the model that was saved"
            )


def _check_head(path: Path, saved: dict[str, Any] | None, head: ShardedClassifier) -> None:
    if saved is None:
        raise ValueError(f"{path}: expected a head in the checkpoint, got none")
    for name in ("num_classes", "embedding_size"):
        if saved[name] != getattr(head, name):
            raise ValueError(f"{path}: {name} is {saved[name]} in the checkpoint and {getattr(head, name)} in the head")
    if ("bias" in saved["rows"]) != (head.bias is not None):
        raise ValueError(f"{path}: margin is {saved['margin']} in the checkpoint and {head.margin} in the head")


def _describe_head(
    head: ShardedClassifier, entries: list[dict[str, Any]], row_description: dict[str, Any]
) -> dict[str, Any]:
    return {
        "num_classes": head.num_classes,
        "embedding_size": head.embedding_size,
        "margin": repr(head.margin),
        "layout": head.layout.describe(),
        "rows": row_description,
        "shards": [entry["name"] for entry in entries if entry["name"].startswith("head-")],
    }


def _parameter_names(model: nn.Module | None, head: nn.Module | None) -> dict[Tensor, str]:
    modules = {"model": None if model is None else _bare(model), "head": head}
    return {
        parameter: f"{prefix}.{name}"
        for prefix, module in modules.items()
        if module is not None
        for name, parameter in module.named_parameters()
    }


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DataParallel) else model


def _shapes(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in state.items()}


def _separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory (tied weights): each is written as its own copy."""
    seen: set[int] = set()
    result = {}
    for name, tensor in state.items():
        shared = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in seen
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor.clone() if shared else tensor
    return result


def _rank_name(rank: int, size: int) -> str:
    return f"random-{rank:05d}-of-{size:05d}.safetensors"


def _on_root(group: Group, work: Callable[[], Any]) -> Any:
    """Collective: do ``work`` on rank 0 and give its result, which JSON can hold, to all."""
    return group.broadcast_json(together(group, lambda: work() if group.rank == 0 else None))
