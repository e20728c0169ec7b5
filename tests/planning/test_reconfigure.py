from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, check_plan
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.profile import Profile, Rate, StateBytes, TiedGroup
from oobleck_jax.planning.reconfigure import Reconfiguration, reconfigure
from oobleck_jax.planning.templates import Templates, make_templates, template_of
from tests.planning.profiles import UNIT_S, make_layer, make_profile, profiles, uniform_profile


def nodes_of(*numbers: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(number) for number in numbers)


def templates_of(profile: Profile, *, memory: int, max_nodes: int = 16, num_microbatches: int = 24) -> Templates:
    return make_templates(
        profile,
        max_nodes=max_nodes,
        devices_per_node=1,
        num_microbatches=num_microbatches,
        device_memory_bytes=memory,
    )


def lose(templates: Templates, plan: Plan, *lost: int, fault_tolerance: int, horizon_s: float = 1.0) -> Reconfiguration:
    alive = tuple(node for node in plan.nodes if node not in lost)
    holdings = {node: plan.layers_of(node) for node in plan.nodes}
    return reconfigure(
        templates,
        nodes=alive,
        holdings=holdings,
        fault_tolerance=fault_tolerance,
        old=plan,
        horizon_s=horizon_s,
    )


def check_copies(after: Reconfiguration, before: dict[NodeId, set[int]], alive: tuple[NodeId, ...]) -> None:
    """Check P8: each missing layer that somebody has is copied once, from a live holder, and nothing else is."""
    plan = after.planning.plan
    held = set().union(*(before.get(node, set()) for node in alive))
    expected = Counter(
        (node, layer)
        for node in alive
        for layer in set(plan.layers_of(node)) - before.get(node, set())
        if layer in held
    )
    own = [copy for copy in after.copies if len(copy.layers) == 1]
    assert Counter((copy.destination, copy.layers[0]) for copy in own) == expected
    for copy in after.copies:
        assert copy.source in alive
        assert copy.source != copy.destination
        assert before[copy.source] & set(copy.layers)


# The published table: pipelines [0,1] [2-4] [5-8] [9-13], smallest template 2 nodes, and what is lost.
CASES = {
    "base 1": (2,),
    "base 2": (6, 8),
    "base 3": (10, 11),
    "borrow 1": (1,),
    "borrow 2": (1, 3, 4),
    "borrow 3": (2, 4, 6, 7, 8),
    "merge 1": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
    "merge 2": (1, 2, 3, 5, 6, 7, 9, 11, 12, 13),
    "merge 3": (1, 2, 3, 5, 6, 7, 9, 10, 11),
}


