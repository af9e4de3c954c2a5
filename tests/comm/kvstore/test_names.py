from __future__ import annotations

from enum import Enum

import pytest

from hybridpar import kvstore
from hybridpar.comm.kvstore.names import Op, kind_of, known_names, op_of


@pytest.mark.parametrize(
    ("name", "distributed", "on_device"),
    [
        ("local", False, False),
        ("device", False, True),
        ("dist_sync", True, False),
        ("dist_device_sync", True, True),
        ("dist_sync_device", True, True),
        ("dist_sync_hybridpar", True, False),
        ("dist_device_sync_hybridpar", True, True),
        ("dist_sync_perseus", True, False),
        ("dist_device_sync_perseus", True, True),
    ],
)
def test_names_say_who_takes_part_and_where_values_are_merged(name: str, distributed: bool, on_device: bool) -> None:
    kind = kind_of(name.upper())
    assert (kind.name, kind.distributed, kind.on_device) == (name, distributed, on_device)
    assert name in known_names()


def test_every_distributed_name_makes_module_scale_its_batch() -> None:
    """Trap: Module multiplies the batch by the workers only where 'dist' and '_sync' are in the type."""
    names = [name for name in known_names() if kind_of(name).distributed]
    assert names and all("dist" in name and "_sync" in name for name in names)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dist_sink", "did you mean 'dist_sync'"),
        ("locale", "did you mean 'local'"),
        ("dist_async", "updates are synchronous here, use dist_sync"),
        ("zookeeper", r"got 'zookeeper'$"),
        ("", "got ''"),
    ],
)
def test_an_unknown_name_raises_with_the_known_ones(name: str, hint: str) -> None:
    """Trap: MXNet makes a local store of an unknown name without 'dist', in silence."""
    with pytest.raises(ValueError, match=hint) as caught:
        kvstore.create(name)
    assert all(known in str(caught.value) for known in known_names())


def test_a_name_is_a_text() -> None:
    with pytest.raises(TypeError, match="expected a name as text, got int"):
        kvstore.create(3)  # type: ignore[arg-type]


class _Foreign(Enum):
    Sum = 0
    Max = 1


@pytest.mark.parametrize(
    ("op", "text"),
    [("sum", "sum"), ("MAX", "max"), (Op.Min, "min"), (kvstore.PerseusOp.Mean, "mean"), (_Foreign.Max, "max")],
)
def test_operations_by_text_constant_and_constants_of_others(op: object, text: str) -> None:
    assert op_of(op) == text


@pytest.mark.parametrize("op", ["product", None, 1, ""])
def test_an_unknown_operation_raises(op: object) -> None:
    with pytest.raises(ValueError, match="op: expected 'sum', 'max', 'min', 'mean', got"):
        op_of(op)
