"""MXNet scripts on hybridpar: importing this registers the store, so that one line of the script changes.

    import hybridpar.mxnet  # before mxnet
    import mxnet as mx

    kv = mx.kv.create("dist_sync_hybridpar")

or, for a script that names ``dist_sync`` in many places, ``hybridpar.mxnet.override("dist_sync")`` at its top.
"""

from hybridpar.comm.mxnet.engine import StoreError
from hybridpar.comm.mxnet.override import override, register, restore
from hybridpar.comm.mxnet.store import KVStore, create
from hybridpar.head.mxnet import ShardedHead

register()

__all__ = ["KVStore", "ShardedHead", "StoreError", "create", "override", "restore"]
