"""How long work takes on a device, whatever the host needs to start it. On the CPU: how long it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]
CYCLES_PER_US = 2000


def device_medians(works: Mapping[str, Work], repeats: int, *, device: str = "cuda") -> dict[str, float]:
    """Microseconds on the device of each work, in turns."""
    if device == "cpu":
        return {name: host_median(work, repeats, device=device) for name, work in works.items()}
    # The device first sleeps while the host prepares the work, so that waiting for the host is not measured.
    sleep = {name: int(2 * CYCLES_PER_US * host_median(work, 3)) for name, work in works.items()}
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(sleep[name])
            begin.record()
            work()
            end.record()
            spans[name].append((begin, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(1e3 * begin.elapsed_time(end) for begin, end in taken) for name, taken in spans.items()
    }


def host_median(work: Work, repeats: int, *, device: str = "cuda") -> float:
    """Microseconds until a call returns, the first one apart."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - start))
    wait()
    return statistics.median(times[1:])
