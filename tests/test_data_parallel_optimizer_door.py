"""What an optimizer that steps bucket by bucket refuses, notices and lets go."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hybridpar as hp
from hybridpar.comm.engine.plan import Plan
from tests.ranks import run_threads
from tests.test_data_parallel_optimizer import OPTIMIZERS


def test_a_step_that_cannot_be_meant_is_refused() -> None:
    def work(group: Any) -> None:
        parallel = hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=OPTIMIZERS["momentum"])
        optimizer = parallel.optimizer
        assert optimizer is not None
        with pytest.raises(RuntimeError, match="expected a backward"):
            optimizer.step()
        with parallel.no_sync():
            parallel(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="outside no_sync"):
            optimizer.step()
        parallel(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="no closure"):
            optimizer.step(lambda: 0.0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="got none since the last step"):
            optimizer.step()
        parallel(torch.ones(1, 2)).sum().backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="without loss scaling"):
            scaler.step(optimizer)

    run_threads(2, work)


class Counting(torch.optim.SGD):
    """Keeps a number for all parameters together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for options in self.param_groups:
            options["calls"] = options.get("calls", 0) + 1
        super().step()


def test_optimizers_that_cannot_work_so_are_refused() -> None:
    def stranger(parameters: list[Tensor]) -> Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], lr=0.1)

    def work(group: Any) -> None:
        with pytest.raises(TypeError, match=r"expected a function that makes a torch\.optim\.Optimizer .* makes list"):
            hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=list)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"of the wrapped module only, got another of shape \[3\]"):
            hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=stranger)
        parallel = hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=lambda p: Counting(p, lr=0.1))
        parallel(torch.ones(1, 2)).sum().backward()
        with pytest.raises(TypeError, match="treats each parameter alone, got Counting, which keeps 'calls'"):
            parallel.synchronize()
        parallel = hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=OPTIMIZERS["momentum"])
        assert parallel.optimizer is not None
        parallel.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        with pytest.raises(ValueError, match=r"got another of shape \[4\]"):
            parallel(torch.ones(1, 2)).sum().backward()

    run_threads(2, work)


def test_a_gradient_that_is_written_while_its_sum_travels_is_noticed() -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        parallel = hp.DataParallel(model, group=group, optimizer=OPTIMIZERS["momentum"])
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.zero_grad(set_to_none=False)  # waits
        assert model.weight.grad is not None and not model.weight.grad.any()
        parallel(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match=r"gradient of bias was written while its sum was on its way"):
            parallel.synchronize()

    run_threads(2, work)


def test_threads_end_when_module_wrapper_and_optimizer_are_dropped() -> None:
    def count() -> int:
        return sum(thread.name == "hybridpar-engine" for thread in threading.enumerate())

    def work(group: Any) -> None:
        parallel = hp.DataParallel(nn.Linear(2, 1), group=group, plan=Plan(1, 2), optimizer=OPTIMIZERS["momentum"])
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.synchronize()

    gc.collect()
    before = count()
    run_threads(2, work)
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert count() <= before


def test_a_rank_lost_between_backward_and_forward_is_reported_by_the_forward_pass() -> None:
    def work(group: Any) -> None:
        parallel = hp.DataParallel(nn.Linear(2, 1), group=group, optimizer=OPTIMIZERS["momentum"])
        if group.rank == 1:
            return
        parallel(torch.ones(1, 2)).sum().backward()
        with pytest.raises(hp.CommunicationError, match=r"all_reduce of the gradients of bias \.\. weight"):
            parallel(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="out of step"):
            parallel(torch.ones(1, 2))

    run_threads(2, work, timeout=0.5)
