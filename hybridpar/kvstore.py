"""MXNet's key-value store on the engine: ``hybridpar.kvstore.create("dist_sync")``, with or without MXNet."""

from hybridpar.comm.kvstore.names import Op, known_names
from hybridpar.comm.kvstore.sparse import RowSparse
from hybridpar.comm.kvstore.store import KVStore, create

PerseusOp = Op  # as scripts for Perseus call it

__all__ = ["KVStore", "Op", "PerseusOp", "RowSparse", "create", "known_names"]
