"""The engine on CUDA tensors: sums of every wire, side by side with work on the caller's stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.engine.engine import Engine
from tests.gpu.device import DEVICE, busy
from tests.gpu.ranks import run_on_one_device

pytestmark = pytest.mark.gpu

SIZES = [70_000, 3, 1500, 40_000, 1]
WIRES = {
    "own": hp.Wire(),
    "bf16": hp.Wire(torch.bfloat16),
    "fp16 feedback": hp.Wire(torch.float16, error_feedback=True),
    "top": hp.Wire(top_k=1.0),
}


def _values(step: int, rank: int, index: int) -> Tensor:
    """Small whole numbers: their sums are exact in every format."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randint(-8, 9, (SIZES[index],), generator=generator).float()


def _sums(group: hp.Group) -> list[str]:
    wrong = []
    for name, wire in WIRES.items():
        for tracks in (1, 2):
            engine = Engine(group, plan=hp.Plan(100_000, tracks, wire=wire), check_finite=True)
            engine.register(list(map(str, SIZES)), [torch.empty(size, device=DEVICE) for size in SIZES])
            for step in range(4):
                # Rank 1 has no tensor 1; every tensor is only written after a while, and read at once afterwards.
                indices = [index for index in range(len(SIZES)) if (index, group.rank) != (1, 1)]
                given = {}
                for index in indices:
                    source = _values(step, group.rank, index).to(DEVICE)
                    busy(2.0)
                    given[index] = source + 0
                    engine.submit(index, given[index])
                busy(2.0)
                found = given | engine.flush()
                for index in range(len(SIZES)):
                    ranks = [rank for rank in range(group.size) if (index, rank) != (1, 1)]
                    expected = torch.stack([_values(step, rank, index) for rank in ranks]).sum(0)
                    if not torch.equal(found[index].cpu(), expected):
                        wrong.append(f"{name}, {tracks} tracks, step {step}, tensor {index}")
            engine.close()
    return wrong


def test_sums_are_exact_while_streams_are_busy() -> None:
    assert run_on_one_device(2, _sums) == [[], []]


def _refused(group: hp.Group) -> tuple[str, tuple[int, ...]]:
    engine = Engine(group, plan=hp.Plan(1, 2), check_finite=True)
    engine.register(["a", "b", "c"], [torch.empty(5, device=DEVICE)] * 3)
    for index in range(3):
        tensor = torch.ones(5, device=DEVICE)
        if (index, group.rank) == (1, 1):
            tensor[2] = math.nan
        engine.submit(index, tensor)
    try:
        engine.flush()
    except hp.NonFiniteError as error:
        return error.tensor, error.ranks
    return "nothing", ()


def test_what_is_not_finite_is_named_on_both_ranks() -> None:
    assert run_on_one_device(2, _refused) == [("b", (1,))] * 2


def _trained(group: hp.Group) -> dict[str, float]:
    """How far parameters are apart after training with the plain optimizer and bucket by bucket."""
    states = []
    for stepping in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)).to(
            DEVICE
        )

        def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

        parallel = hp.DataParallel(model, group=group, plan=hp.Plan(1 << 16, 2), optimizer=make if stepping else None)
        plain = None if stepping else make(list(model.parameters()))
        for step in range(6):
            parallel.zero_grad()
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + group.rank)).to(DEVICE)
            parallel(x).square().mean().backward()
            if plain is not None:
                plain.step()
        states.append({name: value.clone() for name, value in parallel.state_dict().items()})
        parallel.close()
    return {name: float((value - states[1][name]).abs().max()) for name, value in states[0].items()}


def test_steps_bucket_by_bucket_are_those_of_the_plain_optimizer() -> None:
    for apart in run_on_one_device(2, _trained):
        assert max(apart.values()) == 0.0, apart
