"""What PyTorch takes by itself: a process that trains one linear layer, with an optimizer of torch and nothing of ours.

python benchmarks/support/bare_torch.py        # its own memory, in bytes
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn


def bare_step(width: int, batch: int = 32) -> None:
    """One step of a ``width`` x ``width`` layer. The first use of torch.optim imports much more of PyTorch."""
    layer = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.randn(batch, width)).square().mean().backward()
    optimizer.step()


def own_memory(process: int | str = "self") -> int:
    """Bytes in memory that are a process's own, or shared with others; without the files of programs and libraries."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)))


if __name__ == "__main__":
    bare_step(512)
    print(own_memory())
