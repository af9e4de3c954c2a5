"""When the hooks around a gradient's accumulation run, what they survive, and what DataParallel makes of it."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.lanes.lane import Lane
from hybridpar.gradient_hooks import GradientHooks, has_hooks
from hybridpar.kernels import _native
from tests.head.cases import errors_of
from tests.ranks import run_threads
from tests.waits import Waits


class Owner:
    """Notes what the hooks call. The first parameter of ``follow`` is followed when it is about to be accumulated."""

    def __init__(self, module: nn.Module, follow: int | None = None) -> None:
        self.calls: list[tuple[str, int, float | None]] = []
        self._follow = follow
        self.parameters: list[Tensor] = list(module.parameters())
        self.arrivals = _native.Arrivals()
        self.hooks = GradientHooks(module, self.parameters, self.before, self.after, self.arrivals)

    def before(self, index: int, parameter: Tensor) -> None:
        self.calls.append(("before", index, _first(parameter)))
        if index == self._follow:
            self.hooks.follow(index)

    def after(self, index: int, parameter: Tensor) -> None:
        self.calls.append(("after", index, _first(parameter)))


def _first(parameter: Tensor) -> float | None:
    return None if parameter.grad is None else parameter.grad.view(-1)[0].item()


class NoGradient(torch.autograd.Function):
    """The identity, whose backward has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class Sum(nn.Module):
    """Two parameters and their sum; the second one's gradient is lost where ``lossy``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, factor: float, lossy: bool = False) -> Tensor:
        two = NoGradient.apply(self.two) if lossy else self.two
        return factor * (self.one + two).sum()


def test_before_is_called_for_each_parameter_and_after_for_those_that_are_followed() -> None:
    module = Sum()
    owner = Owner(module, follow=1)
    for _ in range(2):
        module(3.0).backward()
    assert sorted(owner.calls[:3]) == [("after", 1, 3.0), ("before", 0, None), ("before", 1, None)]
    assert sorted(owner.calls[3:]) == [("after", 1, 6.0), ("before", 0, 3.0), ("before", 1, 3.0)]
    assert owner.calls.index(("before", 1, None)) + 1 == owner.calls.index(("after", 1, 3.0))


def test_gradients_of_which_nothing_must_be_known_are_counted_without_a_call() -> None:
    """The last one of a bucket, and one that is added to another, are called for; so are all when nothing counts."""
    module = Sum()
    owner = Owner(module)
    owner.arrivals.arrange([0, 0])
    owner.arrivals.counting = True
    module(3.0).backward()
    (name, last, gradient), other = owner.calls[0], 1 - owner.calls[0][1]
    assert (name, gradient, len(owner.calls)) == ("before", None, 1)
    assert other in owner.arrivals and last not in owner.arrivals
    assert [parameter.grad.item() for parameter in owner.parameters] == [3.0, 3.0]  # type: ignore[union-attr]

    owner.arrivals.clear(0)
    owner.calls.clear()
    module(2.0).backward()
    assert sorted(owner.calls) == [("before", 0, 3.0), ("before", 1, 3.0)] and owner.arrivals.count(0) == 0

    owner.calls.clear()
    owner.arrivals.add(other)
    module.zero_grad()
    module(1.0).backward()
    assert sorted(owner.calls) == [("before", 0, None), ("before", 1, None)]

    owner.calls.clear()
    owner.arrivals.clear(0)
    owner.arrivals.counting = False
    module.zero_grad()
    module(1.0).backward()
    assert sorted(owner.calls) == [("before", 0, None), ("before", 1, None)] and owner.arrivals.count(0) == 0


def test_a_gradient_that_is_lost_is_not_counted() -> None:
    module = Sum()
    owner = Owner(module)
    owner.arrivals.arrange([0, 0])
    owner.arrivals.counting = True
    module(3.0, lossy=True).backward()
    assert owner.arrivals.count(0) == 1 and 0 in owner.arrivals and not owner.calls


def test_nothing_is_called_where_nothing_is_added() -> None:
    module = Sum()
    owner = Owner(module)
    torch.autograd.grad(module(1.0), list(module.parameters()))
    assert owner.calls == []
    module(1.0, lossy=True).backward()
    assert owner.calls == [("before", 0, None)]
    assert module.two.grad is None


def test_an_accumulator_that_torch_has_replaced_is_found() -> None:
    module = Sum()
    owner = Owner(module)
    assert not owner.hooks.renew(0)
    module.one.data = module.one.data.double()
    assert owner.hooks.renew(0)
    assert not owner.hooks.renew(0)
    assert not owner.hooks.renew(1)
    module.one.requires_grad_(False)
    assert not owner.hooks.renew(0)
    module.one.requires_grad_(True)
    module(1.0).backward()
    assert sorted(owner.calls) == [("before", 0, None), ("before", 1, None)]


def test_hooks_are_seen_until_they_are_removed() -> None:
    module = Sum()
    assert not has_hooks(module.one)
    owner = Owner(module)
    owner.hooks.follow(1)
    assert owner.hooks
    assert has_hooks(module.one)
    module.double()
    assert has_hooks(module.two)  # followed: its hook outlives the accumulator
    assert not has_hooks(copy.deepcopy(module).two)
    owner.hooks.remove()
    assert not owner.hooks
    assert not has_hooks(module.one)
    assert not has_hooks(module.two)
    module(1.0).backward()
    assert owner.calls == []


@pytest.mark.parametrize("part", ["0", "2", ""])
@pytest.mark.parametrize("before_first", [True, False])
def test_sums_go_on_after_a_cast_and_back(part: str, before_first: bool) -> None:
    """torch takes the hooks away with the accumulators that it replaces."""

    def work(group: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        parallel = hp.DataParallel(model, group=group, bucket_bytes=16)
        plain = copy.deepcopy(model)
        for step in range(3):
            if step == (0 if before_first else 1):
                model.get_submodule(part).double().float()
            x = torch.ones(1, 2) + step
            for module in (parallel, plain):
                module.zero_grad()
                module(x).sum().backward()
            for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, expected.grad * group.size)

    run_threads(2, work)


def test_a_cast_while_a_gradient_holds_a_sum_is_refused() -> None:
    """What is added to it cannot be told from it any more."""

    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        parallel = hp.DataParallel(model, group=group)
        parallel(torch.ones(1, 2)).sum().backward()
        model.double().float()
        parallel(torch.ones(1, 2)).sum().backward()

    for error in errors_of(2, work):
        assert type(error) is RuntimeError and "keep their dtype and device while .grad holds a sum" in str(error)


def test_a_parameter_without_a_gradient_on_some_ranks() -> None:
    def work(group: Any) -> None:
        module = Sum()
        parallel = hp.DataParallel(module, group=group)
        for lossy, total in ((group.rank == 0, 2.0), (True, None), (False, 3.0)):
            parallel.zero_grad()
            parallel(group.rank + 1.0, lossy).backward()
            assert _first(module.one) == 3.0
            assert _first(module.two) == total

    run_threads(2, work)


def test_a_hook_that_takes_the_gradient_away_is_named() -> None:
    def work(group: Any) -> None:
        module = Sum()
        parallel = hp.DataParallel(module, group=group)
        module.one.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        parallel(1.0).backward()

    for error in errors_of(2, work):
        assert type(error) is RuntimeError and str(error).startswith("one: expected the tensor that was announced")


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_a_bucket_travels_with_its_last_gradient_whichever_that_is(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward of the first layer waits for the bucket of the two others."""

    def work(group: Any) -> None:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
        parallel = hp.DataParallel(model, group=group, bucket_bytes=96)
        assert [bucket.members for bucket in parallel._engine.buckets] == [(5, 4, 3, 2), (1, 0)]
        (track,) = {current.track for current in parallel._engine._rounds}
        arrived, all_reduce = threading.Event(), track.lane.all_reduce

        class Watched:
            def all_reduce(self, tensor: Tensor, op: Any) -> None:
                all_reduce(tensor, op)
                arrived.set()

        watched: Lane = Watched()  # type: ignore[assignment]
        monkeypatch.setattr(track, "lane", watched)
        for _ in range(2):
            arrived.clear()
            x = torch.ones(1, 3)
            for layer in order:
                x = model[layer](x)
                if layer == 0:
                    x = Waits.apply(x, arrived)
            x.sum().backward()

    run_threads(2, work)


def test_python_is_called_for_the_first_and_the_last_gradient_of_a_bucket_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of them where gradients are there already or are not synchronised."""
    calls: list[int] = []
    original = hp.DataParallel._before_accumulation

    def before(self: hp.DataParallel, index: int, parameter: Tensor) -> None:
        calls.append(index)
        original(self, index, parameter)

    monkeypatch.setattr(hp.DataParallel, "_before_accumulation", before)

    def work(group: Any) -> list[int]:
        module = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(10)])
        parallel = hp.DataParallel(module, group=group)
        counts = []
        for clear, synchronise in ((True, True), (True, True), (False, True), (True, False)):
            if clear:
                parallel.zero_grad()
            calls.clear()
            with contextlib.nullcontext() if synchronise else parallel.no_sync():
                torch.stack([parameter.sum() for parameter in module]).sum().backward()
            counts.append(len(calls))
            expected = 1.0 if clear else 2.0
            assert all(parameter.grad.tolist() == [expected] * 2 for parameter in module)  # type: ignore[union-attr]
        parallel.close()
        return counts

    assert run_threads(1, work) == [[2, 2, 10, 10]]
