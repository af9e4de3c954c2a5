"""``engine_report``: what the gradient engines of this process send, how, and why so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridpar.comm.engine.plan import Plan
from hybridpar.data_parallel import DataParallel, open_wrappers

_MB = 1e6


def engine_report(*models: DataParallel) -> str:
    """Text about each model: its plan and why it was chosen, what travels, how the last step went, what was tried.

    Args:
        models: by default all ``DataParallel`` of this process that are open.
    """
    chosen = models or open_wrappers()
    if not chosen:
        return "no DataParallel is open"
    return "\n".join(_describe(model) for model in chosen)


def _describe(model: DataParallel) -> str:
    report, group = model.report(), model.group
    tuner, buckets, hosts = report["tuner"], report["buckets"], len(group.hosts)
    tensors = sum(bucket["tensors"] for bucket in buckets)
    lines = [
        f"{type(model.module).__name__} on rank {group.rank} of {group.size}, {hosts} host{'s' * (hosts > 1)}",
        f"  plan      {report['describe']}",
        f"  why       {tuner['state']}: {tuner['why']}",
        f"  a step    {report['bytes'] / _MB:,.1f} MB of {tensors:,} tensors in {len(buckets):,} buckets",
    ]
    if report["rounds"]:
        lines.append(
            f"  last one  {_summed(report, 'pack'):.1f} ms packing, {_summed(report, 'send'):.1f} ms sending, on all "
            f"tracks together; {100 * report['hidden']:.0f} % of it while backward went on"
        )
    for trial in tuner["trials"]:
        plan = Plan.from_json(trial["plan"]).describe()
        lines.append(f"  tried     {plan}: {1e3 * trial['seconds']:.1f} +- {1e3 * trial['noise']:.1f} ms a step")
    return "\n".join(lines)


def _summed(report: Mapping[str, Any], what: str) -> float:
    """Milliseconds."""
    return 1e3 * float(sum(track[what] for track in report["tracks"]))
