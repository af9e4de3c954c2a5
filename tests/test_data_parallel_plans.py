"""DataParallel under any plan, under a tuner that changes it, with bad gradients, and what it records."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.comm.engine import pace, tuner
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.group import thread_groups
from hybridpar.comm.lanes import compressed_lane
from hybridpar.comm.timeline.timeline import Timeline
from tests.head.cases import errors_of
from tests.ranks import run_processes, run_threads


def _model() -> nn.Sequential:
    """The same everywhere, in threads too."""
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(module: Any, ranks: list[int], steps: int, lr: float = 0.05) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for rank in ranks:
            loss = (module(_batch(step, rank)) - 1).square().mean() / 2
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        (Plan(500, 3), 1e-6),
        (Plan(4000, 2, wire=Wire(torch.bfloat16)), 0.02),
        (Plan(4000, 2, wire=Wire(torch.bfloat16, error_feedback=True)), 0.02),
        (Plan(4000, 2, wire=Wire(torch.float16, error_feedback=True)), 0.005),
        (Plan(wire=Wire(top_k=0.5)), 0.1),
    ],
)
def test_training_goes_as_in_one_process(plan: Plan, tolerance: float) -> None:
    start = _model()
    plain = copy.deepcopy(start)
    expected = _train(plain, [0, 1], 20)

    def work(group: Any) -> tuple[list[float], dict[str, Tensor]]:
        parallel = hp.DataParallel(copy.deepcopy(start), group=group, plan=plan)
        return _train(parallel, [group.rank], 20), copy.deepcopy(parallel.state_dict())

    (first, state), (second, twin) = run_threads(2, work)
    losses = [a + b for a, b in zip(first, second, strict=True)]
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], twin[name])
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


def test_bucket_bytes_is_short_for_a_plan() -> None:
    def work(group: Any) -> None:
        short = hp.DataParallel(nn.Linear(2, 2), group=group, bucket_bytes=77)
        assert short.report()["plan"] == Plan(77, tracks=1).to_json()
        with pytest.raises(ValueError, match="expected bucket_bytes or plan, got both: 77 and Plan"):
            hp.DataParallel(nn.Linear(2, 2), group=group, bucket_bytes=77, plan=Plan(77))
        with pytest.raises(TypeError, match="plan: expected a Plan, got 'flat'"):
            hp.DataParallel(nn.Linear(2, 2), group=group, plan="flat")  # type: ignore[arg-type]

    run_threads(2, work)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("plan", (Plan(tracks=2), Plan())),
        ("check_finite", (True, False)),
        ("optimizer", (None, lambda parameters: torch.optim.SGD(parameters, lr=0.1))),
        ("tune", (True, False)),
        ("wires", ((), (Wire(torch.bfloat16),))),
    ],
)
def test_different_settings_are_refused_on_every_rank(name: str, values: Any) -> None:
    def work(group: Any) -> None:
        hp.DataParallel(nn.Linear(2, 2), group=group, **{name: values[group.rank]})

    said = {"plan": "tracks"}.get(name, name)
    for error in errors_of(2, work):
        assert type(error) is ValueError and f"same {said} on every rank" in str(error)


def test_one_bad_argument_is_an_error_on_every_rank() -> None:
    def work(group: Any) -> None:
        hp.DataParallel(nn.Linear(2, 2), group=group, bucket_bytes=0 if group.rank else 8)

    for error in errors_of(2, work):
        assert type(error) is ValueError and "bucket_bytes: expected 1 or more, got 0" in str(error)


def test_bad_gradients_are_named_and_the_step_can_be_skipped() -> None:
    start = _model()

    def work(group: Any) -> dict[str, Tensor]:
        parallel = hp.DataParallel(copy.deepcopy(start), group=group, plan=Plan(500, 2), check_finite=True)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            x = _batch(step, group.rank)
            if (step, group.rank) == (3, 1):
                x[0, 2] = torch.nan
            loss = parallel(x).square().mean()
            if step == 3:
                with pytest.raises(hp.NonFiniteError) as caught:
                    loss.backward()
                assert (caught.value.tensor, caught.value.ranks) == ("4.bias", (1,))
                assert all(not p.grad.isfinite().all() for p in parallel.parameters() if p.grad is not None)
                continue
            loss.backward()
            optimizer.step()
        return copy.deepcopy(parallel.state_dict())

    states = run_threads(2, work)
    plain = copy.deepcopy(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in (0, 1, 2, 4, 5):
        optimizer.zero_grad()
        for rank in range(2):
            plain(_batch(step, rank)).square().mean().backward()
        optimizer.step()
    for state in states:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_the_tuner_changes_the_plan_while_sums_stay_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuner.TunerSettings
    monkeypatch.setattr(pace, "TunerSettings", lambda cache: short(first=1, warmup=1, measured=2, cache=cache))
    start = _model()
    plain = copy.deepcopy(start)
    _train(plain, [0, 1], 30)
    path = tmp_path / "plans.json"

    def work(group: Any, optimizer: bool) -> tuple[dict[str, Tensor], Any]:
        parallel = hp.DataParallel(
            copy.deepcopy(start),
            group=group,
            plan=Plan(2000, 2),
            tune=path,
            optimizer=(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)) if optimizer else None,
        )
        plans = set()
        plain = None if optimizer else torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
        for step in range(30):
            parallel.zero_grad()
            ((parallel(_batch(step, group.rank)) - 1).square().mean() / 2).backward()
            plans.add(parallel._engine.plan)
            if plain is not None:
                plain.step()
        report = parallel.report()
        json.dumps(report)
        return copy.deepcopy(parallel.state_dict()), plans, report["tuner"]

    for optimizer, expected in ((False, "tuned"), (True, "cached"), (True, "tuned")):
        for state, plans, said in run_threads(2, work, optimizer):
            assert said["state"] == expected, said
            assert len(plans) > 1 if expected == "tuned" else len(plans) == 1
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        if expected == "cached":
            path.unlink()


def test_tuning_can_be_switched_off_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_TUNE", "0")

    def work(group: Any) -> None:
        report = hp.DataParallel(_model(), group=group, tune=True).report()["tuner"]
        assert report["state"] == "fixed" and "HYBRIDPAR_TUNE=0" in report["why"]

    run_threads(2, work)


def test_the_timeline_shows_computation_and_lanes() -> None:
    def work(group: Any) -> None:
        timeline = Timeline(rank=group.rank)
        parallel = hp.DataParallel(
            _model(),
            group=group,
            plan=Plan(1000, 2),
            timeline=timeline,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        for step in range(3):
            parallel(_batch(step, group.rank)).sum().backward()
        parallel.synchronize()
        events = timeline.recording().events
        names = {event.row: {e.name for e in events if e.row == event.row} for event in events}
        assert names["computation"] - {"wait"} == {"forward", "backward", "optimizer", "unpack", "step"}
        assert names["lane 0"] == names["lane 1"] == {"pack", "send"}
        assert sum(event.name == "step" for event in events) == 3
        summary = timeline.summary()
        assert summary.computation > 0 and summary.communication > 0

    run_threads(2, work)


def _train_under_plans(group: Any) -> list[Any]:
    """NumPy arrays: tensors would travel as handles of a process that ends."""
    results = []
    for plan in (
        Plan(2000, 3),
        Plan(2000, 2, wire=Wire(torch.bfloat16, error_feedback=True)),
        Plan(wire=Wire(top_k=0.1)),
    ):
        parallel = hp.DataParallel(
            _model(), group=group, plan=plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05)
        )
        for step in range(5):
            parallel.zero_grad()
            parallel(_batch(step, group.rank)).square().mean().backward()
        results.append({name: value.numpy() for name, value in parallel.state_dict().items()})
        parallel.close()
    return results


def _with_shared_memory_and_over_gloo(group: Any) -> list[Any]:
    return [_train_under_plans(one) for one in (group, hp.Group.from_torch(timeout=60, shared_memory=False))]


def test_processes_reach_the_same_parameters() -> None:
    expected = run_threads(2, _train_under_plans)[0]
    first, second = run_processes(2, _with_shared_memory_and_over_gloo)
    for ours, theirs in zip(first, second, strict=True):
        for number, tolerance in enumerate((1e-6, 5e-3, 5e-3)):
            for name, value in expected[number].items():
                assert (ours[number][name] == theirs[number][name]).all()
                assert ours[number][name] == pytest.approx(value, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("wire", [Wire(), Wire(torch.bfloat16), Wire(torch.bfloat16, error_feedback=True)])
@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (3, 3)])
def test_compressed_exponents_change_no_bit_of_a_training(
    wire: Wire, ranks: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_lane, "_LEAST_BYTES", 64)  # the model is small
    start = _model()

    def trained(compress_exponents: bool) -> dict[str, Tensor]:
        def work(group: Any) -> dict[str, Tensor]:
            plan = Plan(4000, 2, wire=wire, compress_exponents=compress_exponents)
            parallel = hp.DataParallel(copy.deepcopy(start), group=group, plan=plan)
            _train(parallel, [group.rank], 6)
            assert parallel.report()["plan"]["compress_exponents"] is compress_exponents
            return copy.deepcopy(parallel.state_dict())

        with ThreadPoolExecutor(ranks) as pool:
            first, *others = pool.map(work, thread_groups(ranks, hosts=hosts))
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
        return first

    plain, compressed = trained(False), trained(True)
    for name, value in plain.items():
        if wire.dtype is None or hosts == 2:
            assert torch.equal(compressed[name], value), name
        else:  # lanes of threads round bfloat16 after every addition
            torch.testing.assert_close(compressed[name], value, rtol=0.02, atol=0.02)
