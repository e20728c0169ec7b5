"""What the proposer gives the planner: one set of templates, and the plan so far."""

from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.config import Remat, ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.planning.planner import make_templates
from oobleck_jax.planning.reconfigure import copies_of, states_of
from oobleck_jax.propose import Proposer, make_proposer


NODES = tuple(map(NodeId, range(6)))


def proposer_of(**changes) -> Proposer:
    config = replace(load_preset("gpt-laptop"), nodes=len(NODES), fault_tolerance=1)
    return make_proposer(config, plan=None, device_memory_bytes=8 * 2**30, **changes)


def moved_bytes(proposer: Proposer, after: Plan, before: Plan) -> int:
    held = {node: frozenset(before.layers_of(node)) for node in after.nodes}
    return sum(copy.num_bytes for copy in copies_of(after, held, states_of(proposer.profile)))


def test_the_plan_so_far_saves_copies() -> None:
    proposer = proposer_of()
    first = proposer.first().plan
    saved = 0
    for lost in NODES:
        alive = tuple(node for node in NODES if node != lost)
        holdings = {node: first.layers_of(node) for node in alive}
        with_it, without = (proposer.replan(alive, holdings, old).plan for old in (first, None))
        saved += moved_bytes(proposer, without, first) - moved_bytes(proposer, with_it, first)
    assert saved > 0


def test_templates_are_made_once_for_all_numbers_of_nodes() -> None:
    proposer = proposer_of(max_nodes=9)
    make_templates.cache_clear()
    for number in (6, 9, 4, 2):
        proposer.replan(tuple(map(NodeId, range(number))), {}, None)
    assert proposer.ahead
    assert make_templates.cache_info().misses == 1


def test_nodes_that_the_users_plan_leaves_out_are_spare_P3() -> None:
    config = replace(load_preset("gpt-laptop"), nodes=4, fault_tolerance=1)
    proposer = make_proposer(config, plan="0-10 | 0-10", device_memory_bytes=8 * 2**30)
    assert proposer.first().plan.spare_nodes == (2, 3)
    assert proposer.replan(NODES[:3], {}, None).plan.spare_nodes == (2,)


def test_nothing_is_compiled_ahead_for_a_run_that_ends_with_the_first_loss() -> None:
    proposer = proposer_of()
    assert replace(proposer, config=replace(proposer.config, fault_tolerance=0)).ahead == ()


def test_a_schedule_is_taken_unasked_only_where_nodes_do_not_share_cores() -> None:
    config = replace(load_preset("gpt-laptop"), nodes=4, fault_tolerance=1)
    memory_bytes = 130 * 2**20  # two nodes are needed for a pipeline
    plans = {
        shares_cores: make_proposer(
            config, plan=None, device_memory_bytes=memory_bytes, shares_cores=shares_cores
        ).first()
        for shares_cores in (False, True)
    }
    assert {pipeline.schedule for pipeline in plans[False].plan.pipelines} == {ScheduleKind.INTERLEAVED}
    assert "schedule interleaved, because it has" in plans[False].reason
    assert {pipeline.schedule for pipeline in plans[True].plan.pipelines} == {ScheduleKind.ONE_F_ONE_B}
    told = "longer, because nodes share cores"  # than is predicted
    assert told in plans[True].reason
    assert told not in plans[False].reason


def test_the_users_plan_has_the_schedule_that_is_asked_for_or_says_why_not() -> None:
    config = replace(load_preset("gpt-laptop"), nodes=2, schedule=ScheduleKind.ZB_H1, remat=Remat.NONE)
    proposer = make_proposer(config, plan="0-5,5-10", device_memory_bytes=8 * 2**30)
    assert proposer.first().plan.pipelines[0].schedule is ScheduleKind.ZB_H1
    with pytest.raises(PlanError, match=r"splits the backward pass, but --remat layer"):
        replace(proposer, config=replace(config, remat=Remat.LAYER)).first()
    with pytest.raises(PlanError, match=r"none of its pipelines is interleaved"):
        make_proposer(
            replace(config, schedule=ScheduleKind.INTERLEAVED), plan="0-5,5-10", device_memory_bytes=8 * 2**30
        )
