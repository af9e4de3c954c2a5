"""The hook for DDP: means over the ranks, in every wire format, and nothing lost when DDP cuts its buckets anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp
from hybridpar.comm.torch_face.ddp_hook import DdpHookState, ddp_hook
from tests.ranks import run_processes

STEPS = 4
# Wires, and how many tracks.
CASES = {
    "plain": (hp.Wire(), 1),
    "plain on two tracks": (hp.Wire(), 2),
    "bfloat16": (hp.Wire(torch.bfloat16), 1),
    "what rounding leaves": (hp.Wire(torch.bfloat16, error_feedback=True), 2),
    "the largest values": (hp.Wire(top_k=0.1), 1),
    "the largest, rounded": (hp.Wire(torch.float16, top_k=0.05), 2),
}


class Network(nn.Module):
    """Its layers are used in another order than they are registered in, so DDP cuts its buckets anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(24, 3)
        self.first = nn.Linear(60, 70)
        self.middle = nn.Linear(70, 24)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


def _gradients(model: nn.Module) -> Iterator[list[Tensor]]:
    """Those of each step; the parameters stay as they are."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 60, generator=generator)).square().mean().backward()
        yield [parameter.grad.clone() for parameter in model.parameters()]


def _sent(left: Tensor, wire: hp.Wire) -> Tensor:
    """What of one parameter's gradient travels, by the definitions: the largest values, rounded."""
    flat = left.flatten()
    kept = torch.zeros_like(flat)
    if wire.top_k is not None and flat.numel() >= 1024:
        places = flat.abs().topk(math.ceil(wire.top_k * flat.numel())).indices
        kept[places] = flat[places]
    else:
        kept = flat
    return (kept if wire.dtype is None else kept.to(wire.dtype).float()).view_as(left)


def _expected(wire: hp.Wire) -> list[list[Tensor]]:
    """Parameter by parameter, without buckets: the mean over the ranks of what each of them sends."""
    model, size = Network(), dist.get_world_size()
    left = [torch.zeros_like(parameter) for parameter in model.parameters()]
    steps = []
    for gradients in _gradients(model):
        means = []
        for index, gradient in enumerate(gradients):
            whole = gradient + left[index]
            sent = _sent(whole, wire)
            if wire.keeps_residuals:
                left[index] = whole - sent
            everyone = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(everyone, sent)
            total = torch.stack(everyone).sum(0)
            # A sum that is formed in the wire's dtype is rounded to it; that of chosen values is not.
            means.append((total if wire.dtype is None or wire.top_k else total.to(wire.dtype).float()) / size)
        steps.append(means)
    return steps


def _hooked(group: hp.Group, wire: hp.Wire, tracks: int) -> tuple[DistributedDataParallel, DdpHookState]:
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.01)
    state, hook = ddp_hook(group, wire=wire, tracks=tracks)
    model.register_comm_hook(state, hook)
    return model, state


def _every_case(group: hp.Group) -> dict[str, str]:
    said = {}
    for name, (wire, tracks) in CASES.items():
        expected = _expected(wire)
        model, state = _hooked(group, wire, tracks)
        try:
            _compare(model, expected, wire)
            assert len(state._way_of) > len(state._codecs), "the buckets were cut anew"
            said[name] = ""
        except AssertionError as error:
            said[name] = str(error)
        state.close()
    said["failure"] = _failure(group)
    return said


def _compare(model: nn.Module, expected: list[list[Tensor]], wire: hp.Wire) -> None:
    # Buckets without a large tensor travel whole, and so their sums are rounded.
    tolerance = 2.0**-10 if wire.top_k and wire.dtype is not None else 0.0
    for step, (found, wanted) in enumerate(zip(_gradients(model), expected, strict=True)):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            difference = (one - other).abs() - tolerance * other.abs()
            assert difference.max() <= 1e-7, f"step {step}, parameter {index}: {difference.max()}"


def _failure(group: hp.Group) -> str:
    """What backward says on a rank whose partner cannot go on."""
    model, state = _hooked(group, hp.Wire(), 1)
    model(torch.ones(2, 60)).sum().backward()
    if group.rank == 1:
        assert state._tracks is not None
        state._tracks.abort("its disk is full")
    try:
        for _ in range(2):
            model(torch.ones(2, 60)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        state.close()
    return "nothing"


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, str]]:
    return run_processes(2, _every_case)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_means_of_what_the_wire_carries(on_two_ranks: Any, name: str) -> None:
    for said in on_two_ranks:
        assert said[name] == ""


def test_backward_raises_when_the_others_cannot_go_on(on_two_ranks: Any) -> None:
    assert "CommunicationError: rank 0: all_" in on_two_ranks[0]["failure"]
    assert "its disk is full" in on_two_ranks[0]["failure"]


def test_the_hook_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="tracks"):
        ddp_hook(hp.Group.alone(), tracks=0)
    with pytest.raises(ValueError, match="route"):
        ddp_hook(hp.Group.alone(), route="sideways")  # type: ignore[arg-type]
