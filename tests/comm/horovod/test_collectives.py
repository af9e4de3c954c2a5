"""Horovod's collectives do what Horovod's do, on three processes."""

from __future__ import annotations

import pytest

from tests.comm.horovod.scripts import collective_checks, together_checks
from tests.comm.horovod.scripts.launch import Check, verdicts

CHECKS: tuple[Check, ...] = (
    collective_checks.ranks_are_the_launchers,
    collective_checks.queries_tell_the_truth,
    collective_checks.reductions_are_gloos,
    collective_checks.average_is_the_default_and_divides_by_the_ranks,
    collective_checks.averages_of_whole_numbers_are_rounded_towards_zero,
    collective_checks.factors_are_applied_before_and_after,
    collective_checks.half_precision_averages_do_not_overflow,
    collective_checks.calls_in_place_write_into_what_they_are_given,
    collective_checks.handles_are_polled_and_synchronized,
    collective_checks.any_order_of_names_is_served,
    collective_checks.groups_are_reduced_by_place,
    collective_checks.compression_changes_what_is_sent_and_not_what_is_returned,
    collective_checks.gathers_take_uneven_rows_and_any_dtype,
    collective_checks.broadcasts_take_any_dtype_and_layout,
    collective_checks.alltoall_deals_out_rows_and_says_how_many_came,
    collective_checks.reducescatter_gives_first_ranks_one_row_more,
    collective_checks.gradients_are_horovods,
    collective_checks.sparse_tensors_are_added_up,
    collective_checks.objects_travel,
    collective_checks.inference_mode_does_not_get_in_the_way,
    together_checks.process_sets_work_side_by_side,
    together_checks.uneven_ranks_join,
    together_checks.barriers_wait,
    together_checks.threads_may_call,
    together_checks.mistakes_say_what_was_expected,
    together_checks.differences_between_ranks_are_named_on_every_rank,
    together_checks.it_can_be_ended_and_begun_again,
)


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, str]:
    return verdicts(3, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_three_ranks(on_three_ranks: dict[str, str], check: Check) -> None:
    assert on_three_ranks[check.__name__] == ""
