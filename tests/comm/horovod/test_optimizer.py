"""DistributedOptimizer trains three processes as one process on the whole batch, whatever optimizer and loop."""

from __future__ import annotations

import pytest

from tests.comm.horovod.scripts import optimizer_checks as on
from tests.comm.horovod.scripts.launch import Check, verdicts

CHECKS: tuple[Check, ...] = (
    on.every_kind_of_optimizer_does_what_it_does_on_the_whole_batch,
    on.parameters_need_no_names,
    on.classes_with_arguments_of_their_own_are_served,
    on.schedulers_drive_it_made_before_or_after,
    on.gradients_are_clipped_after_they_are_reduced,
    on.loss_scaling_works_as_in_horovods_examples,
    on.closures_are_evaluated_with_the_gradients_of_all_ranks,
    on.several_passes_are_added_up,
    on.groups_are_sent_together,
    on.ops_factors_and_compression_are_applied,
    on.unused_parameters_count_as_zeros,
    on.sparse_gradients_are_reduced_sparse_or_dense,
    on.a_second_synchronize_reduces_nothing_again,
    on.process_sets_train_apart,
    on.uneven_batches_end_in_join,
    on.mistakes_are_refused,
    on.different_models_are_named_on_every_rank,
    on.large_and_small_gradients_go_their_ways,
    on.parameters_begin_the_same,
    on.optimizer_state_is_the_roots,
    on.state_is_kept_and_loaded,
    on.batch_norm_sees_the_batches_of_all_ranks,
)


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, str]:
    return verdicts(3, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_three_ranks(on_three_ranks: dict[str, str], check: Check) -> None:
    assert on_three_ranks[check.__name__] == ""
