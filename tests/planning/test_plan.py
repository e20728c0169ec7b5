"""What is wrong with a plan of one's own is named, whatever it is; plans in JSON can be anything."""

from dataclasses import replace

import pytest

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Plan, Template, check_plan
from tests.elastic.plans import NUM_LAYERS, NUM_MICROBATCHES, plan_of


PLAN = plan_of((0, 1), (2, 3))
FIRST, SECOND = PLAN.pipelines
ON_ONE_DEVICE = replace(
    FIRST,
    template=replace(FIRST.template, stages=tuple(replace(stage, node_index=0) for stage in FIRST.template.stages)),
    nodes=(NodeId(0),),
)


def with_last_stage(**changes: int) -> Plan:
    first, second = FIRST.template.stages
    template = replace(FIRST.template, stages=(first, replace(second, **changes)))  # pyright: ignore[reportArgumentType]
    return replace(PLAN, pipelines=(replace(FIRST, template=template), SECOND))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(pipelines=()), "the plan has no pipeline; give at least one"),
        (replace(PLAN, pipelines=(replace(FIRST, template=Template(stages=())), SECOND)), "pipeline 0 has no stage"),
        (replace(PLAN, pipelines=(FIRST, replace(SECOND, nodes=FIRST.nodes))), "node 0 is used more than once"),
        (
            replace(PLAN, pipelines=(FIRST, replace(SECOND, nodes=(NodeId(2),)))),
            "bound to 1 nodes, its template needs 2",
        ),
        (
            replace(PLAN, pipelines=(FIRST, replace(SECOND, num_microbatches=0))),
            "has 0 microbatches; each needs at least 1",
        ),
        (
            Plan(pipelines=(FIRST,)),
            "the global batch has .*; change num_microbatches of the pipelines so that they add up",
        ),
        (
            replace(PLAN, pipelines=(FIRST, replace(SECOND, schedule=ScheduleKind.AUTO))),
            "1 has schedule auto, which is not one",
        ),
        (
            with_last_stage(first_layer=3),
            r"stage 1 has layers .* but must begin at layer . and hold at least one \(end_layer is exclusive\)",
        ),
        (with_last_stage(num_devices=2), r"stage 1 uses devices 0\.\.1 of a node that has 1"),
        (
            replace(PLAN, pipelines=(ON_ONE_DEVICE, SECOND)),
            "device 0 of its node 0 in two stages; give each its own",
        ),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, num_layers=NUM_LAYERS, num_microbatches=NUM_MICROBATCHES)


def test_node_indices_have_no_gap() -> None:
    first, second = FIRST.template.stages
    stages = (first, replace(second, node_index=first.node_index + 2))
    template = replace(FIRST.template, stages=stages)
    plan = replace(PLAN, pipelines=(replace(FIRST, template=template, nodes=(NodeId(0), NodeId(1), NodeId(4))), SECOND))
    with pytest.raises(PlanError, match=r"must use the node indices 0\.\.2, each at least once"):
        check_plan(plan, num_layers=NUM_LAYERS, num_microbatches=NUM_MICROBATCHES)
