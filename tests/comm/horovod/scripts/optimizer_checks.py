"""Checks of DistributedOptimizer: three ranks do what one process does on the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
import hybridpar.horovod as hvd
from tests.comm.horovod.scripts.whole_batch import KINDS, STEPS, alone, batches, loss_of, model, same, train, whole


def every_kind_of_optimizer_does_what_it_does_on_the_whole_batch() -> None:
    for name, make in KINDS.items():
        net = model()
        given = make(net.parameters())
        optimizer = hvd.DistributedOptimizer(given, named_parameters=net.named_parameters())
        assert isinstance(optimizer, type(given)) and type(optimizer).__name__ == name
        train(net, optimizer)
        same(net, alone(make))


def parameters_need_no_names() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()))
    train(net, optimizer)
    same(net, alone(KINDS["SGD"]))


def classes_with_arguments_of_their_own_are_served() -> None:
    class Named(torch.optim.Optimizer):
        def __init__(self, params: Any, must_have: str) -> None:
            super().__init__(params, {"rate": 0.1})
            self.must_have = must_have

        def step(self, closure: Any = None) -> str:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter -= group["rate"] * parameter.grad
            return self.must_have

    net = model()
    optimizer = hvd.DistributedOptimizer(Named(net.parameters(), "this"), net.named_parameters())
    train(net, optimizer, lambda loss: (loss.backward(), None if optimizer.step() == "this" else pytest.fail("?"))[1])
    same(net, alone(lambda p: torch.optim.SGD(p, lr=0.1)))


def schedulers_drive_it_made_before_or_after() -> None:
    expected = model()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    for step in range(STEPS):
        sgd.zero_grad()
        loss_of(expected, whole(step)).backward()
        sgd.step()
        schedule.step()
    for before in (True, False):
        net = model()
        given = torch.optim.SGD(net.parameters(), lr=0.5)
        early = torch.optim.lr_scheduler.ExponentialLR(given, 0.5) if before else None
        optimizer = hvd.DistributedOptimizer(given, net.named_parameters())
        scheduler = early or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scheduler of the given optimizer does not see the steps
            for batch in batches(hvd.rank()):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5**6
        same(net, expected)


def gradients_are_clipped_after_they_are_reduced() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()), net.named_parameters())

    def clipped(loss: Tensor) -> None:
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()

    train(net, optimizer, clipped)
    expected = alone(KINDS["SGD"], lambda one: nn.utils.clip_grad_norm_(one.parameters(), 0.05))  # type: ignore[arg-type, return-value]
    same(net, expected)


def loss_scaling_works_as_in_horovods_examples() -> None:
    for make in (KINDS["SGD"], lambda p: torch.optim.Adam(p, lr=0.01, fused=True)):
        net = model()
        optimizer = hvd.DistributedOptimizer(make(net.parameters()), net.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def scaled(loss: Tensor, optimizer: Any = optimizer, scaler: Any = scaler) -> None:
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

        train(net, optimizer, scaled)
        same(net, alone(make))
        # What overflows on one rank is skipped by all.
        before = copy.deepcopy(net)
        optimizer.zero_grad()
        scaled(loss_of(net, batches(0)[0]) * (float("inf") if hvd.rank() == 1 else 1.0))
        same(net, before)
        assert scaler.get_scale() == 512.0


def closures_are_evaluated_with_the_gradients_of_all_ranks() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        # Without tolerances, which would look at each rank's own loss.
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, tolerance_grad=0, tolerance_change=0)

    for make in (KINDS["SGD"], lbfgs):
        net, expected = model(), model()
        optimizer = hvd.DistributedOptimizer(make(net.parameters()), net.named_parameters())
        single = make(expected.parameters())
        for step, batch in enumerate(batches(hvd.rank())):

            def closure(optimizer: Any = optimizer, net: Any = net, batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            def theirs(optimizer: Any = single, net: Any = expected, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, whole(step))
                loss.backward()
                return loss

            optimizer.step(closure)
            single.step(theirs)
        same(net, expected, rtol=1e-6, atol=1e-8)


def several_passes_are_added_up() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(
        KINDS["SGD"](net.parameters()), net.named_parameters(), backward_passes_per_step=2
    )

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    train(net, optimizer, twice)

    def double(one: nn.Module) -> None:
        for parameter in one.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2

    same(net, alone(KINDS["SGD"], double))
    optimizer.set_backward_passes_per_step(1)
    train(net, optimizer)
    loss = loss_of(net, batches(0)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="expected to be called after step"):
        optimizer.set_backward_passes_per_step(3)
    with pytest.raises(AssertionError, match=r"more than backward_passes_per_step \(1\) times"):
        loss.backward()
    with pytest.raises(AssertionError, match="gradients are on their way"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()


def groups_are_sent_together() -> None:
    for options in ({"num_groups": 2}, {"groups": 3}, {"groups": 50}, {"groups": "lists"}):
        net = model()
        first, second, *_ = net.parameters()
        lists: Any = {"groups": [[first, second]]} if options == {"groups": "lists"} else options
        optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()), net.named_parameters(), **lists)
        train(net, optimizer)
        same(net, alone(KINDS["SGD"]))


def ops_factors_and_compression_are_applied() -> None:
    def times(factor: float) -> Callable[[nn.Module], None]:
        def scale(net: nn.Module) -> None:
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor

        return scale

    for options, change, tolerance in (
        ({"op": hvd.Sum}, times(3.0), {}),
        ({"gradient_predivide_factor": 7.0}, times(1.0), {}),
        ({"compression": hvd.Compression.fp16}, times(1.0), {"rtol": 1e-2, "atol": 1e-3}),
        ({"compression": hvd.Compression.bf16}, times(1.0), {"rtol": 5e-2, "atol": 5e-3}),
    ):
        net = model()
        optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()), net.named_parameters(), **options)
        train(net, optimizer)
        same(net, alone(KINDS["SGD"], change), **tolerance)


def a_second_synchronize_reduces_nothing_again() -> None:
    net, reference = model(), alone(lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())

    def warned(loss: Tensor) -> None:
        loss.backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="not reduced again; call it inside"):
            optimizer.step()

    train(net, optimizer, warned)
    same(net, reference)


def process_sets_train_apart() -> None:
    pair = hvd.add_process_set([0, 1])
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), process_set=pair
    )
    train(net, optimizer)
    expected = model()
    single = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(STEPS):
        single.zero_grad()
        loss_of(expected, whole(step, (0, 1) if pair.included() else (2,))).backward()
        single.step()
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    hvd.barrier()
    hvd.remove_process_set(pair)


def uneven_batches_end_in_join() -> None:
    """Ranks have 1, 3 and 5 batches: a step is the sum of what there is, divided by all ranks."""
    net, expected = model(), model()
    optimizer = hvd.DistributedOptimizer(KINDS["SGD"](net.parameters()), net.named_parameters())
    single = KINDS["SGD"](expected.parameters())
    for batch in batches(hvd.rank())[: 1 + 2 * hvd.rank()]:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    assert hvd.join() == 2
    for step in range(STEPS):
        single.zero_grad()
        for rank in range(3):
            if step < 1 + 2 * rank:
                (loss_of(expected, batches(rank)[step]) / 3).backward()
        single.step()
    # Who joined early has not stepped: scripts send the parameters of the last rank to all.
    if hvd.rank() == 2:
        for one, other in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    hvd.broadcast_parameters(net.state_dict(), root_rank=2)
    same(net, expected)


def mistakes_are_refused() -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs = list(net.named_parameters())
    for options, kind, message in (
        ({"named_parameters": list(net.parameters())}, ValueError, "expected pairs of a name and a parameter"),
        ({"named_parameters": [("w", p) for _, p in pairs]}, ValueError, "expected names that differ, got w more than"),
        ({"named_parameters": pairs[:1]}, ValueError, r"got none for 3, the first of them number 1 of group 0, \[8\]"),
        ({"op": hvd.Adasum}, NotImplementedError, "Adasum"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            ValueError,
            r"gradient_predivide_factor: expected op hvd\.",
        ),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step: expected a whole number from 1 on"),
        ({"groups": -1}, ValueError, "groups: expected a number from 1 on"),
        ({"groups": [["w"]]}, ValueError, "groups: expected a number, or lists of parameters"),
        ({"groups": [[pairs[0][1]], [pairs[0][1]]]}, ValueError, "groups: expected each parameter at most once"),
        ({"compression": "fp16"}, TypeError, "compression: expected"),
    ):
        with pytest.raises(kind, match=message):
            hvd.DistributedOptimizer(sgd, **options)


def different_models_are_named_on_every_rank() -> None:
    small = (
        r"bias and others.*holding weight: float32\[3, 2\] at place 1 on ranks 0, 1; .*\[3, 3\] at place 1 on rank 2"
    )
    for width, message in ((2, small), (9000, r"allreduce\.weight.*\[3, 9000\].*ranks 0, 1; .*\[3, 9001\].*rank 2")):
        net = nn.Linear(width + hvd.rank() // 2, 3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        net(torch.ones(1, net.in_features)).sum().backward()
        with pytest.raises(hp.CommunicationError, match=message):
            optimizer.step()


def large_and_small_gradients_go_their_ways() -> None:
    """Some are sent alone, some in bundles, some are never touched; half of them in another dtype."""
    torch.manual_seed(0)
    shapes = [(3,), (100, 100), (5, 5), (200, 100), (), (0, 4)] * 3
    layers = [
        nn.Parameter(torch.ones(shape, dtype=[torch.float32, torch.float64][i % 2])) for i, shape in enumerate(shapes)
    ]
    names = [(str(i), layer) for i, layer in enumerate(layers)]
    for compression, tolerance in ((hvd.Compression.none, 1e-6), (hvd.Compression.bf16, 1e-2)):
        for layer in layers:
            layer.data.fill_(1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=1.0), names, compression=compression)
        for _ in range(4):
            optimizer.zero_grad()
            touched = [layer for i, layer in enumerate(layers) if i % 4 != hvd.rank()]
            sum((i + 1) * layer.sum() for i, layer in enumerate(touched)).backward()  # type: ignore[union-attr]
            optimizer.step()
        for i, layer in enumerate(layers):
            total = 0
            for rank in range(3):
                theirs = [j for j in range(len(layers)) if j % 4 != rank]
                total += theirs.index(i) + 1 if i in theirs else 0
            expected = torch.full_like(layer, 1 - 4 * total / 3)
            torch.testing.assert_close(layer.detach(), expected.detach(), rtol=tolerance, atol=tolerance)
