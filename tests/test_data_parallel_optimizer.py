"""Steps taken bucket by bucket are those of the plain optimizer, bit for bit, whenever someone looks."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import hybridpar as hp
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.lane import Lane
from tests.ranks import run_threads

Make = Callable[[list[Tensor]], Optimizer]


def _groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "lr": 0.03}]


OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(_groups(p), lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "matrices": lambda p: torch.optim.Adam([x for x in p if x.ndim > 1], lr=0.01, amsgrad=True),
}


class Branches(nn.Module):
    """A trunk that is always used, one branch of several, and a weight that its owner never uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6))
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])
        self.borrowed = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, used: int) -> Tensor:
        hidden = self.branches[used](self.trunk(x)) * self.scale
        return nn.functional.linear(hidden, self.borrowed.weight, self.borrowed.bias).square().mean()


def _make(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Not for threads: it seeds the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# What a script does: S a synchronised backward and a step, L a backward under no_sync, Z zero_grad, z its twin that
# only zeroes, I an evaluation, W a state_dict, R that the learning rate changes.
Script = list[tuple[str, list[int]]]


def _run(group: Any, start: nn.Module, make: Make, plan: Plan, script: Script, how: str) -> tuple[Any, Any, Any]:
    module = copy.deepcopy(start)
    parallel = hp.DataParallel(module, group=group, plan=plan, optimizer=None if how == "plain" else make)
    optimizer = make(list(module.parameters())) if how == "plain" else parallel.optimizer
    assert optimizer is not None
    seen = []
    for number, (action, used) in enumerate(script):
        x = _draw(2 + group.rank, 3, seed=10 * number + group.rank)
        if action == "S":
            parallel(x, used[group.rank]).backward()
            if how != "lazy":
                optimizer.step()
        elif action == "L":
            with parallel.no_sync():
                parallel(x, used[group.rank]).backward()
        elif action in "Zz":
            optimizer.zero_grad(set_to_none=action == "Z")
        elif action == "I":
            with torch.inference_mode():
                seen.append(parallel.eval()(x, used[group.rank]).item())
            parallel.train()
        elif action == "W":
            seen.append({name: value.clone() for name, value in module.state_dict().items()})
        elif action == "R":
            for options in optimizer.param_groups:
                options["lr"] *= 0.7
    parallel.synchronize()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    result = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict()), (grads, seen)
    parallel.close()
    return result


def _assert_same(ours: Any, theirs: Any) -> None:
    """Bit for bit, through dictionaries and lists."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            _assert_same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _assert_same(one, other)
    else:
        assert ours == theirs


@st.composite
def _scripts(draw: st.DrawFn) -> tuple[int, Script]:
    ranks = draw(st.integers(1, 3))
    actions = draw(st.lists(st.sampled_from("SSSSLZZZzIWR"), min_size=3, max_size=14))
    used = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
    return ranks, [(action, draw(used)) for action in actions]


@settings(max_examples=40)
@given(
    _scripts(),
    st.sampled_from(list(OPTIMIZERS)),
    st.builds(
        Plan,
        st.sampled_from([1, 100, 1 << 20]),
        st.integers(1, 2),
        wire=st.sampled_from([Wire(), Wire(torch.bfloat16)]),
    ),
)
def test_any_script_ends_as_with_the_plain_optimizer(ranks_script: tuple[int, Script], name: str, plan: Plan) -> None:
    ranks, script = ranks_script
    start, make = _make(Branches), OPTIMIZERS[name]
    plain = run_threads(ranks, _run, start, make, plan, script, "plain")
    for how in ("stepping", "lazy"):
        for ours, theirs in zip(run_threads(ranks, _run, start, make, plan, script, how), plain, strict=True):
            _assert_same(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_is_plain_torch(name: str) -> None:
    start, group, make = _make(Branches), hp.Group.alone(), OPTIMIZERS[name]
    module = copy.deepcopy(start)
    optimizer = make(list(module.parameters()))
    parallel = hp.DataParallel(copy.deepcopy(start), group=group, plan=Plan(100, 2), optimizer=make)
    assert parallel.optimizer is not None
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, parallel.optimizer)]
    for step in range(7):
        optimizer.zero_grad()
        module(_draw(4, 3, seed=step), step % 3).backward()
        optimizer.step()
        parallel.zero_grad()
        parallel(_draw(4, 3, seed=step), step % 3).backward()
        for scheduler in schedulers:  # no warning, though step() is left out
            scheduler.step()
    _assert_same(parallel.state_dict(), module.state_dict())
    _assert_same(parallel.optimizer.state_dict(), optimizer.state_dict())


def test_attention_uses_a_weight_of_another_module() -> None:
    """nn.MultiheadAttention never calls the layer that owns its output weight."""
    start = _make(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))

    def train(group: Any, how: str) -> Any:
        module = copy.deepcopy(start)
        make: Make = OPTIMIZERS["momentum"]
        parallel = hp.DataParallel(module, group=group, plan=Plan(100), optimizer=make if how == "lazy" else None)
        plain = make(list(module.parameters())) if how == "plain" else None
        for step in range(5):
            parallel.zero_grad()
            parallel(_draw(2, 3, 8, seed=10 * step + group.rank)).square().mean().backward()
            if plain is not None:
                plain.step()
        return copy.deepcopy(parallel.state_dict())

    for ours, theirs in zip(run_threads(2, train, "lazy"), run_threads(2, train, "plain"), strict=True):
        _assert_same(ours, theirs)


class Functional(nn.Module):
    """Uses its second layer's weight directly, but only when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(2, 2)  # so its bucket is the last to be sent
        self.first = nn.Linear(2, 2)

    def forward(self, x: Tensor, direct: bool) -> Tensor:
        weights = self.second.weight + 0 if direct else None  # the sum saves nothing for backward
        hidden = self.first(x)
        return (hidden + weights).sum() if weights is not None else self.second(hidden).sum()


