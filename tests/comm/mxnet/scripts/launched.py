"""A script as it was written for ``dist_sync``, but for the first lines: for workers, servers and the scheduler."""

from __future__ import annotations

import hybridpar.mxnet

# isort: split
import mxnet as mx

hybridpar.mxnet.override("dist_sync")
kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.zeros((2,)))
out = mx.nd.zeros((2,))
kv.pushpull(0, mx.nd.ones((2,)) * (kv.rank + 1), out=out)
ours, where = isinstance(kv, hybridpar.mxnet.KVStore), kv._group.topology
place = f"local {kv.local_rank} of {where.local_size}, by {where.launcher}"
print(f"worker {kv.rank} of {kv.num_workers}, {place}: ours {ours} {out.asnumpy().tolist()}", flush=True)
