"""The plain store beside MXNet's own stores, given the same calls; and MXNet's arrays."""

from __future__ import annotations

import pytest

from tests.comm.kvstore.running import check_with_mxnet


def test_mxnet_arrays_share_their_memory() -> None:
    check_with_mxnet("arrays")


@pytest.mark.parametrize("check", ["semantics", "updaters", "optimizers", "rows", "device_compression"])
def test_the_same_calls_give_what_mxnet_gives(check: str) -> None:
    check_with_mxnet(check)
