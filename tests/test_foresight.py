"""Plans made beforehand are the plans that would be made, and are found when a node is lost."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.elastic.terms import Proposal
from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.foresight import MAX_NODES, Foresight
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.propose import Proposer, make_proposer
from tests.elastic import plans


NODES = tuple(map(NodeId, range(4)))


class Planner:
    """Counts what it is asked."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.num_asked = 0

    def replan(self, nodes: tuple[NodeId, ...], holdings: Mapping, old: Plan | None) -> Proposal:
        self.num_asked += 1
        return self._proposer.replan(nodes, holdings, old)


@pytest.fixture
def planner() -> Planner:
    config = replace(load_preset("gpt-laptop"), nodes=len(NODES), fault_tolerance=1)
    return Planner(make_proposer(config, plan=None, device_memory_bytes=8 * 2**30))


def held(plan: Plan, nodes: tuple[NodeId, ...]) -> dict[NodeId, tuple[int, ...]]:
    return {node: plan.layers_of(node) for node in reversed(nodes)}


def test_the_plan_after_any_loss_is_there_and_equals_the_one_that_would_be_made(planner: Planner) -> None:
    foresight = Foresight(planner.replan)
    first = foresight.replan(NODES, {}, None).plan
    foresight.foresee(first)
    asked = planner.num_asked
    for lost in NODES:
        alive = tuple(node for node in NODES if node != lost)
        found = foresight.replan(alive, held(first, alive), first)
        assert planner.num_asked == asked
        assert found == planner._proposer.replan(alive, held(first, alive), first)


def test_anything_else_is_planned_when_it_happens(planner: Planner) -> None:
    foresight = Foresight(planner.replan)
    first = foresight.replan(NODES, {}, None).plan
    foresight.foresee(first)
    asked = planner.num_asked
    two, three = NODES[2:], NODES[1:]
    for nodes, holdings, old in (
        (two, held(first, two), first),
        (three, held(first, two), first),
        (three, held(first, three), None),
    ):
        assert foresight.replan(nodes, holdings, old) == planner._proposer.replan(nodes, holdings, old)
    assert planner.num_asked == asked + 3


def test_there_need_not_be_a_plan_and_for_many_nodes_there_is_none() -> None:
    asked: list[int] = []

    def replan(nodes: tuple[NodeId, ...], holdings: Mapping, old: Plan | None) -> Proposal:
        asked.append(len(nodes))
        return plans.replan(nodes, holdings)

    foresight = Foresight(replan)
    foresight.foresee(plans.plan_of((0, 1)))
    assert asked == [1, 1]
    with pytest.raises(NotEnoughNodes):
        foresight.replan((NodeId(0),), {NodeId(0): (0, 1)}, plans.plan_of((0, 1)))
    asked.clear()
    foresight.foresee(plans.plan_of((0, 1), spare=tuple(range(2, MAX_NODES + 1))))
    assert asked == []
