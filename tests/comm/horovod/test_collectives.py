"""Horovod's collectives do what Horovod's do, on three processes."""

from __future__ import annotations

import pytest

from tests.comm.horovod.scripts import collective_checks as on
from tests.comm.horovod.scripts.launch import Check, verdicts

CHECKS: tuple[Check, ...] = (
    on.ranks_are_the_launchers,
    on.queries_tell_the_truth,
    on.reductions_are_gloos,
    on.average_is_the_default_and_divides_by_the_ranks,
    on.averages_of_whole_numbers_are_rounded_towards_zero,
    on.factors_are_applied_before_and_after,
    on.half_precision_averages_do_not_overflow,
    on.calls_in_place_write_into_what_they_are_given,
    on.handles_are_polled_and_synchronized,
    on.any_order_of_names_is_served,
    on.groups_are_reduced_by_place,
    on.compression_changes_what_is_sent_and_not_what_is_returned,
    on.gathers_take_uneven_rows_and_any_dtype,
    on.broadcasts_take_any_dtype_and_layout,
    on.alltoall_deals_out_rows_and_says_how_many_came,
    on.reducescatter_gives_first_ranks_one_row_more,
    on.gradients_are_horovods,
    on.sparse_tensors_are_added_up,
    on.objects_travel,
    on.inference_mode_does_not_get_in_the_way,
    on.process_sets_work_side_by_side,
    on.uneven_ranks_join,
    on.barriers_wait,
    on.threads_may_call,
    on.mistakes_say_what_was_expected,
    on.differences_between_ranks_are_named_on_every_rank,
    on.it_can_be_ended_and_begun_again,
)


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, str]:
    return verdicts(3, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_three_ranks(on_three_ranks: dict[str, str], check: Check) -> None:
    assert on_three_ranks[check.__name__] == ""
