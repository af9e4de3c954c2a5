"""The tuner: tries plans during the first steps of training and keeps the fastest.

# Note [search]
One property of the plan after the other, or two that belong together: all plans that differ from the best one so far in
that alone are tried, and one replaces it only if it is faster by a margin and by more than the noise; of several whose
difference is within that, the earlier (simpler) candidate counts. Machines are slow for a while, too: so the winner and
the one it would replace are both tried again, side by side, and it has to win there as well; and what later plans are
compared with is measured anew when it was not measured just before.

# Note [decided together]
Every rank collects its own step times. At the end of a trial all ranks exchange them; a step took as long as on its
slowest rank. From there on all is a pure function of what was exchanged, so all ranks change to the same plan at the
same step.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybridpar.comm.agreement import check_same_settings, together
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.tune_cache import TuneCache
from hybridpar.comm.group import Group
from hybridpar.topology import Switches, switches

_LOG = logging.getLogger(__name__)

# Note [search]: in this order. The wire comes last, since it changes what is computed. What can be compressed depends
# on it; what that saves may be less than what wires differ by, and is looked at by itself, too.
_PROPERTIES = (("route",), ("bucket_bytes",), ("tracks",), ("wire", "compress_exponents"), ("compress_exponents",))


@dataclass(frozen=True)
class TunerSettings:
    """How long each plan is tried, and what it takes to win.

    Attributes:
        first: steps at the very beginning that do not count, while memory and caches fill.
        warmup: steps after each change of plan that do not count.
        measured: steps that count, for each trial.
        margin: a plan replaces a simpler one if its steps take less than (1 - margin) of the other's time.
        cache: file of tuned plans, read and written by rank 0; None: every run tunes.
    """

    first: int = 5
    warmup: int = 3
    measured: int = 10
    margin: float = 0.03
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.first < 0 or self.warmup < 0 or self.measured < 1 or not 0 <= self.margin < 1:
            raise ValueError(
                "expected first and warmup of 0 or more, measured of 1 or more and a margin in [0, 1), got "
                f"first {self.first}, warmup {self.warmup}, measured {self.measured}, margin {self.margin}"
            )


@dataclass(frozen=True)
class Trial:
    """What one plan took.

    Attributes:
        plan: the plan.
        steps: seconds of each step that counts, on the slowest rank.
    """

    plan: Plan
    steps: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps)

    @property
    def noise(self) -> float:
        """Standard error of the median, in seconds, if steps scatter as a normal distribution of the same spread."""
        spread = 1.4826 * statistics.median(abs(step - self.seconds) for step in self.steps)
        return math.sqrt(math.pi / 2) * spread / math.sqrt(len(self.steps))

    def beats(self, other: Trial, margin: float) -> bool:
        """Whether this plan is faster by the margin, and by more than two standard errors."""
        gain = other.seconds - self.seconds
        return gain > margin * other.seconds and gain > 2 * math.hypot(self.noise, other.noise)


def search(candidates: Sequence[Plan], margin: float) -> Generator[Plan, Trial, Trial]:
    """Note [search]: yields the plan to try next, is sent its trial, and returns the last trial of the best plan."""
    best = yield candidates[0]
    fresh = True
    for names in _PROPERTIES:
        challengers = [plan for plan in candidates if _differs_only_in(names, plan, best.plan)]
        if challengers and not fresh:
            best = yield best.plan
        trials = []
        for plan in challengers:
            trials.append((yield plan))
            fresh = False
        winners = [trial for trial in trials if trial.beats(best, margin)]
        if winners:
            fastest = min(winners, key=lambda trial: trial.seconds)
            contender = next(trial for trial in winners if not fastest.beats(trial, margin))
            best_again = yield best.plan
            again = yield contender.plan
            best, fresh = (again if again.beats(best_again, margin) else best_again), True
    return best


class Tuner:
    """Says which plan to use for the next step. Collective: all ranks construct it and call it alike.

    Args:
        group: the ranks.
        candidates: the plans that may be chosen, different ones; the first is used to begin with, and of two that are
            equally fast the earlier is chosen. See ``candidate_grid``.
        key: text that is equal for equal models, such as a hash of the names, shapes, dtypes and
            devices of all tensors.
        settings: how long each plan is tried.

    Attributes:
        plan: the plan to use now.
        finished: whether it is the final one.

    Raises:
        ValueError: no candidates, or equal ones; the ranks' arguments differ; or the cache's directory does not exist.
    """

    def __init__(
        self, group: Group, candidates: Sequence[Plan], *, key: str, settings: TunerSettings | None = None
    ) -> None:
        if len(candidates) == 0 or len(set(candidates)) < len(candidates):
            raise ValueError(f"candidates: expected one or several different plans, got {list(candidates)}")
        self._group, self._settings = group, TunerSettings() if settings is None else settings
        choices = [plan.to_json() for plan in candidates]
        schedule = {name: value for name, value in asdict(self._settings).items() if name != "cache"}
        check_same_settings(group, "Tuner", {"candidates": choices, "key": key, **schedule})
        self._facts = {
            "candidates": choices,
            "tensors": key,
            "ranks_per_host": [len(ranks) for ranks in group.hosts],
            "interfaces": group.all_gather_json(list(group.interfaces)),
            "hybridpar": version("hybridpar"),
            "torch": torch.__version__,
        }
        self._seconds: list[float] = []
        self._skip = self._settings.first + self._settings.warmup
        self._steps = 0
        self._trials: list[Trial] = []
        self._search = search(candidates, self._settings.margin)
        self.plan, self.finished = next(self._search), False
        self._state, self._why = "tuning", "not enough steps yet"
        self._cache: TuneCache | None = None
        self._look_into_cache(candidates)
        if not self.finished and len(candidates) == 1:
            self._finish("fixed", candidates[0], "there is no other candidate")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tuner:
        """Itself: a copied module is tuned with the same ranks."""
        return self

    def step(self, seconds: float) -> Plan | None:
        """Collective, after each step: note how long it took here.

        Call it with comparable steps only: not with those that do not reduce gradients.

        Args:
            seconds: of the whole step, forward, backward and optimizer.

        Returns:
            The plan to change to before the next step, on all ranks alike, or None to go on.

        Raises:
            ValueError: a rank's seconds are not positive and finite (on every rank, at the end of the trial).
        """
        if self.finished:
            return None
        self._steps += 1
        self._seconds.append(seconds)
        if len(self._seconds) < self._skip + self._settings.measured:
            return None
        mine, self._seconds = self._seconds[self._skip :], []
        # Note [decided together]
        everyone: list[list[float]] = self._group.all_gather_json(mine)
        for rank, theirs in enumerate(everyone):
            if wrong := [value for value in theirs if not (math.isfinite(value) and value > 0)]:
                raise ValueError(f"seconds: expected the positive length of a step, got {wrong[0]} on rank {rank}")
        trial = Trial(self.plan, tuple(max(step) for step in zip(*everyone, strict=True)))
        self._trials.append(trial)
        before = self.plan
        try:
            self.plan = self._search.send(trial)
        except StopIteration as end:
            self._tuned(end.value)
        self._skip = self._settings.warmup
        return None if self.plan == before else self.plan

    def report(self) -> dict[str, Any]:
        """What was tried and chosen, as JSON can carry it.

        Returns:
            ``state``: tuning, tuned, cached or fixed; ``plan`` and ``why``; ``steps`` so far; and ``trials`` in their
            order, each with its ``plan``, ``seconds`` a step, ``noise`` (standard error) and number of ``steps``.
        """
        return {
            "state": self._state,
            "plan": self.plan.to_json(),
            "why": self._why,
            "steps": self._steps,
            "trials": [
                {
                    "plan": trial.plan.to_json(),
                    "seconds": trial.seconds,
                    "noise": trial.noise,
                    "steps": len(trial.steps),
                }
                for trial in self._trials
            ],
        }

    def _look_into_cache(self, candidates: Sequence[Plan]) -> None:
        """Collective: rank 0 reads."""
        path = self._settings.cache

        def read() -> dict[str, Any] | None:
            if self._group.rank != 0 or path is None:
                return None
            self._cache = TuneCache(path)
            found = self._cache.load(self._facts)
            return None if found is None else {**found, "path": str(path)}

        entry = self._group.broadcast_json(together(self._group, read))
        if entry is None:
            return
        # The candidates are among the facts, so this fails only for a file changed by hand.
        chosen = next((plan for plan in candidates if plan.to_json() == entry.get("plan")), None)
        if chosen is None:
            if self._group.rank == 0:
                _LOG.warning("tuning anew, since %s holds a plan that is no candidate: %s", path, entry.get("plan"))
            return
        self._finish("cached", chosen, f"{entry.get('why')} (tuned before, kept in {entry['path']})")

    def _tuned(self, best: Trial) -> None:
        latest = {trial.plan: trial for trial in self._trials}
        start = self._trials[0]
        others = sorted(
            (trial for trial in latest.values() if trial.plan not in (best.plan, start.plan)),
            key=lambda trial: trial.seconds,
        )
        why = f"{_milliseconds(best)} a step, the best of {len(latest)} plans in {self._steps} steps"
        if best.plan != start.plan:
            why += f"; at first {_milliseconds(start)} with {start.plan.describe()}"
        for number, trial in enumerate(others[:2]):
            why += f"; {'next' if number == 0 else 'then'} {_milliseconds(trial)} with {trial.plan.describe()}"
        if others and others[0].seconds < best.seconds:
            why += f"; to replace a simpler plan, one has to win twice by {self._settings.margin:.0%} and the noise"
        self._finish("tuned", best.plan, why)
        if self._cache is not None:
            try:
                self._cache.store(self._facts, {"plan": best.plan.to_json(), "seconds": best.seconds, "why": why})
            except OSError as error:
                _LOG.warning("the tuned plan is not kept for the next run: %s", error)

    def _finish(self, state: str, plan: Plan, why: str) -> None:
        self.plan, self.finished, self._state, self._why = plan, True, state, why
        if self._group.rank == 0 and self._group.size > 1:
            _LOG.info("gradients travel as %s: %s", plan.describe(), why)


class FixedPlan:
    """A tuner that is off: the same plan for ever.

    Args:
        plan: the plan.
        why: for the report.
    """

    finished = True

    def __init__(self, plan: Plan, why: str) -> None:
        self.plan, self._why = plan, why

    def step(self, seconds: float) -> Plan | None:
        """Nothing is noted, nothing changes."""
        return None

    def report(self) -> dict[str, Any]:
        """As ``Tuner.report``."""
        return {"state": "fixed", "plan": self.plan.to_json(), "why": self._why, "steps": 0, "trials": []}


def make_tuner(
    group: Group,
    candidates: Sequence[Plan],
    *,
    key: str,
    settings: TunerSettings | None = None,
    environment: Switches | None = None,
) -> Tuner | FixedPlan:
    """Collective: a tuner, or what stands in for it where tuning is off (HYBRIDPAR_TUNE=0) or there is one rank only.

    Args:
        group, candidates, key, settings: as for ``Tuner``.
        environment: None means that of this process. HYBRIDPAR_TUNE_FILE takes the place of a cache that is not set.

    Raises:
        ValueError: as ``Tuner``; or tuning is off on some ranks only.
    """
    found = switches() if environment is None else environment
    check_same_settings(group, "the environment", {"HYBRIDPAR_TUNE": int(found.tune)})
    if not found.tune:
        return FixedPlan(candidates[0], "tuning is off (HYBRIDPAR_TUNE=0)")
    if group.size == 1:
        return FixedPlan(candidates[0], "there is one rank only")
    chosen = TunerSettings() if settings is None else settings
    if chosen.cache is None and found.tune_file is not None:
        chosen = replace(chosen, cache=found.tune_file)
    return Tuner(group, candidates, key=key, settings=chosen)


def _differs_only_in(names: Sequence[str], plan: Plan, other: Plan) -> bool:
    differing = {each.name for each in fields(plan) if getattr(plan, each.name) != getattr(other, each.name)}
    return bool(differing) and differing <= set(names)


def _milliseconds(trial: Trial) -> str:
    return f"{1e3 * trial.seconds:.2f} ± {1e3 * trial.noise:.2f} ms"
