"""The stages compiled ahead: all that any plan after losses and joins can need, each kind of program once."""

import itertools
from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.config import Remat, ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.execution.layout import spans_of
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning.ahead import programs_of, stages_ahead
from oobleck_jax.planning.plan import NodeId, Plan, Stage
from oobleck_jax.planning.planner import plan_from, templates_for
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.templates import Templates
from oobleck_jax.propose import estimated_profile


NUM_NODES = 6


@pytest.fixture(
    scope="module",
    params=[(8.0, ScheduleKind.ONE_F_ONE_B), (0.05, ScheduleKind.ONE_F_ONE_B), (0.07, ScheduleKind.INTERLEAVED)],
    ids=["all-layers-fit", "three-nodes-at-least", "interleaved"],
)
def templates(request) -> Templates:
    config = replace(load_preset("gpt-laptop"), nodes=NUM_NODES, fault_tolerance=1, remat=Remat.LAYER)
    memory_gib, schedule = request.param
    return templates_for(
        estimated_profile(config),
        num_nodes=NUM_NODES,
        devices_per_node=1,
        num_microbatches=config.num_microbatches,
        device_memory_bytes=int(memory_gib * 2**30),
        schedule=schedule,
    )


def test_every_plan_after_losses_and_joins_finds_its_programs(templates: Templates) -> None:
    ahead = stages_ahead(templates, num_nodes=NUM_NODES, max_nodes=NUM_NODES, fault_tolerance=1)
    known = {programs_of(stage, templates.profile) for stage in ahead}
    assert len(known) == len(ahead)
    nodes = tuple(NodeId(node) for node in range(NUM_NODES))
    first = plan_from(templates, nodes=nodes, fault_tolerance=1).plan
    for alive in itertools.chain(*(itertools.combinations(nodes, count) for count in (5, 4))):
        try:
            second = reconfigure(
                templates,
                nodes=alive,
                holdings={node: first.layers_of(node) for node in alive},
                fault_tolerance=1,
                old=first,
            ).planning.plan
        except PlanError:  # too few nodes are left
            continue
        back = reconfigure(
            templates,
            nodes=nodes,
            holdings={node: second.layers_of(node) for node in alive},
            fault_tolerance=1,
            old=second,
        ).planning.plan
        if templates.schedule is ScheduleKind.INTERLEAVED:
            assert any(
                pipeline.schedule is ScheduleKind.INTERLEAVED for pipeline in (*first.pipelines, *back.pipelines)
            )
        for plan in (first, second, back):
            stages = [stage for pipeline in plan.pipelines for stage in pipeline.template.stages]
            assert {programs_of(stage, templates.profile) for stage in stages} <= known


def test_what_one_loss_needs_comes_first(templates: Templates) -> None:
    ahead = stages_ahead(templates, num_nodes=NUM_NODES, max_nodes=NUM_NODES, fault_tolerance=1)
    nodes = tuple(NodeId(node) for node in range(NUM_NODES - 1))
    try:
        plan = plan_from(templates, nodes=nodes, fault_tolerance=1).plan
    except PlanError:
        pytest.skip("one loss leaves too few nodes")
    needed = {
        programs_of(stage, templates.profile) for pipeline in plan.pipelines for stage in pipeline.template.stages
    }
    assert {programs_of(stage, templates.profile) for stage in ahead[: len(needed)]} == needed


def needed_by(plan: Plan, templates: Templates) -> set:
    return {programs_of(stage, templates.profile) for pipeline in plan.pipelines for stage in pipeline.template.stages}


def test_nodes_that_may_join_are_reckoned_with(templates: Templates) -> None:
    ahead = stages_ahead(templates, num_nodes=4, max_nodes=NUM_NODES, fault_tolerance=1)
    known = {programs_of(stage, templates.profile) for stage in ahead}
    for number in range(4, NUM_NODES + 1):
        nodes = tuple(NodeId(node) for node in range(number))
        try:
            plan = plan_from(templates, nodes=nodes, fault_tolerance=1).plan
        except PlanError:
            continue
        assert needed_by(plan, templates) <= known


def test_the_users_plan_is_reckoned_with_and_comes_after_one_loss() -> None:
    config = replace(load_preset("gpt-laptop"), nodes=3, fault_tolerance=1)
    templates = templates_for(
        estimated_profile(config),
        num_nodes=3,
        devices_per_node=1,
        num_microbatches=config.num_microbatches,
        device_memory_bytes=8 * 2**30,
    )
    given = read_plan("0-4,4-10 | 0-10", num_microbatches=config.num_microbatches)
    options = {"num_nodes": 3, "max_nodes": 3, "fault_tolerance": 1}
    without, with_it = (stages_ahead(templates, **options, given=plan) for plan in (None, given))
    assert not needed_by(given, templates) <= {programs_of(stage, templates.profile) for stage in without}
    after_loss = plan_from(templates, nodes=(NodeId(0), NodeId(1)), fault_tolerance=1).plan
    first = needed_by(after_loss, templates) | needed_by(given, templates)
    assert {programs_of(stage, templates.profile) for stage in with_it[: len(first)]} == first


def test_stages_that_seem_to_need_the_same_programs_are_cut_into_the_same_spans() -> None:
    config = load_preset("gpt-laptop")
    model, profile = config.model.build(), estimated_profile(config)
    cuts: dict = {}
    for first, end in itertools.combinations(range(len(model.layers) + 1), 2):
        stage = Stage(first_layer=first, end_layer=end)
        spans = [
            (span.kind, len(span.layers), span.end_layer == end == len(model.layers))
            for span in spans_of(model, stage.layers)
        ]
        assert cuts.setdefault(programs_of(stage, profile), spans) == spans
    assert len(cuts) < len(model.layers) * (len(model.layers) + 1) / 2  # some are alike
