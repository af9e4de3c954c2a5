"""Gradients under DataParallel are those of one plain process that runs backward for every rank's batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hybridpar as hp
from tests.ranks import run_processes, run_threads

Grads = dict[str, Tensor | None]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Branches(nn.Module):
    """A trunk that is always used, and branches of which each pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return hidden.square().sum() + sum(torch.sin(self.branches[index](hidden)).sum() for index in used)


def _double(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Not for threads: it seeds the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _grads(module: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def _assert_grads(ours: Grads, plain: Grads, scale: float = 1.0) -> None:
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        found = ours[name]
        if expected is None or found is None:
            assert expected is found, f"{name}: one of the gradients is None"
        else:
            torch.testing.assert_close(found, expected * scale, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


# What a script does, one letter an action: backward with a sum at its end, backward under no_sync, and both zero_grad.
# Each backward comes with the branches that each rank uses.
Script = list[tuple[str, list[list[int]]]]


def _run_script(module: Any, script: Script, ranks: Sequence[int], no_sync: Any) -> list[Grads]:
    """The gradients after every synchronised backward, of these ranks' batches one after the other."""
    found = []
    for number, (action, used) in enumerate(script):
        if action in "ZK":
            module.zero_grad(set_to_none=action == "Z")
        for rank in ranks if action in "SL" else ():
            x = _draw(2 + rank, 3, seed=10 * number + rank)
            if action == "L":
                with no_sync():
                    module(x, used[rank]).backward()
            else:
                module(x, used[rank]).backward()
        if action == "S":
            found.append(_grads(getattr(module, "module", module)))
    return found


def _check_script(ranks: int, script: Script, **arguments: Any) -> None:
    start = _double(Branches)

    def work(group: Any) -> list[Grads]:
        module = hp.DataParallel(copy.deepcopy(start), group=group, **arguments)
        return _run_script(module, script, [group.rank], module.no_sync)

    per_rank = run_threads(ranks, work)
    plain = _run_script(start, script, range(ranks), torch.enable_grad)
    scale = 1.0 / ranks if arguments.get("reduction") == "mean" else 1.0
    for found in per_rank:
        for ours, expected in zip(found, plain, strict=True):
            _assert_grads(ours, expected, scale)


@st.composite
def _scripts(draw: st.DrawFn) -> tuple[int, Script]:
    ranks = draw(st.integers(1, 3))
    subset = st.lists(st.integers(0, 2), unique=True, max_size=3)
    actions = draw(st.lists(st.sampled_from("SSLLZK"), min_size=1, max_size=7)) + ["S"]
    script: Script = []
    summed = False
    waits = False
    for action in actions:
        # Zeroing in place does not reach a sum that waits under no_sync (see the note in kept_sums.py).
        taken = "Z" if action == "K" and waits else action
        waits = (waits or (summed and taken == "L")) and taken not in "SZ"
        summed = (summed or taken == "S") and taken != "Z"
        script.append((taken, draw(st.lists(subset, min_size=ranks, max_size=ranks))))
    return ranks, script


ALL, NONE = [[0, 1, 2], [0, 1, 2]], [[], []]


@settings(max_examples=50)
@given(_scripts(), st.sampled_from([1, 100, 1 << 20]), st.sampled_from(["sum", "mean"]))
@example((2, [("S", NONE)]), 100, "sum")  # unused on all ranks: no gradient
@example((2, [("S", [[0], [1]])]), 100, "sum")  # unused on one rank
@example((2, [("L", ALL), ("L", [[1], []]), ("S", NONE)]), 100, "sum")  # accumulated, not touched by the last pass
@example((2, [("S", ALL), ("S", [[0], [2]])]), 100, "sum")  # twice without zero_grad
@example((2, [("S", ALL), ("K", []), ("S", [[], [2]])]), 100, "mean")
@example((2, [("S", ALL), ("Z", []), ("S", [[], [2]])]), 100, "mean")
@example((2, [("S", ALL), ("L", [[0], []]), ("L", [[0], [1]]), ("S", [[1], [0]])]), 100, "sum")
def test_any_sequence_of_passes_gives_the_gradients_of_one_process(
    ranks_script: tuple[int, Script], bucket_bytes: int, reduction: str
) -> None:
    ranks, script = ranks_script
    # A mean divides what is accumulated locally and what was averaged before by the same number.
    _check_script(ranks, script, bucket_bytes=bucket_bytes, reduction=reduction)


def _compare(
    ranks: int,
    make: Callable[[], nn.Module],
    backward: Callable[[Any, int], None],
) -> list[Grads]:
    """`backward(module, rank)` on N ranks and, for every rank in turn, on one plain module."""
    plain = _double(make)
    start = copy.deepcopy(plain)

    def work(group: Any) -> Grads:
        module = copy.deepcopy(start)
        backward(hp.DataParallel(module, group=group, bucket_bytes=64), group.rank)
        return _grads(module)

    per_rank = run_threads(ranks, work)
    for rank in range(ranks):
        backward(plain, rank)
    for found in per_rank:
        _assert_grads(found, _grads(plain))
    return per_rank


def _square_backward(module: Any, rank: int) -> None:
    module(_draw(4, 3, seed=rank)).square().sum().backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_shared_parameters_are_summed_once() -> None:
    grads = _compare(3, Tied, _square_backward)
    assert set(grads[0]) == {"first.weight", "first.bias", "second.bias"}


def test_several_forward_passes_may_share_one_backward() -> None:
    def backward(module: Any, rank: int) -> None:
        losses = [module(_draw(4, 3, seed=10 * rank + part)).square().sum() for part in range(3)]
        torch.stack(losses).sum().backward()

    _compare(2, Tied, backward)


def test_several_forward_passes_through_batch_norm_may_share_one_backward() -> None:
    """Autograd saves the running statistics: a broadcast between the passes would make backward fail."""

    start = _double(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def work(group: Any) -> list[Grads]:
        module = copy.deepcopy(start)
        parallel, found = hp.DataParallel(module, group=group), []
        for step in range(2):
            parallel.zero_grad()
            parts = [parallel(_draw(5, 3, seed=step * 10 + part)) for part in range(2)]
            torch.cat(parts).square().sum().backward()
            found.append(_grads(module))
        return found

    plain = run_threads(1, work)[0]
    for found in run_threads(2, work):  # both ranks see the same data: twice the gradient
        for ours, expected in zip(found, plain, strict=True):
            _assert_grads(ours, expected, 2.0)


def test_zero_grad_between_forward_and_backward() -> None:
    def backward(module: Any, rank: int) -> None:
        for part in range(2):
            loss = module(_draw(4, 3, seed=10 * rank + part)).square().sum()
            if part == 1 and isinstance(module, hp.DataParallel):
                module.zero_grad()
            loss.backward()

    def only_last(module: Any, rank: int) -> None:
        module(_draw(4, 3, seed=10 * rank + 1)).square().sum().backward()

    plain = _double(Tied)
    start = copy.deepcopy(plain)

    def work(group: Any) -> Grads:
        module = copy.deepcopy(start)
        backward(hp.DataParallel(module, group=group), group.rank)
        return _grads(module)

    for rank in range(2):
        only_last(plain, rank)
    for found in run_threads(2, work):
        _assert_grads(found, _grads(plain))


def test_gradients_are_steps_that_an_optimizer_can_take() -> None:
    """Three steps of SGD with momentum and clipping by hand equal one process on the joint batch."""

    def train(module: Any, ranks: Sequence[int]) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                module(_draw(3, 3, seed=10 * step + rank)).square().sum().backward()
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
            optimizer.step()
        return {name: value.clone() for name, value in module.state_dict().items()}

    start = _double(Tied)
    found = run_threads(2, lambda group: train(hp.DataParallel(copy.deepcopy(start), group=group), [group.rank]))
    plain = train(start, [0, 1])
    for state in found:
        assert state.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(state[name], value, **EXACT)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3))
        self.rare = nn.Linear(3, 2)
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale", torch.tensor(2.0))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        features = self.body(x).mean((2, 3)) * self.scale
        return (self.rare(features) if rare else features).square().sum()


def _image_backward(module: Any, rank: int) -> None:
    images = _draw(2 + rank, 2, 6, 5, seed=rank).contiguous(memory_format=torch.channels_last)
    module(images, rank == 0).backward()


def test_channels_last_models() -> None:
    _compare(2, Image, _image_backward)


def test_frozen_parameters_stay_without_a_gradient() -> None:
    def make() -> nn.Module:
        module = Tied()
        module.first.bias.requires_grad_(False)
        return module

    assert all(grads["first.bias"] is None for grads in _compare(2, make, _square_backward))


class Recomputed(nn.Module):
    """Its middle is recomputed in backward; `shared` uses the last layer there too."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.reentrant, self.shared = reentrant, shared

    def _middle(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[2](torch.tanh(self.layers[1](x))))
        return self.layers[3](hidden) if self.shared else hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._middle, self.layers[0](x), use_reentrant=self.reentrant)
        return self.layers[3](hidden)


@pytest.mark.parametrize(("reentrant", "shared"), [(False, False), (True, False), (False, True)])
def test_recomputed_parts(reentrant: bool, shared: bool) -> None:
    _compare(2, lambda: Recomputed(reentrant, shared), _square_backward)


def test_shared_parameters_in_a_reentrant_recomputation_are_refused() -> None:
    def work(group: Any) -> None:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            _square_backward(hp.DataParallel(Recomputed(True, True).double(), group=group), group.rank)

    run_threads(2, work)


def test_autograd_grad_leaves_the_gradients_that_are_there() -> None:
    """As for a gradient penalty: torch.autograd.grad does not accumulate."""

    def backward(module: Any, rank: int) -> None:
        module(_draw(4, 3, seed=rank)).square().sum().backward()
        if rank != 1 or isinstance(module, hp.DataParallel):
            torch.autograd.grad(module(_draw(4, 3, seed=9)).sum(), list(module.parameters()))

    _compare(2, Tied, backward)


def test_sums_survive_a_backward_that_accumulates_out_of_place() -> None:
    """create_graph adds to .grad by making a new tensor, also under no_sync."""

    def backward(module: Any, rank: int) -> None:
        parallel = isinstance(module, hp.DataParallel)
        for part, synchronised in enumerate([True, False, False, True]):
            loss = module(_draw(4, 3, seed=10 * rank + part)).square().sum()
            with torch.enable_grad() if synchronised or not parallel else module.no_sync():
                loss.backward(create_graph=not synchronised)

    with pytest.warns(UserWarning, match="create_graph"):
        _compare(2, Tied, backward)


def test_the_model_may_be_copied_and_pickled() -> None:
    def work(group: Any) -> None:
        module = Tied().double()
        parallel = hp.DataParallel(module, group=group)
        parallel(_draw(2, 3, seed=0)).sum().backward()
        memory = io.BytesIO()
        torch.save(module, memory)
        memory.seek(0)
        twins = [copy.deepcopy(module), torch.load(memory, weights_only=False)]
        if group.rank == 0:  # copies have no hooks: no rank waits for another
            for twin in twins:
                twin(_draw(2, 3, seed=1)).sum().backward()
        for twin in twins:
            hp.DataParallel(twin, group=group)

    run_threads(2, work)


def _gloo(group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """NumPy arrays: tensors would travel as handles of a process that ends."""
    module = _double(Image, seed=group.rank)
    if group.rank == 1:
        module.seen.logical_not_()
        module.count.fill_(0)
    parallel = hp.DataParallel(module, group=group, bucket_bytes=300)
    for _ in range(2):
        parallel.zero_grad()
        _image_backward(parallel, group.rank)
    grads = {name: None if grad is None else grad.numpy() for name, grad in _grads(module).items()}
    return grads, {name: value.numpy() for name, value in parallel.state_dict().items()}


def test_processes_over_gloo() -> None:
    plain = _double(Image, seed=0)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    for rank in range(2):
        _image_backward(plain, rank)
    for grads, found in run_processes(2, _gloo):
        _assert_grads({name: None if g is None else torch.as_tensor(g) for name, g in grads.items()}, _grads(plain))
        assert found.keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(found[name]), value) for name, value in state.items())
