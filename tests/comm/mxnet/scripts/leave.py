"""Rank 1 leaves: killed, by an exception, or at the regular end of its script. Says what rank 0 sees of it.

leave.py killed|exception|end|rows

``rows``: the end again, after pushes of rows.
"""

from __future__ import annotations

import os
import sys
import time

import hybridpar as hp
import hybridpar.mxnet as face

# isort: split
import mxnet as mx


def rows(kv: face.KVStore) -> None:
    kv.init("rows", mx.nd.zeros((3, 1)).tostype("row_sparse"))
    out = mx.nd.zeros((3, 1))
    for number in range(3):
        if kv.rank == 0:
            time.sleep(0.3)
        value = mx.nd.ones((1, 1)), mx.nd.array([number], dtype="int64")
        kv.push("rows", mx.nd.sparse.row_sparse_array(value, shape=(3, 1)))
        if kv.rank == 0:
            kv.pull("rows", out)
            print("sum", out.asnumpy().ravel().tolist(), flush=True)


def main(how: str) -> None:
    kv = face.create(timeout=60)
    kv.init(["w", "v"], [mx.nd.zeros((3,))] * 2)
    if how == "rows":
        rows(kv)
        return
    if kv.rank == 1 and how == "end":
        for _ in range(5):
            kv.push("w", mx.nd.ones((3,)))
        return  # with its last pushes still on their way
    if kv.rank == 1:
        time.sleep(1)
        kv.push("v", mx.nd.ones((3,)))  # on its way as well, and never to arrive
        if how == "killed":
            os.kill(os.getpid(), 9)
        raise SystemError("rank 1 leaves early")
    out = mx.nd.zeros((3,))
    began = time.monotonic()
    try:
        for _ in range(5):
            if how == "end":
                time.sleep(0.3)
            kv.push("w", mx.nd.ones((3,)))
            kv.pull("w", out)
            print("sum", out.asnumpy().tolist(), flush=True)
    except hp.CommunicationError as error:
        print(f"error {type(error).__name__} {error}", flush=True)
        print("seconds", round(time.monotonic() - began), flush=True)
        try:
            kv.barrier()
        except hp.CommunicationError as again:
            print("again", again, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
