"""DistributedOptimizer trains three processes as one process on the whole batch, whatever optimizer and loop."""

from __future__ import annotations

import pytest

from tests.comm.horovod.scripts import gradient_checks, optimizer_checks, state_checks
from tests.comm.horovod.scripts.launch import Check, verdicts

CHECKS: tuple[Check, ...] = (
    optimizer_checks.every_kind_of_optimizer_does_what_it_does_on_the_whole_batch,
    optimizer_checks.parameters_need_no_names,
    optimizer_checks.classes_with_arguments_of_their_own_are_served,
    optimizer_checks.schedulers_drive_it_made_before_or_after,
    optimizer_checks.gradients_are_clipped_after_they_are_reduced,
    optimizer_checks.loss_scaling_works_as_in_horovods_examples,
    optimizer_checks.closures_are_evaluated_with_the_gradients_of_all_ranks,
    optimizer_checks.several_passes_are_added_up,
    optimizer_checks.groups_are_sent_together,
    optimizer_checks.ops_factors_and_compression_are_applied,
    gradient_checks.unused_parameters_count_as_zeros,
    gradient_checks.gradients_that_share_memory_with_a_running_backward_are_right,
    gradient_checks.gradients_that_share_memory_with_each_other_are_right,
    gradient_checks.parameters_that_come_later_are_reduced,
    gradient_checks.compressors_of_ones_own_are_served,
    gradient_checks.gradients_may_have_another_dtype_than_their_parameters,
    gradient_checks.all_is_waited_for_before_a_failure_is_raised,
    gradient_checks.sparse_gradients_are_reduced_sparse_or_dense,
    optimizer_checks.a_second_synchronize_reduces_nothing_again,
    optimizer_checks.process_sets_train_apart,
    optimizer_checks.uneven_batches_end_in_join,
    optimizer_checks.mistakes_are_refused,
    optimizer_checks.different_models_are_named_on_every_rank,
    optimizer_checks.large_and_small_gradients_go_their_ways,
    state_checks.parameters_begin_the_same,
    state_checks.optimizer_state_is_the_roots,
    state_checks.state_is_kept_and_loaded,
    state_checks.batch_norm_sees_the_batches_of_all_ranks,
)


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, str]:
    return verdicts(3, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_three_ranks(on_three_ranks: dict[str, str], check: Check) -> None:
    assert on_three_ranks[check.__name__] == ""
