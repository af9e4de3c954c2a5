"""torch's face: every collective equals gloo's on the same inputs."""

from __future__ import annotations

import pytest

from tests.comm.torch_face.torch_scripts import collective_checks as on_collectives
from tests.comm.torch_face.torch_scripts import use_checks as on_use
from tests.comm.torch_face.torch_scripts.launch import Check, verdicts

COLLECTIVES: tuple[Check, ...] = (
    on_collectives.all_reduce_gives_what_gloo_gives,
    on_collectives.all_reduce_takes_any_shape_and_strides,
    on_collectives.broadcast_gives_what_gloo_gives,
    on_collectives.all_gather_gives_what_gloo_gives,
    on_collectives.all_gather_takes_what_gloo_refuses,
    on_collectives.reduce_scatter_gives_what_gloo_gives,
    on_collectives.reduce_scatter_takes_what_gloo_refuses,
    on_collectives.reduce_gives_the_root_what_gloo_gives,
    on_collectives.float16_averages_do_not_overflow,
    on_collectives.a_factor_is_applied_before_the_sum,
    on_collectives.gather_and_scatter_give_what_gloo_gives,
    on_collectives.all_to_all_gives_what_gloo_gives,
    on_collectives.wrong_all_to_alls_are_refused_before_anything_is_sent,
    on_collectives.neighbours_send_and_receive,
)
USES: tuple[Check, ...] = (
    on_use.works_and_futures_carry_the_result,
    on_use.many_calls_in_flight_keep_their_order,
    on_use.callbacks_may_send,
    on_use.autograd_and_inference_mode_do_not_get_in_the_way,
    on_use.names_before_torch_2_13_are_served,
    on_use.functional_collectives_equal_gloos,
    on_use.coalescing_managers_are_served,
    on_use.objects_travel,
    on_use.barriers_wait,
    on_use.sub_groups_have_their_own_ranks,
    on_use.groups_split,
    on_use.meshes_have_their_groups,
    on_use.a_group_of_hybridpar_lives_beside_it,
    on_use.sparse_gradients_are_summed,
    on_use.mistakes_say_what_was_expected,
)


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, str]:
    return verdicts(3, COLLECTIVES + USES)


@pytest.mark.parametrize("check", COLLECTIVES + USES, ids=lambda check: check.__name__)
def test_on_three_ranks(on_three_ranks: dict[str, str], check: Check) -> None:
    assert on_three_ranks[check.__name__] == ""
