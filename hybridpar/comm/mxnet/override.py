"""Names under which MXNet finds the store."""

from __future__ import annotations

from mxnet.kvstore import KVStoreBase

from hybridpar.comm.kvstore.names import Kind, kind_of, known_names
from hybridpar.comm.mxnet.store import KVStore

# Names that MXNet has itself; only ``override`` takes them.
_NATIVE = frozenset({"local", "device", "dist_sync", "dist_device_sync", "dist_sync_device"})


def register() -> None:
    """Let ``mx.kv.create`` find the store by the names that are not MXNet's own."""
    for name in known_names():
        if name not in _NATIVE:
            _enter(kind_of(name))


def override(name: str = "dist_sync") -> None:
    """From now on ``mx.kv.create(name)`` makes a store of hybridpar, so that existing scripts run as they are.

    Args:
        name: ``dist_sync``, ``dist_device_sync`` or ``dist_sync_device``.

    Raises:
        ValueError: a name that is unknown, or of a store that does not communicate.
    """
    kind = kind_of(name)
    if not kind.distributed:
        raise ValueError(f"override: expected a name that begins with 'dist', got {name!r}, which needs no other store")
    _enter(kind)


def restore(name: str = "dist_sync") -> None:
    """Undo ``override``: ``mx.kv.create(name)`` makes MXNet's own store again.

    Raises:
        ValueError: not a name that MXNet has a store for, or not overridden.
    """
    kind = kind_of(name)
    if kind.name not in _NATIVE or kind.name not in KVStoreBase.kv_registry:
        raise ValueError(f"restore: expected a name that was overridden, got {name!r}")
    del KVStoreBase.kv_registry[kind.name]


def _enter(kind: Kind) -> None:
    # MXNet calls what it finds without arguments, so every name has a class that knows it.
    KVStoreBase.kv_registry[kind.name] = type(
        "KVStore", (KVStore,), {"default_name": kind.name, "__doc__": KVStore.__doc__}
    )
