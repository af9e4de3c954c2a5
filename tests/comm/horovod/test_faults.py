"""A rank that leaves or is killed is an error for the others, in bounded time, that names it."""

from __future__ import annotations

import time

import pytest

from tests.ranks import run_program

PROGRAM = """
import os, sys, time
import torch
import hybridpar.horovod as hvd
hvd.init(timeout=20)
for step in range(3):
    hvd.allreduce(torch.ones(2), name="loss")
began = time.monotonic()
if hvd.rank() == 1:
    LEAVE
try:
    WAIT
except RuntimeError as error:
    print(f"after {time.monotonic() - began:.0f} s {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
print("nothing was wrong")
"""
WAITS = {
    "in the engine": "hvd.allreduce(torch.ones(2), name='loss')",
    "in a round": "hvd.broadcast(torch.ones(2), 0)",
    "joined": "hvd.join()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_is_named(wait: str) -> None:
    text = PROGRAM.replace("LEAVE", "os._exit(9)").replace("WAIT", WAITS[wait])
    began = time.monotonic()
    size = 3 if wait == "in the engine" else 2
    statuses, outputs = run_program(text, size, timeout=60)
    survivors = [rank for rank in range(size) if rank != 1]
    assert statuses[1] == 9 and all(statuses[rank] == 3 for rank in survivors), outputs
    for rank in survivors:
        assert "CommunicationError" in outputs[rank][0] and "rank 1" in outputs[rank][0], outputs[rank]
    assert time.monotonic() - began < 45


def test_a_rank_that_shuts_down_early_is_named() -> None:
    text = PROGRAM.replace("LEAVE", "hvd.shutdown(); time.sleep(12); sys.exit(0)").replace("WAIT", WAITS["in a round"])
    statuses, outputs = run_program(text, 2, timeout=60)
    assert statuses == [3, 0], outputs
    assert "CommunicationError" in outputs[0][0], outputs


def test_ranks_that_end_at_different_times_end_well() -> None:
    text = """
import time, torch
import hybridpar.horovod as hvd
hvd.init()
for step in range(4):
    hvd.allreduce(torch.ones(2), name="loss")
hvd.broadcast_object("done")
time.sleep(0.5 * hvd.rank())
"""
    statuses, outputs = run_program(text, 3, timeout=60)
    assert statuses == [0, 0, 0], outputs
    assert not any("Error" in said for _, said in outputs), outputs


def test_a_forked_child_is_refused() -> None:
    text = """
import os, torch
import hybridpar.horovod as hvd
hvd.init()
if (child := os.fork()) == 0:
    try:
        hvd.allreduce(torch.ones(1))
    except RuntimeError as error:
        os._exit(7 if "in a forked child" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
hvd.allreduce(torch.ones(1))
"""
    statuses, outputs = run_program(text, 1, timeout=60)
    assert statuses == [0], outputs
