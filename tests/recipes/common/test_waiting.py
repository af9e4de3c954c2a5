"""What rank 0 prepares while the others wait."""

from __future__ import annotations

import time

import pytest

import hybridpar as hp
from recipes.common.waiting import first_rank_prepares
from tests.ranks import run_threads


def test_only_rank_0_works_and_the_others_wait_longer_than_the_time_out_of_the_group() -> None:
    done: list[int] = []

    def work(group: hp.Group) -> list[int]:
        def prepare() -> None:
            time.sleep(1.5)
            done.append(group.rank)

        first_rank_prepares(group, prepare, every=0.1)
        return list(done)

    assert run_threads(3, work, timeout=1.0) == [[0]] * 3


def test_what_goes_wrong_on_rank_0_is_raised_on_all() -> None:
    def work(group: hp.Group) -> str:
        def prepare() -> None:
            raise ValueError("no text")

        with pytest.raises(ValueError, match="no text") as raised:
            first_rank_prepares(group, prepare)
        return str(raised.value)

    assert run_threads(2, work) == ["no text", "rank 0: no text"]
