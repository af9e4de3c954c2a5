"""The learning rates of a run, beside PyTorch's schedulers."""

from __future__ import annotations

import pytest
import torch

from recipes.common.schedule import Schedule, learning_rate


@pytest.mark.parametrize("schedule", ["polynomial", "linear", "cosine", "constant"])
def test_learning_rates_rise_over_the_warm_up_and_fall_to_nothing(schedule: Schedule) -> None:
    rates = [learning_rate(0.4, step, 200, warmup=0.1, schedule=schedule) for step in range(200)]
    assert rates[0] == pytest.approx(0.4 / 20)
    assert max(rates) == pytest.approx(0.4)
    assert rates[19] == pytest.approx(0.4)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == (0.4 if schedule == "constant" else pytest.approx(0.0, abs=3e-3))
    # PyTorch's own schedulers agree after the warm-up.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedulers = {
        "polynomial": lambda: torch.optim.lr_scheduler.PolynomialLR(optimizer, 180, power=2.0),
        "linear": lambda: torch.optim.lr_scheduler.PolynomialLR(optimizer, 180, power=1.0),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 180),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    }
    scheduler = schedulers[schedule]()
    for rate in rates[20:]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()
