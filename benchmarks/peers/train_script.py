"""A training script as its user has it: torch's DistributedDataParallel on gloo, and nothing of hybridpar.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/train_script.py

It learns to tell 10 random pictures apart, of which it sees noisy copies. benchmarks/training.py trains it as it is,
and again with lines changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 10


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """[b, inputs, h, w] to [b, outputs, h / 2, w / 2]."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def network() -> nn.Module:
    """Images [b, 3, 32, 32] to logits [b, CLASSES]: 13.8 million parameters, most of them in the linear layers."""
    return nn.Sequential(
        convolutions(3, 64),
        convolutions(64, 128),
        convolutions(128, 256),
        nn.Flatten(),
        nn.Linear(256 * 4 * 4, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's images [size, 3, 32, 32] and labels int64 [size]."""
    pictures = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + dist.get_rank())
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return pictures[labels] + torch.randn(size, 3, 32, 32, generator=generator), labels


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of this rank's batch."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    model, optimizer = build()
    for step in range(100):
        loss = train_step(model, optimizer, *batch_of(step, 16))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
