"""The report says how gradients travel, and why."""

from __future__ import annotations

import gc
from typing import Any

import torch

import hybridpar as hp
from tests.ranks import run_threads


def test_the_report_names_plan_reason_and_what_travelled() -> None:
    def work(group: Any) -> str:
        model = hp.DataParallel(torch.nn.Linear(30, 20), group=group, plan=hp.Plan(bucket_bytes=1 << 20, tracks=2))
        model(torch.ones(4, 30)).sum().backward()
        return hp.engine_report(model)

    lines = run_threads(2, work)[1].splitlines()
    assert lines[0] == "Linear on rank 1 of 2, 1 host"
    assert "buckets of 1 MiB on 2 tracks, route auto" in lines[1]
    assert "fixed: tuning was not asked for" in lines[2]
    assert "2 tensors in 1 buckets" in lines[3]
    assert "while backward went on" in lines[4]


def test_tuning_shows_what_was_tried() -> None:
    def work(group: Any) -> str:
        model = hp.DataParallel(torch.nn.Linear(1500, 1500), group=group, tune=True)
        for _ in range(60):
            model(torch.ones(1, 1500)).sum().backward()
        return hp.engine_report(model)

    report = run_threads(2, work)[0]
    assert report.count("ms a step") >= 2
    assert report.count("  tried ") >= 2


def test_without_arguments_all_open_ones_are_reported() -> None:
    gc.collect()
    group = hp.Group.alone()
    model = hp.DataParallel(torch.nn.Linear(3, 2), group=group)
    assert "Linear on rank 0 of 1, 1 host" in hp.engine_report()
    model.close()
    assert "Linear on rank 0 of 1, 1 host" not in hp.engine_report()
