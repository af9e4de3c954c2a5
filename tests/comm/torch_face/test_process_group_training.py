"""torch's face: DDP, FSDP2, DTensor and their kin run unmodified, and train as on gloo or on one process."""

from __future__ import annotations

import pytest

from tests.comm.torch_face.torch_scripts import training_checks as checks
from tests.comm.torch_face.torch_scripts.launch import Check, verdicts

CHECKS: tuple[Check, ...] = (
    checks.ddp_trains_as_on_gloo,
    checks.ddp_takes_uneven_inputs_and_sparse_gradients,
    checks.ddp_hooks_of_torch_work,
    checks.zero_redundancy_optimizer_trains_as_on_gloo,
    checks.fsdp2_trains_as_on_gloo,
    checks.fsdp2_trains_as_one_process,
    checks.dtensors_are_redistributed,
    checks.dtensor_products_and_their_gradients_are_right,
    checks.tensor_parallel_layers_equal_whole_ones,
)


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, str]:
    return verdicts(2, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(on_two_ranks: dict[str, str], check: Check) -> None:
    assert on_two_ranks[check.__name__] == ""
