"""Optimizer state by parameter name, so that it survives another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Optimizers = Optimizer | Mapping[str, Optimizer]


def by_name(optimizer: Optimizers | None) -> dict[str, Optimizer]:
    """One optimizer or several, under names."""
    if optimizer is None:
        return {}
    return {"optimizer": optimizer} if isinstance(optimizer, Optimizer) else dict(optimizer)


def describe(optimizers: Mapping[str, Optimizer], names: Mapping[Tensor, str]) -> dict[str, Any]:
    """What the manifest says of the optimizers: parameter groups, hyperparameters, and state that is no tensor.

    Raises:
        ValueError: an optimizer has a name with a slash, holds a parameter that is in neither model nor head, or
            state that JSON and tensors by row cannot hold.
    """
    for key, optimizer in optimizers.items():
        if "/" in key:
            raise ValueError(f"optimizer names: expected no slash in them, got {key!r}")
        for parameter, state in optimizer.state.items():
            _check_state(_name(names, parameter, key), parameter, state, key)
    return {
        key: {
            "type": _kind(optimizer),
            "groups": [
                {
                    "params": [_name(names, parameter, key) for parameter in group["params"]],
                    "options": {k: _plain(v, f"{key}.{k}") for k, v in group.items() if k != "params"},
                }
                for group in optimizer.param_groups
            ],
            "plain": {
                names[parameter]: {k: _plain(v, k) for k, v in state.items() if not isinstance(v, Tensor)}
                for parameter, state in optimizer.state.items()
            },
        }
        for key, optimizer in optimizers.items()
    }


def tensors(optimizers: Mapping[str, Optimizer], names: Mapping[Tensor, str], rows: bool | None) -> dict[str, Tensor]:
    """State tensors as ``optimizer/parameter/key``.

    Args:
        rows: True: only those with a row for each row of a sharded parameter; False: all others.
    """
    return {
        f"{key}/{names[parameter]}/{slot}": value
        for key, optimizer in optimizers.items()
        for parameter, state in optimizer.state.items()
        for slot, value in state.items()
        if isinstance(value, Tensor) and is_row_state(names[parameter], parameter, value) == rows
    }


def is_row_state(name: str, parameter: Tensor, value: Tensor) -> bool:
    """Whether a state tensor of a head's parameter has one entry for each of its rows."""
    return name.startswith("head.") and value.ndim > 0 and value.shape[0] == parameter.shape[0]


def _check_state(name: str, parameter: Tensor, state: Mapping[str, Any], key: str) -> None:
    if not is_cut(parameter):
        return
    for slot, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1 and not is_row_state(name, parameter, value):
            raise ValueError(
                f"{key}: expected state of {name} with an entry for each of its {len(parameter)} rows, or one number, "
                f"got {slot} of shape {list(value.shape)}, which cannot be cut anew for other ranks; use an "
                "optimizer that works element by element, such as SGD or AdamW, for the head"
            )


def is_cut(parameter: Tensor) -> bool:
    """Whether a parameter is cut across ranks."""
    group = getattr(parameter, "hybridpar_group", None)
    return group is not None and group.size > 1


def check(optimizers: Mapping[str, Optimizer], names: Mapping[Tensor, str], described: Mapping[str, Any]) -> None:
    """Whether saved state fits.

    Raises:
        ValueError: the optimizers, their types or their parameter groups differ from the saved ones; names both.
    """
    if set(optimizers) != set(described):
        raise ValueError(f"optimizers: the checkpoint holds {sorted(described)}, expected here {sorted(optimizers)}")
    for key, optimizer in optimizers.items():
        saved = described[key]
        mine = [[_name(names, p, key) for p in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in saved["groups"]]
        if _kind(optimizer) != saved["type"] or mine != theirs:
            raise ValueError(
                f"{key}: the checkpoint holds {saved['type']} over {[len(group) for group in theirs]} parameters, "
                f"expected here {_kind(optimizer)} over {[len(group) for group in mine]}; "
                "build the same optimizer, or load without it"
            )


def restore(
    optimizers: Mapping[str, Optimizer],
    names: Mapping[Tensor, str],
    described: Mapping[str, Any],
    replicated: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
) -> None:
    """Put saved state back; the inverse of ``describe`` and ``tensors``. It has passed ``check``."""
    for key, optimizer in optimizers.items():
        saved = described[key]
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options["options"].items()})
        optimizer.state.clear()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            prefix = f"{key}/{names[parameter]}/"
            state = dict(saved["plain"].get(names[parameter], {}))
            for source in (replicated, rows):
                state |= {
                    k.removeprefix(prefix): _near(v, parameter) for k, v in source.items() if k.startswith(prefix)
                }
            if state:
                optimizer.state[parameter] = state


def _kind(optimizer: Optimizer) -> str:
    """What its state means."""
    policy = getattr(optimizer, "policy", None)  # of a RowOptimizer
    return type(optimizer if policy is None else policy).__name__


def _near(value: Tensor, parameter: Tensor) -> Tensor:
    # Step counts stay on the CPU, as torch's optimizers keep them.
    return value.clone() if value.ndim == 0 else value.to(parameter.device)


def _name(names: Mapping[Tensor, str], parameter: Tensor, key: str) -> str:
    if parameter not in names:
        raise ValueError(
            f"{key}: expected only parameters of the given model and head, got another of shape "
            f"{list(parameter.shape)}; pass the model it belongs to"
        )
    return names[parameter]


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{what}: expected a value that JSON can hold, got {type(value).__name__}") from error
    return value
