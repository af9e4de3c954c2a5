"""The plain store beside MXNet's ``dist_sync`` on ps-lite: two workers each, the same values, the same bits."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import kvstore
from hybridpar.comm.group import Group
from tests.comm.kvstore.pslite import run_pslite
from tests.comm.kvstore.running import need_mxnet
from tests.ranks import run_threads

_SHAPE, _TABLE, _STEPS = (7, 5), (6, 3), 6
_THRESHOLDS = (0.5, 0.3)

# What both sides draw from, so that they push the same.
_DRAWN = """
import numpy as np
def dense(rank, step):
    return np.random.default_rng([rank, step]).normal(size=(7, 5)).astype(np.float32) * (1 + rank) / 2
def rows(rank, step):
    indices = [[0, 3], [3, 5], [1], []][(rank + 2 * step) % 4]
    values = np.random.default_rng([rank, step, 1]).normal(size=(len(indices), 3)).astype(np.float32)
    return indices, values
def start(rank, shape):
    return np.random.default_rng([rank, 99]).normal(size=shape).astype(np.float32)
"""

_PSLITE = f"""
{_DRAWN}
import json
kv = mx.kv.create("dist_sync")
print("rank", kv.rank)
found = {{"type": kv.type, "workers": kv.num_workers}}
def pulled(key):
    out = mx.nd.zeros({_SHAPE})
    kv.pull(key, out=out)
    return out.asnumpy().tolist()
def sparse_pulled():
    out = mx.nd.sparse.zeros("row_sparse", {_TABLE})
    kv.row_sparse_pull("table", out=out, row_ids=mx.nd.array(list(range(6)), dtype="int64"))
    return out.asnumpy().tolist()
def push_rows(step):
    indices, values = rows(kv.rank, step)
    if indices:
        kv.push("table", mx.nd.sparse.row_sparse_array((values, indices), shape={_TABLE}, dtype="float32"))
    else:
        kv.push("table", mx.nd.sparse.zeros("row_sparse", {_TABLE}))
kv.init("w", mx.nd.array(start(kv.rank, {_SHAPE})))
kv.init("table", mx.nd.array(start(kv.rank, {_TABLE})).tostype("row_sparse"))
found["init"] = [pulled("w"), sparse_pulled()]
found["replaced"] = []
for step in range(3):
    kv.push("w", [mx.nd.array(dense(kv.rank, step)), mx.nd.array(dense(kv.rank, step + 50))])
    found["replaced"].append(pulled("w"))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
found["updated"] = []
for step in range({_STEPS}):
    kv.push("w", mx.nd.array(dense(kv.rank, step)))
    push_rows(step)
    found["updated"].append([pulled("w"), sparse_pulled()])
for threshold in {_THRESHOLDS}:
    kv.set_gradient_compression({{"type": "2bit", "threshold": threshold}})
    kv._barrier()
    kv.init(f"c{{threshold}}", mx.nd.array(start(kv.rank, {_SHAPE})))
    found[f"compressed {{threshold}}"] = []
    for step in range({_STEPS}):
        kv.push(f"c{{threshold}}", mx.nd.array(dense(kv.rank, step)))
        found[f"compressed {{threshold}}"].append(pulled(f"c{{threshold}}"))
print(json.dumps(found))
"""


@functools.cache
def _theirs() -> list[dict[str, Any]]:
    need_mxnet()
    return [json.loads(output.splitlines()[-1]) for output in run_pslite(_PSLITE, 2)]


def _ours(group: Group) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    exec(_DRAWN, drawn)
    kv = kvstore.create("dist_sync", group)
    found: dict[str, Any] = {"type": kv.type, "workers": kv.num_workers}

    def pulled(key: str) -> Any:
        out = np.zeros(_SHAPE, np.float32)
        kv.pull(key, out=out)
        return out.tolist()

    def sparse_pulled() -> Any:
        out = kvstore.RowSparse(torch.empty(0, dtype=torch.int64), torch.empty(0, 3), _TABLE)
        kv.row_sparse_pull("table", out=out, row_ids=torch.arange(6))
        return out.to_dense().tolist()

    def push_rows(step: int) -> None:
        indices, values = drawn["rows"](kv.rank, step)
        kv.push("table", kvstore.RowSparse(np.array(indices, np.int64), values, _TABLE))

    kv.init("w", drawn["start"](kv.rank, _SHAPE))
    table = drawn["start"](kv.rank, _TABLE)
    kv.init("table", kvstore.RowSparse(np.arange(6), table, _TABLE))
    found["init"] = [pulled("w"), sparse_pulled()]
    found["replaced"] = []
    for step in range(3):
        kv.push("w", [drawn["dense"](kv.rank, step), drawn["dense"](kv.rank, step + 50)])
        found["replaced"].append(pulled("w"))
    kv._set_updater(_descend)
    found["updated"] = []
    for step in range(_STEPS):
        kv.push("w", drawn["dense"](kv.rank, step))
        push_rows(step)
        found["updated"].append([pulled("w"), sparse_pulled()])
    for threshold in _THRESHOLDS:
        kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        kv.init(f"c{threshold}", drawn["start"](kv.rank, _SHAPE))
        found[f"compressed {threshold}"] = []
        for step in range(_STEPS):
            kv.push(f"c{threshold}", drawn["dense"](kv.rank, step))
            found[f"compressed {threshold}"].append(pulled(f"c{threshold}"))
    kv.close()
    return found


def _descend(key: Any, gradient: Any, weight: Any) -> None:
    if isinstance(gradient, kvstore.RowSparse):
        weight.index_add_(0, gradient.indices, -gradient.values)
    else:
        weight -= gradient


@functools.cache
def _found() -> list[dict[str, Any]]:
    return run_threads(2, _ours)


_SUBJECTS = {
    "the first worker's value is what all start from": "init",
    "without an updater the sum over devices and workers replaces the value": "replaced",
    "with an updater it sees the sum, of dense values and of rows": "updated",
    "2 bits with a threshold of 0.5": "compressed 0.5",
    "2 bits with a threshold of 0.3": "compressed 0.3",
    "the name stays": "type",
    "the number of workers": "workers",
}


@pytest.mark.parametrize("subject", _SUBJECTS, ids=str)
def test_equals_dist_sync_bit_for_bit(subject: str) -> None:
    need_mxnet()
    name = _SUBJECTS[subject]
    for theirs, ours in zip(_theirs(), _found(), strict=True):
        assert theirs[name] == ours[name]
