"""Checks of process sets, join, threads, mistakes, and of ending and beginning again, on three ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import hybridpar as hp
import hybridpar.horovod as hvd
from tests.comm.horovod.scripts.collective_checks import FLOATS


def process_sets_work_side_by_side() -> None:
    ends, single = hvd.add_process_set([2, 0]), hvd.ProcessSet([1])
    assert (single.size(), single.rank(), single.included()) == (None, None, None)
    hvd.add_process_set(single)
    assert ends.ranks == [0, 2] and (ends.process_set_id, single.process_set_id) == (1, 2)
    assert hvd.process_set_by_id(1) is ends and hvd.global_process_set.size() == 3
    assert ends.included() == (hvd.rank() != 1) and ends.size() == 2
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="expected a member, got rank 1"):
            hvd.allreduce(torch.ones(1), process_set=ends)
        with pytest.raises(ValueError, match="expected a member, got rank 1"):
            ends.rank()
        assert hvd.allreduce(torch.full((2,), 5.0), name="x", op=hvd.Sum, process_set=single).tolist() == [5.0, 5.0]
    else:
        assert ends.rank() == hvd.rank() // 2
        for _ in range(3):
            total = hvd.allreduce(torch.full((2,), float(hvd.rank())), name="x", process_set=ends)
            assert total.tolist() == [1.0, 1.0]
        assert hvd.broadcast(torch.tensor(hvd.rank()), 2, process_set=ends).item() == 2
        with pytest.raises(ValueError, match=r"root_rank: expected one of the ranks \[0, 2\], got 1"):
            hvd.broadcast(torch.tensor(0), 1, process_set=ends)
        assert hvd.allgather_object(hvd.rank(), process_set=ends) == [0, 2]
        hvd.barrier(process_set=ends)
    assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 3
    for wrong, message in (
        (hvd.ProcessSet([0, 2]), "got those of ProcessSet"),
        (hvd.ProcessSet([1, 3]), r"ranks below 3, at least one, got \[1, 3\]"),
        (ends, "not registered yet"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.add_process_set(wrong)
    with pytest.raises(hp.CommunicationError, match=r"the process set of ranks 0, 1 on rank 0; .* of ranks 1, 2 on"):
        hvd.add_process_set([0, 1] if hvd.rank() == 0 else [1, 2])
    assert hvd.remove_process_set(ends) and hvd.remove_process_set(single)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert ends.ranks is None and ends.process_set_id is None
    with pytest.raises(ValueError, match="expected a process set that is registered"):
        hvd.allreduce(torch.ones(1), process_set=ends)
    with pytest.raises(ValueError, match="expected a process set that is registered"):
        hvd.remove_process_set(ends)


def uneven_ranks_join() -> None:
    for _ in range(2):
        for step in range(2 + 3 * hvd.rank()):
            present = [rank for rank in range(3) if step < 2 + 3 * rank]
            value = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), name="loss")
            assert value.item() == pytest.approx(sum(rank + 1 for rank in present) / 3)
            handles = [hvd.allreduce_async_(torch.ones(5), name=f"{i}", op=hvd.Sum) for i in range(10)]
            assert all(hvd.synchronize(handle)[0].item() == len(present) for handle in handles)
        assert hvd.join() == 2
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1, 2]
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def barriers_wait() -> None:
    began = time.monotonic()
    if hvd.rank() == 2:
        time.sleep(0.3)
    hvd.barrier()
    assert time.monotonic() - began > 0.25


def threads_may_call() -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(5):
            result = hvd.allreduce(torch.full((3,), float(number)), name=f"thread {number}", op=hvd.Sum)
            if result.tolist() != [3.0 * number] * 3:
                wrong.append(f"{number} {step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def mistakes_say_what_was_expected() -> None:
    one = torch.ones(1)
    for call, kind, message in (
        (lambda: hvd.allreduce(one, average=True, op=hvd.Sum), ValueError, "expected op or average, got both"),
        (lambda: hvd.allreduce(one, op=17), ValueError, r"op: expected hvd\.Average, Sum, Min, Max or Product, got 17"),
        (lambda: hvd.allreduce(one, op=hvd.Adasum), NotImplementedError, "got Adasum, which this face does not have"),
        (lambda: hvd.allreduce(1.0), TypeError, r"expected a torch\.Tensor, got float"),
        (lambda: hvd.allreduce(one.to_sparse()), TypeError, "use hvd.sparse_allreduce_async"),
        (lambda: hvd.allreduce(one > 0), TypeError, "got torch.bool; cast it first"),
        (lambda: hvd.sparse_allreduce_async(one, "x"), TypeError, "expected a sparse COO tensor"),
        (lambda: hvd.reducescatter(one, op=hvd.Max), ValueError, r"expected op hvd\.Average or hvd\.Sum, got Max"),
        (lambda: hvd.grouped_allreduce(one), TypeError, "expected a list of tensors, got a tensor"),
        (lambda: hvd.grouped_allreduce([]), ValueError, "expected at least one tensor"),
        (lambda: hvd.allreduce_(one.expand(3)), ValueError, "expected elements that each have their own memory"),
        (lambda: hvd.broadcast(one, 3), ValueError, r"root_rank: expected one of the ranks \[0, 1, 2\], got 3"),
        (lambda: hvd.broadcast_parameters(3, 0), ValueError, "expected a dict or a list of tensors, got int"),
        (lambda: hvd.broadcast_parameters({"a": 3}, 0), ValueError, "expected tensors, got int for a"),
        (lambda: hvd.ProcessSet([0, 0]), ValueError, "expected different ranks"),
        (lambda: hvd.process_set_by_id(77), ValueError, "got 77"),
        (lambda: hvd.elastic, AttributeError, "no elastic: jobs that change their size .* restart from a checkpoint"),
        (lambda: hvd.nonsense, AttributeError, "no attribute 'nonsense'"),
    ):
        with pytest.raises(kind, match=message):
            call()


def differences_between_ranks_are_named_on_every_rank() -> None:
    rank = hvd.rank()
    for call, message in (
        (
            lambda: hvd.allreduce(torch.ones(2 + rank), name="d"),
            r"float32\[2\] by Average on rank 0; .*\[3\] .* rank 1",
        ),
        (lambda: hvd.allreduce(torch.ones(2, dtype=FLOATS[rank]), name="d"), r"float16\[2\] by Average on rank 2"),
        (lambda: hvd.allreduce(torch.ones(2), name="d", op=[hvd.Sum, hvd.Max, hvd.Sum][rank]), "Sum on ranks 0, 2; "),
        (lambda: hvd.allgather(torch.ones(2, 1 + rank), name="d"), r"\[\*, 1\] on rank 0; "),
        (lambda: hvd.broadcast(torch.ones(2), rank, name="d"), "from rank 1 on rank 1"),
        (lambda: hvd.broadcast_parameters({"w": torch.ones(1 + rank // 2)}, 0), r"float32\[2\] from rank 0 on rank 2"),
    ):
        with pytest.raises(hp.CommunicationError, match=message):
            call()
    for step in range(4):
        if step == 3:
            with pytest.raises(hp.CommunicationError, match=r"grows.*float32\[3\] by Average on ranks 0, 1; .*\[4\]"):
                hvd.allreduce(torch.ones(3 + rank // 2), name="grows")
        else:
            hvd.allreduce(torch.ones(3), name="grows")
    assert hvd.allreduce(torch.ones(4), name="grows").tolist() == [1.0] * 4


def it_can_be_ended_and_begun_again() -> None:
    hvd.barrier()
    before = hvd.rank(), hvd.size()
    hvd.init()  # the second time it does nothing
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
        with pytest.raises(ValueError, match=r"not been initialized; call hvd\.init\(\) first"):
            call()
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair], timeout=30)
    assert (hvd.rank(), hvd.size()) == before and pair.process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    hvd.barrier()
    hvd.shutdown()
    dist.barrier()
    hvd.init(comm=[2, 0] if hvd_rank_was(before) != 1 else [1], timeout=30)
    assert (hvd.rank(), hvd.size()) == {0: (1, 2), 1: (0, 1), 2: (0, 2)}[before[0]]
    assert hvd.allreduce(torch.full((1,), float(before[0])), op=hvd.Sum).item() == {0: 2, 1: 1, 2: 2}[before[0]]
    hvd.barrier()
    hvd.shutdown()
    dist.barrier()
    hvd.init(process_sets="dynamic", timeout=30)
    hvd.shutdown()
    with pytest.raises(ValueError, match="process_sets: expected a list"):
        hvd.init(process_sets="both")
    hvd.init(timeout=30)


def hvd_rank_was(before: tuple[int, int]) -> int:
    """The rank of the job."""
    return before[0]
