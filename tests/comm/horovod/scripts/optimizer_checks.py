"""Checks of DistributedOptimizer and of equal beginnings: three ranks do what one process does on the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
import hybridpar.horovod as hvd

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
STEPS = 5


def model(seed: int = 0) -> nn.Sequential:
    """The same on every rank, in float64, where rounding does not add up."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    """One rank's, for every step."""
    drawn = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(rows, 4, generator=drawn, dtype=torch.float64) for _ in range(STEPS)]
    return [(one, torch.randint(0, 3, (rows,), generator=drawn)) for one in inputs]


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the batch."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def whole(step: int, ranks: Sequence[int] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """The batch of all ranks, of equal parts."""
    pairs = [batches(rank)[step] for rank in ranks]
    return torch.cat([one for one, _ in pairs]), torch.cat([labels for _, labels in pairs])


def alone(make: Make, change: Callable[[nn.Module], None] = lambda net: None) -> nn.Module:
    """Trained by one process on the whole batches."""
    net = model()
    optimizer = make(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, whole(step)).backward()
        change(net)
        optimizer.step()
    return net


def same(net: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Parameters are equal to rounding, and the same bits on all ranks."""
    for (name, one), other in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
        everyone = hvd.allgather(one.detach().flatten()[None])
        assert all(torch.equal(theirs, everyone[0]) for theirs in everyone), name


def train(net: nn.Module, optimizer: Any, own_step: Callable[[Tensor], None] | None = None) -> None:
    """A script's loop, on this rank's batches."""
    for batch in batches(hvd.rank()):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        if own_step is not None:
            own_step(loss)
            continue
        loss.backward()
        optimizer.step()


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


def unused_parameters_count_as_zeros() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = (nn.Parameter(torch.ones(3)) for _ in range(3))

    net = Two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss = net.used.sum() + (net.sometimes.sum() if hvd.rank() == 1 else 0)
        loss.backward()
        optimizer.step()
    assert net.used.tolist() == [-3.0] * 3 and net.never.tolist() == [1.0] * 3
    torch.testing.assert_close(net.sometimes.detach(), torch.full((3,), 1 - 4 / 3))


def sparse_gradients_are_reduced_sparse_or_dense() -> None:
    rows = [[0, 1, 1], [1, 5], [2, 3, 4, 5]][hvd.rank()]
    expected = torch.zeros(6, 2, dtype=torch.float64)
    for theirs in ([0, 1, 1], [1, 5], [2, 3, 4, 5]):
        for row in theirs:
            expected[row] -= 4.0 / 3
    for options in ({}, {"sparse_as_dense": True}):
        table = nn.Embedding(6, 2, sparse=True).double()
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), **options
        )
        for _ in range(4):
            optimizer.zero_grad()
            table(torch.tensor(rows)).sum().backward()
            optimizer.step()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
        torch.testing.assert_close(table.weight.detach(), expected)


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


def parameters_begin_the_same() -> None:
    for form in ("state_dict", "named", "list"):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        torch.manual_seed(hvd.rank())
        for tensor in net.state_dict().values():
            tensor.copy_(torch.randint(0, 100, tensor.shape))
        given: Any = {"state_dict": net.state_dict(), "named": net.named_parameters(), "list": list(net.parameters())}[
            form
        ]
        hvd.broadcast_parameters(given, root_rank=1)
        torch.manual_seed(1)
        for name, tensor in net.state_dict().items():
            expected = torch.randint(0, 100, tensor.shape)
            if form == "state_dict" or name in dict(net.named_parameters()):
                assert torch.equal(tensor, expected.to(tensor.dtype)), (form, name)


def optimizer_state_is_the_roots() -> None:
    for name, make in {**KINDS, "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)}.items():

        def stepped(steps: int, make: Make = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            net = model()
            optimizer = make(net.parameters())
            optimizer.param_groups[0]["lr"] = 0.01 * (steps + 1)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, batches(1)[0])
                loss.backward()
                return loss

            for _ in range(steps):
                optimizer.step(closure)
            return net, optimizer

        # Rank 1 has state of two steps, rank 0 of one, rank 2 has none.
        net, given = stepped([1, 2, 0][hvd.rank()])
        optimizer = hvd.DistributedOptimizer(given, net.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        _equal(optimizer.state_dict(), stepped(2)[1].state_dict(), name)
        assert optimizer.param_groups is given.param_groups and optimizer.state is given.state
    empty = torch.optim.Adam(model().parameters())
    if hvd.rank() == 2:
        for parameter in empty.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        empty.step()
    hvd.broadcast_optimizer_state(empty, root_rank=0)
    assert not empty.state_dict()["state"]
    with pytest.raises(
        ValueError, match=r"expected parameter groups of \[2\] parameters as on rank 0, got \[1\] on rank 2"
    ):
        hvd.broadcast_optimizer_state(
            torch.optim.SGD([torch.ones(1) for _ in range(1 if hvd.rank() == 2 else 2)]), root_rank=0
        )


def _equal(one: Any, other: Any, place: str) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, msg=lambda text: f"{place}: {text}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            _equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            _equal(mine, theirs, f"{place}.{number}")
    else:
        assert one == other, place


def state_is_kept_and_loaded() -> None:
    net = model()
    given = torch.optim.Adam(net.parameters(), lr=0.01)
    loss_of(net, whole(0)).backward()
    given.step()
    optimizer = hvd.DistributedOptimizer(given, net.named_parameters())
    assert optimizer.state is given.state and len(optimizer.state) == 4
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer)
    loss_of(net, batches(0)[0]).backward()
    optimizer.load_state_dict(saved)
    _equal(optimizer.state_dict(), saved, "loaded")
    optimizer.zero_grad()  # what backward had begun is forgotten
    train(net, optimizer)


def batch_norm_sees_the_batches_of_all_ranks() -> None:
    data = [
        torch.randn(2 + 3 * rank, 4, 5, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3)
    ]
    layer, plain = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    mine, everything = data[hvd.rank()].requires_grad_(), torch.cat([one.detach() for one in data]).requires_grad_()
    for _ in range(2):
        result, expected = layer(mine), plain(everything)
    start = sum(len(one) for one in data[: hvd.rank()])
    torch.testing.assert_close(result, expected[start : start + len(mine)])
    torch.testing.assert_close(layer.running_var, plain.running_var)
    result.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None and everything.grad is not None
    torch.testing.assert_close(mine.grad, everything.grad[start : start + len(mine)], atol=1e-6, rtol=1e-5)
    converted = hvd.SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm2d(2)), layer.group)
    assert isinstance(converted[0], hvd.SyncBatchNorm)  # type: ignore[index]