def test_an_old_value_that_was_used_is_noticed() -> None:
    def work(group: Any) -> None:
        parallel = hp.DataParallel(Functional(), group=group, plan=Plan(1), optimizer=OPTIMIZERS["momentum"])
        parallel(torch.ones(2, 2), False).backward()
        loss = parallel(torch.ones(2, 2), True)
        with pytest.raises(RuntimeError, match=r"second\.weight was used before its step had been taken"):
            loss.backward()

    # Their rounds fail alike.
    run_threads(2, work)


class _Gates:
    """Holds up the all-reduce of chosen buckets, by their sizes."""

    def __init__(self, lane: Lane, gates: dict[int, threading.Event]) -> None:
        self.rank, self.size = lane.rank, lane.size
        self._lane, self._gates = lane, gates

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        if tensor.numel() in self._gates:
            assert self._gates[tensor.numel()].wait(20), "what was to happen before did not"
        self._lane.all_reduce(tensor, op)


def _hold_up(parallel: hp.DataParallel, gates: dict[int, threading.Event]) -> None:
    for track in {current.track for current in parallel._engine._rounds}:
        track.lane = _Gates(track.lane, gates)  # type: ignore[assignment]


def test_a_bucket_is_stepped_while_a_later_one_travels() -> None:
    """The bucket of the first layer is only sent when that of the last has been stepped."""

    def work(group: Any) -> None:
        stepped = threading.Event()

        class Noted(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step()
                stepped.set()

        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        parallel = hp.DataParallel(model, group=group, plan=Plan(1), optimizer=lambda p: Noted(p, lr=0.1))
        _hold_up(parallel, {5: stepped})  # 2 x 2 and a flag
        parallel(torch.ones(1, 2)).sum().backward()
        assert not stepped.is_set()
        assert parallel.optimizer is not None
        parallel.optimizer.step()
        assert stepped.is_set()

    run_threads(2, work)


def test_the_next_forward_pass_waits_only_for_what_it_uses() -> None:
    def work(group: Any) -> None:
        model = nn.ModuleDict({"late": nn.Linear(2, 2), "early": nn.Linear(2, 3)})
        parallel = hp.DataParallel(model, group=group, plan=Plan(1), optimizer=OPTIMIZERS["momentum"])
        used = threading.Event()
        _hold_up(parallel, {5: used})
        x = torch.ones(1, 2)
        before = model["early"].weight.detach().clone()
        model["early"](model["late"](x)).sum().backward()
        model["early"](x)
        assert not torch.equal(model["early"].weight, before)
        before = model["late"].weight.detach().clone()
        assert not used.is_set()
        used.set()
        model["late"](x)
        assert not torch.equal(model["late"].weight, before)

    run_threads(2, work)


def test_nothing_is_stepped_when_a_sum_is_not_finite() -> None:
    def work(group: Any) -> None:
        start = nn.Linear(2, 1)
        parallel = hp.DataParallel(
            start, group=group, plan=Plan(1, 2), optimizer=OPTIMIZERS["adamw"], check_finite=True
        )
        for step in range(4):
            parallel.zero_grad()
            before = copy.deepcopy(parallel.state_dict())
            x = torch.full((1, 2), torch.inf if (step, group.rank) == (1, 1) else 1.0)
            loss = parallel(x).sum()
            if step == 1:
                with pytest.raises(hp.NonFiniteError, match=r"weight must be finite; .* on rank 1"):
                    loss.backward()
                _assert_same(parallel.state_dict(), before)
                continue
            loss.backward()
            assert not torch.equal(parallel.state_dict()["weight"], before["weight"])
        assert parallel.optimizer is not None
        assert parallel.optimizer.state[start.weight]["step"].item() == 3

    run_threads(2, work)


def test_state_is_that_of_the_plain_optimizer_whatever_the_plan(tmp_path: Path) -> None:
    """A checkpoint of the plain optimizer is loaded into the other and back, in the middle of a step."""

    start = _make(Branches)

    def work(group: Any) -> None:
        module, other = copy.deepcopy(start), copy.deepcopy(start)
        parallel = hp.DataParallel(module, group=group, plan=Plan(100, 2), optimizer=OPTIMIZERS["adamw"])
        twin = hp.DataParallel(other, group=group)
        plain = OPTIMIZERS["adamw"](list(other.parameters()))
        assert parallel.optimizer is not None
        for step in range(6):
            for one in (parallel, twin):
                one.zero_grad()
                one(_draw(3, 3, seed=10 * step + group.rank), step % 3).backward()
            plain.step()
            if step == 2:
                hp.checkpoint.save(tmp_path / "ours", step=0, model=parallel, optimizer=parallel.optimizer, group=group)
                hp.checkpoint.save(tmp_path / "plain", step=0, model=twin, optimizer=plain, group=group)
                for folder, model, optimizer in (("ours", twin, plain), ("plain", parallel, parallel.optimizer)):
                    hp.checkpoint.load(tmp_path / folder, model=model, optimizer=optimizer, group=group)
            if step == 4:
                states = copy.deepcopy(parallel.optimizer.state_dict()), copy.deepcopy(plain.state_dict())
                parallel.optimizer.load_state_dict(states[1])
                plain.load_state_dict(states[0])
        _assert_same(parallel.state_dict(), twin.state_dict())
        _assert_same(parallel.optimizer.state_dict(), plain.state_dict())

    run_threads(2, work)


def test_the_model_may_be_copied_and_pickled_with_steps_outstanding() -> None:
    def work(group: Any) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parallel = hp.DataParallel(module, group=group, plan=Plan(1), optimizer=OPTIMIZERS["momentum"])
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.synchronize()
        memory = io.BytesIO()
        torch.save(module, memory)
        memory.seek(0)
        for twin in (copy.deepcopy(module), torch.load(memory, weights_only=False)):
            _assert_same(twin.state_dict(), module.state_dict())
            twin(torch.ones(1, 2)).sum().backward()  # of no concern to anyone
        optimizer = parallel.optimizer
        assert optimizer is not None
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.close()
        assert module[0].weight.grad is not None
        optimizer.step()  # a plain one again
        module(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        assert not module[0].weight.grad.any()

    run_threads(2, work)


def test_outstanding_steps_are_taken_before_the_plan_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps the buckets are sent in the order in which they are needed; nothing else changes."""
    start = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    def train(group: Any, make: Make | None) -> Any:
        module = copy.deepcopy(start)
        parallel = hp.DataParallel(module, group=group, plan=Plan(80), optimizer=make)
        plain = OPTIMIZERS["momentum"](list(module.parameters())) if make is None else None
        # All gradients are ready at once, and each bucket takes a second on rank 0, two on rank 1.
        engine, real = parallel._engine, parallel._engine.report
        times = {"ready": 0.0, "begun": 0.0, "sent": 1.0 + group.rank}
        monkeypatch.setattr(engine, "report", lambda: {"buckets": [bucket | times for bucket in real()["buckets"]]})
        orders = []
        for step in range(8):
            parallel.zero_grad()
            parallel(_draw(3, 4, seed=10 * step + group.rank)).square().mean().backward()
            if plain is not None:
                plain.step()
            orders.append([bucket.members for bucket in engine.buckets])
        return copy.deepcopy(parallel.state_dict()), orders

    for (ours, orders), (theirs, _) in zip(
        run_threads(2, train, OPTIMIZERS["momentum"]), run_threads(2, train, None), strict=True
    ):
        _assert_same(ours, theirs)
        assert orders[0] == [(7, 6), (5, 4), (3, 2), (1, 0)]
        assert orders[-1] == [(1, 0), (3, 2), (5, 4), (7, 6)]
