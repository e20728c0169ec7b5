"""The stages compiled ahead: all that any plan after losses and joins can need, each kind of program once."""

import itertools
from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.ahead import programs_of, stages_ahead
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.planner import plan_from, templates_for
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.templates import Templates
from oobleck_jax.propose import estimated_profile


NUM_NODES = 6


@pytest.fixture(scope="module", params=[8.0, 0.05], ids=["all-layers-fit", "three-nodes-at-least"])
def templates(request) -> Templates:
    config = replace(load_preset("gpt-laptop"), nodes=NUM_NODES, fault_tolerance=1)
    return templates_for(
        estimated_profile(config),
        num_nodes=NUM_NODES,
        devices_per_node=1,
        num_microbatches=config.num_microbatches,
        device_memory_bytes=int(request.param * 2**30),
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
