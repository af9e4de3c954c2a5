"""What benchmarks are made of: the sizes they send are those of the models they name."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.support import gradients
from benchmarks.support.hosts import sent_bytes
from benchmarks.support.memory_limit import NoControlGroupsError, limited_memory
from benchmarks.support.ready_gradients import ReadyGradients


# Numbers of tensors and parameters as torchvision and transformers count them.
@pytest.mark.parametrize(
    ("model", "tensors", "parameters"), [("resnet50", 161, 25_557_032), ("bert-base", 199, 109_482_240)]
)
def test_the_sizes_are_the_models(model: str, tensors: int, parameters: int) -> None:
    shapes = gradients.MODELS[model]()
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters


def test_resnet_begins_and_ends_as_torchvision_has_it() -> None:
    shapes = gradients.resnet50()
    assert shapes[:4] == [(64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1)]
    # layer1.0.downsample, layer1.1.conv1
    assert shapes[12:16] == [(256, 64, 1, 1), (256,), (256,), (64, 256, 1, 1)]
    assert shapes[-2:] == [(1000, 2048), (1000,)]


def test_bert_begins_and_ends_as_transformers_has_it() -> None:
    shapes = gradients.bert_base()
    assert shapes[:6] == [(30_522, 768), (512, 768), (2, 768), (768,), (768,), (768, 768)]
    assert shapes[-8:-2] == [(3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    assert shapes[-2:] == [(768, 768), (768,)]


def test_prepared_gradients_become_ready_from_the_last_to_the_first_without_a_copy() -> None:
    module = ReadyGradients([(3, 2), (5,), ()], rank=1, size=2)
    order: list[int] = []
    for index, weight in enumerate(module.weights):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    assert module.error() == math.inf
    for _ in range(2):
        module.prepare()
        module().backward()
        assert 0.1 < module.error() < 20  # these are one rank's, and not the mean over two
    assert order == [2, 1, 0] * 2
    for weight, gradient in zip(module.weights, module.gradients, strict=True):
        assert weight.grad is not None and weight.grad.data_ptr() == gradient.data_ptr()


def test_prepared_gradients_are_normal_and_other_ones_on_each_rank_and_their_mean_is_known() -> None:
    shapes = [(3, 2), (1_100_000,), (5,)]  # one longer than the values that are drawn
    modules = [ReadyGradients(shapes, rank, 3) for rank in range(3)]
    for module in modules:
        module.prepare()
        module().backward()
    for weights in zip(*(module.weights for module in modules), strict=True):
        mean = torch.stack([weight.grad for weight in weights]).mean(0)
        for weight in weights:
            weight.grad.copy_(mean)
    assert max(module.error() for module in modules) < 1e-6
    before = modules[1].gradients[1].clone()
    for module in modules:
        module.prepare()
    deviations = [float(module.gradients[1].std()) for module in modules]
    assert max(deviations) - min(deviations) < 0.01 * deviations[0]
    values = modules[0].gradients[1] / deviations[0]
    assert abs(float(values.mean())) < 0.01 and 0.9 < float((values.abs() < 1.645).float().mean()) / 0.9 < 1.1
    assert not torch.equal(modules[0].gradients[1][:1000], modules[1].gradients[1][:1000])
    assert not torch.equal(before[:1000], modules[1].gradients[1][:1000])
    assert float(modules[0].gradients[0].abs().max()) < 0.5 * float(modules[0].gradients[1].abs().max())


def test_one_wrong_element_shows() -> None:
    module = ReadyGradients([(3, 2), (5,)])
    module.prepare()
    module().backward()
    assert module.error() == 0
    module.gradients[1][3] += module.gradients[1].std()
    assert 0.1 < module.error() < 10


@pytest.mark.skipif(not Path("/proc/self/net/dev").exists(), reason="needs Linux")
def test_sent_bytes_are_those_of_the_interfaces_but_loopback() -> None:
    interfaces = {path.name for path in Path("/sys/class/net").iterdir()} - {"lo"}
    assert set(sent_bytes()) == interfaces
    for name, count in sent_bytes().items():
        assert count <= int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def test_a_program_that_needs_more_than_the_limit_is_killed_and_the_group_is_gone_afterwards() -> None:
    def exit_status(mebibytes: int) -> int:
        command = [sys.executable, "-c", f"print(len(bytes(range(256)) * {mebibytes << 12}))"]
        return subprocess.run(group.command(command), stdout=subprocess.DEVNULL, check=False).returncode

    try:
        with limited_memory(96 << 20) as group:
            assert (exit_status(16), exit_status(256)) == (0, -signal.SIGKILL)
            assert group.peak is None or 16 << 20 < group.peak <= 96 << 20
            left = subprocess.Popen(group.command(["sh", "-c", "echo; exec sleep 60"]), stdout=subprocess.PIPE)
            assert left.stdout is not None and left.stdout.readline() == b"\n"  # it is in the group by now
    except NoControlGroupsError as error:
        pytest.skip(str(error))
    assert left.wait(10) == -signal.SIGKILL
    assert not group.folder.exists()
