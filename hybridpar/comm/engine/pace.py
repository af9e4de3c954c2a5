"""Pace: changes an engine's plan as steps go by, when the tuner says so or the order of need has become known."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hybridpar.comm.engine.candidates import candidate_grid, plans
from hybridpar.comm.engine.engine import Engine
from hybridpar.comm.engine.launch_order import launch_order
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.tuner import FixedPlan, Tuner, TunerSettings, make_tuner
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.group import Group
from hybridpar.comm.lanes.exponents import DTYPES as COMPRESSIBLE

# Rounds under one plan before its times are believed.
_SETTLED = 5


def tuner_for(
    group: Group,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    tune: bool | str | Path,
    *,
    given: bool = True,
    wires: Sequence[Wire] = (),
) -> Tuner | FixedPlan:
    """Collective: the tuner of these tensors' plan.

    Args:
        plan: to begin with.
        tensors: all that will be sent, by name.
        tune: False: keep the plan; True: try others; a path: and keep the best one there for the next run.
        given: False: the plan is only the default, and tuning may begin with another one.
        wires: further formats that may be chosen.
    """
    if tune is False:
        return FixedPlan(plan, "tuning was not asked for")
    wires = list(dict.fromkeys([plan.wire, *wires]))
    grid = candidate_grid(
        [len(ranks) for ranks in group.hosts],
        len(group.interfaces),
        sum(tensor.nbytes for tensor in tensors.values()),
        wires,
        compressible=any(
            tensor.is_cpu and wire.dtype_of(tensor.dtype) in COMPRESSIBLE
            for tensor in tensors.values()
            for wire in wires
        ),
    )
    if given:
        # The tuner changes one property at a time, so each of the others' is combined with the plan's own.
        known = [plan, *grid]
        compress = [plan.compress_exponents]
        if any(each.compress_exponents for each in grid):  # else it makes no difference here
            compress.append(not plan.compress_exponents)
        grid = plans(
            dict.fromkeys(each.route for each in known),
            dict.fromkeys(each.bucket_bytes for each in known),
            dict.fromkeys(each.tracks for each in known),
            compress,
            dict.fromkeys(each.wire for each in known),
        )
    described = "\n".join(f"{name}: {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
    key = hashlib.sha256(described.encode()).hexdigest()
    settings = TunerSettings(cache=None if tune is True else Path(tune))
    return make_tuner(group, grid, key=key, settings=settings)


class Pace:
    """Call ``step`` once a step, on every rank.

    Args:
        group, engine: whose plan to change.
        tuner: says which plan to use.
        prepare: called before a change, when the engine must be between rounds.
    """

    def __init__(
        self, group: Group, engine: Engine, tuner: Tuner | FixedPlan, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.tuner = tuner
        self._group, self._engine, self._prepare = group, engine, prepare
        self._last: float | None = None
        self._rounds = 0
        self._ordered = False

    def step(self, order_of_need: Sequence[int] | None = None) -> None:
        """Collective, at the end of a step.

        Args:
            order_of_need: tensors in the order in which the next forward pass needs their sums, where it does not wait
                for all of them at its beginning.
        """
        now = time.perf_counter()
        taken, self._last = None if self._last is None else now - self._last, now
        self._rounds += 1
        if taken is not None and not self.tuner.finished:
            plan = self.tuner.step(taken)
            if plan is not None:
                self._change(plan, None)
        elif self.tuner.finished and order_of_need is not None and not self._ordered and self._rounds >= _SETTLED:
            self._ordered = True
            order = self._launch_order(order_of_need)
            if order != list(range(len(order))):
                self._change(self._engine.plan, order)

    def interrupt(self) -> None:
        """The step now under way is not like the others: its time does not count."""
        self._last = None

    def _change(self, plan: Plan, order: Sequence[int] | None) -> None:
        self._prepare()
        self._engine.replan(plan, order)
        self._rounds = 0

    def _launch_order(self, order_of_need: Sequence[int]) -> list[int]:
        """Collective: the buckets of a plan that sends them as they become ready, in a better order.

        A bucket is ready when the last rank has it, and is sent once the last rank has come, whose sending is shortest.
        """
        times = [[bucket["ready"], bucket["sent"] - bucket["begun"]] for bucket in self._engine.report()["buckets"]]
        everyone = self._group.all_gather_json([times, list(order_of_need)])
        ready = [max(rank[0] for rank in ranks) for ranks in zip(*(theirs for theirs, _ in everyone), strict=True)]
        send = [min(rank[1] for rank in ranks) for ranks in zip(*(theirs for theirs, _ in everyone), strict=True)]
        place = {index: number for number, index in enumerate(everyone[0][1])}
        buckets = self._engine.buckets
        needed = [min(place.get(index, len(place)) for index in bucket.members) for bucket in buckets]
        return launch_order(ready, send, sorted(range(len(buckets)), key=needed.__getitem__))
