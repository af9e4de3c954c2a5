"""Names of stores, and the constants of its operations."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import get_args

from hybridpar.comm.kvstore.reducer import ReduceOp


@dataclass(frozen=True)
class Kind:
    """What a name stands for.

    Attributes:
        name: as it was asked for, in lower case: ``KVStore.type``.
        distributed: whether values are combined over the ranks, and not only over this process's devices.
        on_device: whether they are merged on the device of the value that a key was initialised with, and not on CPU.
    """

    name: str
    distributed: bool
    on_device: bool


class Op(StrEnum):
    """How pushed values are combined. The texts ``"sum"``, ``"max"``, ``"min"`` and ``"mean"`` do as well."""

    Sum = "sum"
    Max = "max"
    Min = "min"
    Mean = "mean"


_KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", distributed=False, on_device=False),
        Kind("device", distributed=False, on_device=True),
        Kind("dist_sync", distributed=True, on_device=False),
        Kind("dist_device_sync", distributed=True, on_device=True),
        Kind("dist_sync_device", distributed=True, on_device=True),
        Kind("dist_sync_hybridpar", distributed=True, on_device=False),
        Kind("dist_device_sync_hybridpar", distributed=True, on_device=True),
        Kind("dist_sync_perseus", distributed=True, on_device=False),
        Kind("dist_device_sync_perseus", distributed=True, on_device=True),
    )
}


_OPS: dict[str, ReduceOp] = {op: op for op in get_args(ReduceOp)}


def known_names() -> tuple[str, ...]:
    """All names that ``create`` takes."""
    return tuple(_KINDS)


def kind_of(name: str) -> Kind:
    """What ``name``, in any case, stands for.

    Raises:
        TypeError: not a text.
        ValueError: not a known name. MXNet would make a local store of some such names, in silence.
    """
    if not isinstance(name, str):
        raise TypeError(f"kvstore: expected a name as text, got {type(name).__name__}")
    found = _KINDS.get(name.lower())
    if found is not None:
        return found
    if "async" in name.lower():
        hint = "; updates are synchronous here, use dist_sync"
    else:
        near = difflib.get_close_matches(name.lower(), _KINDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"kvstore: expected one of {', '.join(_KINDS)}, got {name!r}{hint}")


def op_of(op: object) -> ReduceOp:
    """The text of an operation: of ``Op``, of its text in any case, or of another enumeration with the same names.

    Raises:
        ValueError: not such an operation.
    """
    text = op.name if isinstance(op, Enum) else op
    found = _OPS.get(text.lower()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"op: expected {', '.join(map(repr, _OPS))}, got {op!r}")
    return found
