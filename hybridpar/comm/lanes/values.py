"""Values of any kind between the ranks of a lane, as JSON."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import torch

from hybridpar.comm.lanes.lane import Lane


def gather_json(lane: Lane, value: Any) -> list[Any]:
    """Collective: each rank's value, in rank order. Values are anything that JSON can carry."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    counts = list(torch.empty(lane.size, 1, dtype=torch.int64).unbind())
    lane.all_gather(counts, torch.tensor([len(data)]))
    sizes = [int(count) for count in counts]
    everyone = torch.empty(sum(sizes), dtype=torch.uint8)
    lane.all_gather(everyone.split(sizes), data)
    text = bytes(everyone.numpy())
    return [json.loads(text[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)]
