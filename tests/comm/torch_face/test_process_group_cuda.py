"""torch's face on CUDA tensors: one rank on NCCL, and two ranks that share a GPU over gloo."""

from __future__ import annotations

import pytest

from hybridpar.comm.torch_face.process_group import ProcessGroupOptions
from tests.comm.torch_face.torch_scripts import cuda_checks
from tests.comm.torch_face.torch_scripts.launch import run


@pytest.mark.gpu
def test_nccl_serves_cuda_tensors() -> None:
    assert run(1, cuda_checks.what_only_nccl_does) == {0: "held"}


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_use_gloo() -> None:
    answers = run(2, cuda_checks.collectives_and_ddp, options=ProcessGroupOptions(cuda="gloo"))
    assert answers == {0: "held", 1: "held"}


def test_options_say_what_may_carry_cuda_tensors() -> None:
    with pytest.raises(ValueError, match="expected 'nccl' or 'gloo', got 'mpi'"):
        ProcessGroupOptions(cuda="mpi")  # type: ignore[arg-type]
