"""The choice of schedules: by predicted time, with a margin, within memory."""

from dataclasses import replace

import pytest

from oobleck_jax.config import ScheduleKind
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning.plan import NodeId, Plan, check_plan
from oobleck_jax.planning.planner import Planning, plan_from, templates_for
from oobleck_jax.planning.profile import Profile, Rate
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.schedule_choice import choose_schedules
from oobleck_jax.planning.templates import Templates
from tests.planning.profiles import UNIT_S, uniform_profile


NODES = tuple(NodeId(node) for node in range(4))
PROFILE = uniform_profile(16, state_bytes=10, residual_bytes=10)
# A stage of four layers has 160 bytes of state, and keeps 40 of each of up to 4 microbatches. Interleaved, devices keep
# those of up to 11 stages of two layers, or 19 of one. So memory decides on how many nodes a pipeline is, and how.
MEMORY_OF_FOUR_NODES, MEMORY_OF_TWO_NODES = 400, 550


def templates_of(
    schedule: ScheduleKind,
    *,
    profile: Profile = PROFILE,
    num_microbatches: int = 8,
    memory: int = MEMORY_OF_FOUR_NODES,
) -> Templates:
    return templates_for(
        profile,
        num_nodes=len(NODES),
        devices_per_node=1,
        num_microbatches=num_microbatches,
        device_memory_bytes=memory,
        schedule=schedule,
    )


def plan_for(schedule: ScheduleKind, *, fault_tolerance: int = 0, **changes) -> Planning:
    return plan_from(templates_of(schedule, **changes), nodes=NODES, fault_tolerance=fault_tolerance)


def kinds_of(plan: Plan) -> set[ScheduleKind]:
    return {pipeline.schedule for pipeline in plan.pipelines}


def test_the_fastest_is_taken_and_the_reason_says_by_how_much() -> None:
    plain = plan_for(ScheduleKind.ONE_F_ONE_B)
    chosen = plan_for(ScheduleKind.AUTO)
    assert kinds_of(plain.plan) == {ScheduleKind.ONE_F_ONE_B}
    assert kinds_of(chosen.plan) == {ScheduleKind.INTERLEAVED}
    check_plan(chosen.plan, num_layers=16, num_microbatches=8)
    assert chosen.plan.pipelines[0].nodes == plain.plan.pipelines[0].nodes
    # Four lanes of four layers, four stages each: the bubble is a quarter of what it was.
    assert chosen.forecast.compute_s == pytest.approx((8 + 3 / 4) * 12 * UNIT_S)
    assert plain.forecast.compute_s == pytest.approx((8 + 3) * 12 * UNIT_S)
    gain = 1 - chosen.step_s / plain.step_s
    assert f"schedule interleaved, because it has {gain:.1%} less time per step predicted than 1f1b" in chosen.reason
    assert "schedule" not in plain.reason


def test_a_small_gain_is_not_worth_it_unless_asked_for() -> None:
    slow_link = replace(PROFILE, layers=tuple(replace(layer, output_bytes=1) for layer in PROFILE.layers))
    slow_link = replace(slow_link, link=Rate(bytes_per_s=0.05 / UNIT_S, latency_s=0.0))
    kept = plan_for(ScheduleKind.AUTO, profile=slow_link)
    assert kinds_of(kept.plan) == {ScheduleKind.ONE_F_ONE_B}
    assert "schedule 1f1b, because" in kept.reason
    asked = plan_for(ScheduleKind.INTERLEAVED, profile=slow_link)
    assert kinds_of(asked.plan) == {ScheduleKind.INTERLEAVED}
    assert "as asked for" in asked.reason


def test_a_pipeline_that_nobody_waits_for_gains_nothing() -> None:
    plan = read_plan("0-4,4-8,8-12,12-16:4 | 0-16:76", num_microbatches=80)
    chosen = choose_schedules(plan, templates_of(ScheduleKind.AUTO, num_microbatches=80, memory=10_000))
    assert chosen.plan == plan
    assert chosen.reason == "schedule 1f1b, because no other is faster and fits"


def test_many_microbatches_leave_no_bubble_to_gain() -> None:
    planning = plan_for(ScheduleKind.AUTO, num_microbatches=80)
    assert kinds_of(planning.plan) == {ScheduleKind.ONE_F_ONE_B}


def test_what_does_not_fit_memory_is_not_taken_P2() -> None:
    planning = plan_for(ScheduleKind.INTERLEAVED, memory=330)
    assert kinds_of(planning.plan) == {ScheduleKind.ONE_F_ONE_B}
    assert "because no other is faster and fits" in planning.reason
    roomy = plan_for(ScheduleKind.INTERLEAVED, memory=360)
    assert kinds_of(roomy.plan) == {ScheduleKind.INTERLEAVED}
    assert max(stage.memory_bytes for stage in roomy.stages[0]) == 350


def test_a_pipeline_of_one_stage_has_nothing_to_choose() -> None:
    planning = plan_from(templates_of(ScheduleKind.INTERLEAVED, memory=10**6), nodes=NODES[:1], fault_tolerance=0)
    assert kinds_of(planning.plan) == {ScheduleKind.ONE_F_ONE_B}
    assert "schedule" not in planning.reason


def test_a_loss_keeps_the_pipelines_that_lost_nobody_P7_P8() -> None:
    slow_copies = replace(PROFILE, link=Rate(bytes_per_s=0.1 / UNIT_S, latency_s=0.0))
    templates = templates_of(ScheduleKind.INTERLEAVED, profile=slow_copies, memory=MEMORY_OF_TWO_NODES)
    first = plan_from(templates, nodes=NODES, fault_tolerance=1).plan
    assert kinds_of(first) == {ScheduleKind.INTERLEAVED}
    assert [len(pipeline.nodes) for pipeline in first.pipelines] == [2, 2]
    lost = first.pipelines[1].nodes[0]
    alive = tuple(node for node in NODES if node != lost)
    found = reconfigure(
        templates,
        nodes=alive,
        holdings={node: first.layers_of(node) for node in alive},
        fault_tolerance=1,
        old=first,
        horizon_s=1e-3,  # hardly any time: what moves least is best
    )
    kept = [replace(pipeline, num_microbatches=4) for pipeline in found.planning.plan.pipelines]
    assert first.pipelines[0] in kept
    check_plan(found.planning.plan, num_layers=16, num_microbatches=8)