def published_plan(templates: Templates) -> Plan:
    groups = ((0, 1), (2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13))
    return Plan(
        pipelines=tuple(
            Pipeline(template=template_of(templates.choices[len(group)][0]), nodes=nodes_of(*group), num_microbatches=6)
            for group in groups
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_published_cases_keep_every_node_at_work_and_every_layer_covered_P3_P4_P5_P8(name: str) -> None:
    templates = templates_of(uniform_profile(20, state_bytes=1), memory=40)
    assert templates.smallest == 2
    plan, lost = published_plan(templates), CASES[name]
    alive = tuple(node for node in plan.nodes if node not in lost)
    num_pipelines = min(4, len(alive) // 2)
    after = lose(templates, plan, *lost, fault_tolerance=3)
    new = after.planning.plan
    check_plan(new, num_layers=20, num_microbatches=24)
    assert new.nodes == alive
    assert not new.spare_nodes
    assert len(new.pipelines) >= num_pipelines
    assert after.planning.is_degraded == (len(alive) < 8)
    check_copies(after, {node: set(plan.layers_of(node)) for node in plan.nodes}, alive)


def test_pipelines_without_losses_stay_when_time_is_short() -> None:
    profile = uniform_profile(20, state_bytes=1, link=Rate(bytes_per_s=1.0, latency_s=0.0))
    templates = templates_of(profile, memory=40)
    after = lose(templates, published_plan(templates), 10, 11, fault_tolerance=3, horizon_s=10.0)
    assert {copy.destination for copy in after.copies} == set(nodes_of(9, 12, 13))


def test_the_longer_a_plan_lasts_the_more_bytes_are_worth_moving() -> None:
    profile = uniform_profile(24, state_bytes=1, link=Rate(bytes_per_s=1 / UNIT_S, latency_s=0.0))
    templates = templates_of(profile, memory=1000, num_microbatches=8)
    slow = template_of(templates.choices[3][0])
    plan = Plan(pipelines=(Pipeline(template=slow, nodes=nodes_of(0, 1, 2), num_microbatches=8),))
    short = lose(templates, plan, fault_tolerance=0, horizon_s=10 * UNIT_S)
    long = lose(templates, plan, fault_tolerance=0, horizon_s=1e6 * UNIT_S)
    assert (short.num_bytes, short.planning.plan) == (0, plan)
    assert long.num_bytes > 0
    assert long.planning.step_s < short.planning.step_s


def test_nothing_changes_and_nothing_moves_when_nobody_was_lost() -> None:
    templates = templates_of(uniform_profile(20, state_bytes=1), memory=40)
    plan = plan_from(templates, nodes=nodes_of(*range(10)), fault_tolerance=1).plan
    after = lose(templates, plan, fault_tolerance=1)
    assert after.planning.plan == plan
    assert after.copies == ()
    assert after.copy_s == 0


def test_nodes_take_the_places_where_they_miss_least() -> None:
    templates = templates_of(uniform_profile(8, state_bytes=1), memory=8)
    holdings = {NodeId(0): (6, 7), NodeId(1): (0, 1), NodeId(2): (4, 5), NodeId(3): (2, 3)}
    after = reconfigure(templates, nodes=nodes_of(0, 1, 2, 3), holdings=holdings, fault_tolerance=0)
    assert after.planning.plan.pipelines[0].nodes == nodes_of(1, 3, 2, 0)
    assert after.copies == ()


def test_sources_share_the_load() -> None:
    templates = templates_of(uniform_profile(8, state_bytes=1), memory=32, num_microbatches=12)
    all_layers = tuple(range(8))
    holdings = {NodeId(node): all_layers for node in range(4)}
    after = reconfigure(templates, nodes=nodes_of(*range(6)), holdings=holdings, fault_tolerance=5)
    sent = Counter(copy.source for copy in after.copies)
    assert sum(sent.values()) == 16
    assert set(sent.values()) == {4}


def test_tied_group_is_copied_once_to_a_node_that_held_neither_owner() -> None:
    owner = make_layer([(1, 2)], kind="owner", state_bytes=1)
    block = make_layer([(1, 2)], state_bytes=1)
    state = StateBytes(parameter_bytes=10, gradient_bytes=10, optimizer_bytes=20)
    group = TiedGroup(name="wte", layers=(0, 3), state=state)
    profile = make_profile([owner, block, block, owner], tied_groups=(group,))
    templates = templates_of(profile, memory=1000, num_microbatches=2)
    holdings = {NodeId(0): (0, 1, 2, 3)}
    after = reconfigure(templates, nodes=nodes_of(0, 1), holdings=holdings, fault_tolerance=1)
    assert [copy.layers for copy in after.copies if len(copy.layers) > 1] == [(0, 3)]
    assert sorted(copy.layers for copy in after.copies) == [(0,), (0, 3), (1,), (2,), (3,)]


@given(profiles(min_layers=2, max_layers=8), st.integers(2, 9), st.integers(0, 2), st.integers(20, 400), st.data())
@settings(max_examples=60)
def test_any_change_of_membership_gives_a_valid_plan_and_exact_copies_P1_P2_P3_P4_P5_P8(
    profile: Profile, num_nodes: int, fault_tolerance: int, memory: int, data: st.DataObject
) -> None:
    templates = templates_of(profile, memory=memory, max_nodes=8, num_microbatches=6)
    start = nodes_of(*range(num_nodes))
    alive = data.draw(
        st.lists(st.integers(0, num_nodes + 3), unique=True, min_size=1).map(sorted).map(lambda x: nodes_of(*x))
    )
    if templates.smallest is None or templates.smallest > min(num_nodes, len(alive)):
        return
    plan = plan_from(templates, nodes=start, fault_tolerance=fault_tolerance).plan
    holdings = {node: plan.layers_of(node) for node in start}
    after = reconfigure(templates, nodes=alive, holdings=holdings, fault_tolerance=fault_tolerance, old=plan)
    new = after.planning.plan
    check_plan(new, num_layers=profile.num_layers, num_microbatches=6)
    assert new.nodes == alive
    assert len(new.pipelines) >= min(fault_tolerance + 1, len(alive) // templates.smallest)
    assert max(stage.memory_bytes for stages in after.planning.stages for stage in stages) <= memory
    check_copies(after, {node: set(layers) for node, layers in holdings.items()}, alive)


def test_too_few_survivors_are_an_error_with_numbers() -> None:
    templates = templates_of(uniform_profile(8, state_bytes=1), memory=8)
    plan = plan_from(templates, nodes=nodes_of(0, 1, 2, 3, 4), fault_tolerance=0).plan
    with pytest.raises(NotEnoughNodes, match=r"3 nodes .* smallest pipeline needs 4; add 1 node"):
        lose(templates, plan, 0, 1, fault_tolerance=0)
