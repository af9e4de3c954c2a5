"""The tuner on a simulated network: a function from plans to seconds, with noise that each rank sees differently."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybridpar as hp
from hybridpar.comm.engine.candidates import candidate_grid
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.tuner import FixedPlan, Trial, Tuner, TunerSettings, make_tuner
from hybridpar.comm.engine.wire import Wire
from hybridpar.topology import Switches
from tests.ranks import run_threads

MB = 1 << 20
HALF = Wire(torch.bfloat16)
GRID = candidate_grid([4, 4], 2, 500 * MB, [Wire(), HALF])
PROPERTIES = ("route", "bucket_bytes", "tracks", "wire", "compress_exponents")
SHORT = TunerSettings(first=1, warmup=1, measured=3)


class Network:
    """Seconds of a step under each plan: a product of what each property costs, unless said otherwise."""

    def __init__(self, seed: int, least_gap: float, candidates: Sequence[Plan] = GRID) -> None:
        draw = np.random.default_rng(seed)
        self.factors: dict[Any, float] = {}
        for name in PROPERTIES:
            values = list(dict.fromkeys(getattr(plan, name) for plan in candidates))
            draw.shuffle(values)
            factor = 1.0
            for value in values:
                self.factors[name, value] = factor
                factor *= 1 + least_gap + draw.random() / 4
        self.noise = np.random.default_rng(seed + 1)

    def seconds(self, plan: Plan) -> float:
        return 0.1 * math.prod(self.factors[name, getattr(plan, name)] for name in PROPERTIES)

    def noisy(self, plan: Plan) -> float:
        """With 2 % of noise, and every tenth step taking half as long again."""
        return self.seconds(plan) * self.noise.normal(1, 0.02) * (1.5 if self.noise.random() < 0.1 else 1)


def drive(tuner: Tuner, seconds: Callable[[Plan], float], most: int = 2000) -> list[tuple[int, Plan]]:
    """Step until the tuner has finished; every change of plan with its step."""
    changes: list[tuple[int, Plan]] = []
    for step in range(most):
        if tuner.finished:
            return changes
        plan = tuner.plan
        changed = tuner.step(seconds(plan))
        assert tuner.plan == (plan if changed is None else changed)
        assert changed != plan
        if changed is not None:
            changes.append((step, changed))
    raise AssertionError(f"not finished after {most} steps")


@pytest.mark.parametrize("seed", range(12))
def test_the_best_plan_is_found_where_plans_differ_by_more_than_the_margin(seed: int) -> None:
    network = Network(seed, least_gap=0.1)
    tuner = Tuner(hp.Group.alone(), GRID, key="model")
    drive(tuner, network.noisy)
    assert tuner.plan == min(GRID, key=network.seconds)
    assert tuner.step(1.0) is None
    report = tuner.report()
    start = report["trials"][0]["seconds"]
    assert report["why"].count(GRID[0].describe()) == (0 if tuner.plan == GRID[0] else 1)
    assert (f"at first {1e3 * start:.2f}" in report["why"]) == (tuner.plan != GRID[0])
    # All but a few of the 96 plans are never tried.
    assert report["steps"] <= 26 * 13 + 5
    assert len(GRID) == 96


@pytest.mark.parametrize("seed", range(12))
def test_the_plan_found_is_within_the_margin_of_the_best_for_each_property(seed: int) -> None:
    network = Network(seed, least_gap=0.0)
    tuner = Tuner(hp.Group.alone(), GRID, key="model")
    drive(tuner, network.noisy)
    best, found = min(GRID, key=network.seconds), tuner.plan
    for name in PROPERTIES:
        # Twice the margin: a second one for the noise of the measurement.
        assert network.factors[name, getattr(found, name)] <= 1.06 * network.factors[name, getattr(best, name)], name


@pytest.mark.parametrize(
    ("wires", "best"),
    [
        ([Wire(), Wire(top_k=0.01)], Plan(wire=Wire(top_k=0.01))),
        ([Wire(), Wire(torch.float16)], Plan(wire=Wire(torch.float16))),
        ([Wire(torch.float16), HALF], Plan(wire=HALF, compress_exponents=True)),
        ([Wire(), HALF, Wire(top_k=0.01)], Plan(wire=HALF, compress_exponents=True)),
    ],
)
@pytest.mark.parametrize("compressed_first", [False, True])
def test_compression_and_wires_that_have_nothing_to_compress_are_weighed(
    wires: Sequence[Wire], best: Plan, compressed_first: bool
) -> None:
    """Seconds are the bytes that each sends."""
    size = {Wire(): 1.0, HALF: 0.5, Wire(torch.float16): 0.52, Wire(top_k=0.01): 0.05 if len(wires) == 2 else 0.4}
    candidates = [plan for plan in candidate_grid([1, 1], 1, 1000, wires) if plan.route == "auto"]
    if compressed_first:
        candidates.sort(key=lambda plan: not plan.compress_exponents)
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=SHORT)
    drive(tuner, lambda plan: size[plan.wire] * (0.7 if plan.compress_exponents else 1.0))
    assert (tuner.plan.wire, tuner.plan.compress_exponents) == (best.wire, best.compress_exponents)


@pytest.mark.parametrize("seed", range(12))
def test_noise_alone_changes_nothing(seed: int) -> None:
    noise = np.random.default_rng(seed)
    tuner = Tuner(hp.Group.alone(), GRID, key="model")
    drive(tuner, lambda plan: noise.normal(0.1, 0.005))
    assert tuner.plan == GRID[0]


def test_of_plans_within_the_margin_of_each_other_the_earlier_is_chosen() -> None:
    candidates = [Plan(tracks=tracks) for tracks in (1, 2, 3, 4)]
    seconds = {1: 1.0, 2: 0.99, 3: 0.81, 4: 0.80}
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=SHORT)
    drive(tuner, lambda plan: seconds[plan.tracks])
    assert tuner.plan.tracks == 3
    assert "one has to win twice by 3% and the noise" in tuner.report()["why"]


def test_a_slow_spell_of_the_machine_is_not_taken_for_a_slow_plan() -> None:
    candidates = [Plan(tracks=tracks) for tracks in (1, 2)]
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=SHORT)
    steps = itertools.count()
    changes = drive(tuner, lambda plan: 0.15 if next(steps) < 6 else 0.1 * (1.02 if plan.tracks == 2 else 1))
    assert tuner.plan.tracks == 1
    # The first trial made the second plan look a third faster; both were tried again.
    assert [plan.tracks for _, plan in changes] == [2, 1, 2, 1]


def test_a_machine_that_gets_slower_between_trials_hides_no_faster_plan() -> None:
    candidates = [Plan(tracks=tracks, route=route) for route in ("auto", "flat") for tracks in (1, 2)]
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=SHORT)
    steps = itertools.count()
    drive(tuner, lambda plan: (0.1 if next(steps) < 9 else 0.15) * (0.8 if plan.tracks == 2 else 1))
    assert tuner.plan == Plan(tracks=2)


def test_ranks_that_see_different_times_change_at_the_same_step_to_the_same_plans() -> None:
    def work(group: hp.Group) -> tuple[list[tuple[int, Plan]], Plan, dict[str, Any]]:
        network = Network(7, least_gap=0.1)
        network.noise = np.random.default_rng(group.rank)
        tuner = Tuner(group, GRID, key="model", settings=SHORT)
        changes = drive(tuner, lambda plan: network.noisy(plan) * (1 + group.rank))
        return changes, tuner.plan, tuner.report()

    results = run_threads(3, work)
    assert results[0] == results[1] == results[2]
    changes, plan, report = results[0]
    assert len(changes) > 5
    network = Network(7, least_gap=0.1)
    assert plan == min(GRID, key=network.seconds)
    # Rank 2 is the slowest, so its times count.
    start = report["trials"][0]
    assert start["plan"] == GRID[0].to_json()
    assert start["seconds"] == pytest.approx(3 * network.seconds(GRID[0]), rel=0.6)
    assert report["state"] == "tuned"


def test_the_slowest_rank_of_each_step_counts() -> None:
    # With two tracks each rank is fast in turn, so its own median is low, but no step is fast everywhere.
    candidates = [Plan(tracks=1), Plan(tracks=2)]

    def work(group: hp.Group) -> Plan:
        steps = itertools.count(group.rank)
        tuner = Tuner(group, candidates, key="model", settings=TunerSettings(0, 0, 6))
        drive(tuner, lambda plan: 0.1 if plan.tracks == 1 else (0.05, 0.06, 0.3)[next(steps) % 3])
        return tuner.plan

    assert run_threads(3, work) == [candidates[0]] * 3


def test_steps_that_warm_up_do_not_count() -> None:
    candidates = [Plan(tracks=1), Plan(tracks=2)]
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=TunerSettings(2, 3, 4))
    taken = [9.0] * 5 + [1.0] * 4 + [9.0] * 3 + [2.0] * 4
    for seconds in taken:
        tuner.step(seconds)
    assert tuner.finished
    assert [(trial["seconds"], trial["steps"]) for trial in tuner.report()["trials"]] == [(1, 4), (2, 4)]


def test_noise_is_the_standard_error_of_a_median() -> None:
    samples = np.random.default_rng(0).normal(1.0, 0.1, (4000, 10))
    stated = np.mean([Trial(GRID[0], tuple(row)).noise for row in samples.tolist()])
    assert stated == pytest.approx(np.median(samples, axis=1).std(), rel=0.15)
    assert Trial(GRID[0], (0.3, 0.1, 0.2, 9.0)).seconds == pytest.approx(0.25)


def test_what_was_chosen_is_logged_once_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: hp.Group) -> dict[str, Any]:
        tuner = Tuner(group, [Plan(), Plan(route="flat"), Plan(tracks=2)], key="model", settings=SHORT)
        assert tuner.report()["state"] == "tuning"
        drive(tuner, lambda plan: 0.1 if plan.route == "flat" else 0.2)
        return tuner.report()

    with caplog.at_level(logging.INFO, "hybridpar"):
        report = run_threads(2, work)[0]
    assert len(caplog.records) == 1
    for text in (caplog.text, report["why"]):
        assert "100.00 ± 0.00 ms a step, the best of 2 plans in 17 steps" in text
        assert f"at first 200.00 ± 0.00 ms with {Plan().describe()}" in text
    assert Plan(route="flat").describe() in caplog.text
    assert json.loads(json.dumps(report)) == report
    # With the flat route two tracks are no candidate: the start and the winner, each tried again.
    assert [trial["plan"]["route"] for trial in report["trials"]] == ["auto", "flat", "auto", "flat"]


def test_a_tuned_plan_is_kept_and_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tuned.json"
    settings = TunerSettings(0, 0, 2, cache=path)
    candidates = [Plan(tracks=1), Plan(tracks=2)]

    def work(group: hp.Group, key: str, fast: int, offered: Sequence[Plan] = candidates) -> tuple[str, int]:
        # Only rank 0 may know of the file.
        own = settings if group.rank == 0 else TunerSettings(0, 0, 2)
        tuner = Tuner(group, offered, key=key, settings=own)
        state = tuner.report()["state"]
        drive(tuner, lambda plan: 0.1 if plan.tracks == fast else 0.2)
        return state, tuner.plan.tracks

    assert run_threads(2, work, "one", 2) == [("tuning", 2)] * 2
    assert run_threads(2, work, "other", 1) == [("tuning", 1)] * 2
    with caplog.at_level(logging.INFO, "hybridpar"):
        assert run_threads(2, work, "one", 1) == [("cached", 2)] * 2
    assert "tuned before" in caplog.text
    assert str(path) in caplog.text
    assert run_threads(2, work, "other", 2) == [("cached", 1)] * 2
    # Another number of ranks, ranks on other hosts and another choice are other cases.
    with ThreadPoolExecutor(2) as pool:
        apart = list(pool.map(lambda group: work(group, "one", 1), hp.thread_groups(2, timeout=60, hosts=2)))
    assert apart == [("tuning", 1)] * 2
    assert run_threads(3, work, "one", 1) == [("tuning", 1)] * 3
    assert run_threads(2, work, "one", 3, [*candidates, Plan(tracks=3)]) == [("tuning", 3)] * 2
    assert len(json.loads(path.read_text())["entries"]) == 5
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2, "entries": {}}', '{"format": 1, "entries": {"a": 1}}'])
def test_a_file_that_is_none_is_reported_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content)
    settings = TunerSettings(0, 0, 1, cache=path)

    def work(group: hp.Group) -> str:
        tuner = Tuner(group, [Plan(tracks=1), Plan(tracks=2)], key="model", settings=settings)
        state = str(tuner.report()["state"])
        drive(tuner, lambda plan: 0.1)
        return state

    assert run_threads(2, work) == ["tuning", "tuning"]
    assert caplog.text.count("tuning anew") == 1
    assert (tmp_path / "tuned.json.unreadable").read_text() == content
    assert run_threads(2, work) == ["cached", "cached"]


def test_a_plan_that_is_no_candidate_is_not_taken_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tuned.json"
    candidates, settings = [Plan(tracks=1), Plan(tracks=2)], TunerSettings(0, 0, 1, cache=path)
    drive(Tuner(hp.Group.alone(), candidates, key="model", settings=settings), lambda plan: 0.1)
    path.write_text(path.read_text().replace('"dtype": null', '"dtype": "float16"', 1))
    content = json.loads(path.read_text())
    for entry in content["entries"].values():
        entry["plan"]["wire"]["dtype"] = "float16"
    path.write_text(json.dumps(content))
    tuner = Tuner(hp.Group.alone(), candidates, key="model", settings=settings)
    assert not tuner.finished
    assert "a plan that is no candidate" in caplog.text


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settings = TunerSettings(0, 0, 1, cache=home / "tuned.json")
    tuner = Tuner(hp.Group.alone(), [Plan(tracks=1), Plan(tracks=2)], key="model", settings=settings)
    home.rmdir()
    drive(tuner, lambda plan: 0.1)
    assert tuner.plan.tracks == 1
    assert "not kept for the next run" in caplog.text

    def work(group: hp.Group) -> None:
        with pytest.raises(ValueError, match=r"a directory that exists, got .*tuned\.json"):
            Tuner(group, GRID, key="model", settings=settings)

    run_threads(2, work)


def test_mistakes_are_raised_on_every_rank() -> None:
    def work(group: hp.Group) -> None:
        tuner = Tuner(group, [Plan(tracks=1), Plan(tracks=2)], key="model", settings=TunerSettings(0, 0, 2))
        assert tuner.step(0.1) is None
        with pytest.raises(ValueError, match="positive length of a step, got nan on rank 1"):
            tuner.step(math.nan if group.rank == 1 else 0.1)
        with pytest.raises(
            ValueError, match=r"the same key on every rank, got model 0 on rank 0 and model 1 on rank 1"
        ):
            Tuner(group, GRID, key=f"model {group.rank}")
        with pytest.raises(ValueError, match=r"the same candidates on every rank"):
            Tuner(group, GRID[group.rank :], key="model")
        with pytest.raises(ValueError, match=r"the same HYBRIDPAR_TUNE on every rank, got 0 on rank 0 and 1 on rank 1"):
            make_tuner(group, GRID, key="model", environment=Switches(tune=group.rank == 1))

    run_threads(2, work)
    for candidates in ([], [Plan(), Plan()]):
        with pytest.raises(ValueError, match="one or several different plans"):
            Tuner(hp.Group.alone(), candidates, key="model")
    for wrong in ({"first": -1}, {"warmup": -1}, {"measured": 0}, {"margin": 1.0}):
        with pytest.raises(ValueError, match="measured of 1 or more"):
            TunerSettings(**wrong)


def test_the_environment_turns_it_off_and_says_where_plans_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"

    def work(group: hp.Group) -> Plan:
        off = make_tuner(group, GRID, key="model", environment=Switches(tune=False))
        assert isinstance(off, FixedPlan)
        assert (off.finished, off.plan, off.step(0.1)) == (True, GRID[0], None)
        assert off.report()["why"] == "tuning is off (HYBRIDPAR_TUNE=0)"
        tuner = make_tuner(group, GRID[:3], key="model", settings=SHORT, environment=Switches(tune_file=path))
        assert isinstance(tuner, Tuner)
        drive(tuner, lambda plan: 0.1)
        return tuner.plan

    run_threads(2, work)
    assert path.exists()
    assert isinstance(make_tuner(hp.Group.alone(), GRID, key="model", environment=Switches()), FixedPlan)
    one = Tuner(hp.Group.alone(), GRID[:1], key="model")
    assert (one.finished, one.plan, one.report()["state"]) == (True, GRID[0], "fixed")
