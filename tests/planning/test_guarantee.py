"""P5 and P7, exhaustively for small clusters."""

import itertools

import pytest

from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.guarantee import template_bounds, uses_all_nodes
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.profile import Rate
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.templates import Templates, make_templates
from tests.planning.profiles import UNIT_S, uniform_profile


NUM_MICROBATCHES = 12


def templates_with(smallest: int) -> Templates:
    """Return templates of a model whose smallest pipeline has so many nodes: each holds two of its layers.

    Sums are so slow that without the guarantee one pipeline would be best.
    """
    profile = uniform_profile(2 * smallest, state_bytes=1, sum=Rate(bytes_per_s=0.02 / UNIT_S, latency_s=0.0))
    return make_templates(
        profile, max_nodes=30, devices_per_node=1, num_microbatches=NUM_MICROBATCHES, device_memory_bytes=8
    )


@pytest.mark.parametrize("smallest", range(1, 7))
@pytest.mark.parametrize("fault_tolerance", range(4))
def test_enough_templates_use_every_number_of_nodes_P5(smallest: int, fault_tolerance: int) -> None:
    bounds = template_bounds(smallest, fault_tolerance)
    assert bounds.enough <= bounds.in_paper
    for num_nodes in range((fault_tolerance + 1) * smallest, 31):
        sizes = range(smallest, smallest + bounds.enough)
        assert uses_all_nodes(sizes, num_nodes, fault_tolerance + 1)


@pytest.mark.parametrize("smallest", range(2, 7))
@pytest.mark.parametrize("fault_tolerance", range(4))
def test_one_template_less_leaves_a_gap_P5(smallest: int, fault_tolerance: int) -> None:
    sizes = range(smallest, smallest + template_bounds(smallest, fault_tolerance).enough - 1)
    counts = range((fault_tolerance + 1) * smallest, 61)
    assert not all(uses_all_nodes(sizes, num_nodes, fault_tolerance + 1) for num_nodes in counts)


@pytest.mark.parametrize("smallest", range(1, 7))
def test_every_number_of_nodes_has_a_plan_with_enough_pipelines_P3_P5(smallest: int) -> None:
    templates = templates_with(smallest)
    assert templates.smallest == smallest
    for fault_tolerance, num_nodes in itertools.product(range(4), range(smallest, 31)):
        nodes = tuple(NodeId(node) for node in range(num_nodes))
        planning = plan_from(templates, nodes=nodes, fault_tolerance=fault_tolerance)
        assert planning.plan.nodes == nodes
        if num_nodes >= (fault_tolerance + 1) * smallest:
            assert planning.num_replicas >= fault_tolerance + 1
        else:
            assert planning.is_degraded
            assert planning.num_replicas >= num_nodes // smallest
            assert f"{fault_tolerance + 1} pipelines need {(fault_tolerance + 1) * smallest} nodes" in planning.reason


@pytest.mark.parametrize("smallest", range(1, 7))
def test_too_few_nodes_say_how_many_are_missing(smallest: int) -> None:
    templates = templates_with(smallest)
    for num_nodes in range(smallest):
        with pytest.raises(NotEnoughNodes, match=f"smallest pipeline needs {smallest}") as caught:
            plan_from(templates, nodes=tuple(NodeId(n) for n in range(num_nodes)), fault_tolerance=0)
        assert (caught.value.num_nodes, caught.value.num_needed) == (num_nodes, smallest)


@pytest.mark.parametrize("smallest", range(1, 7))
@pytest.mark.parametrize("fault_tolerance", range(4))
def test_any_losses_up_to_f_leave_every_layer_a_holder_P7(smallest: int, fault_tolerance: int) -> None:
    templates = templates_with(smallest)
    for num_nodes in range((fault_tolerance + 1) * smallest, 31):
        nodes = tuple(NodeId(node) for node in range(num_nodes))
        plan = plan_from(templates, nodes=nodes, fault_tolerance=fault_tolerance).plan
        holders = {sum(1 << node for node in plan.holders_of(layer)) for layer in range(plan.num_layers)}
        for lost in itertools.combinations(nodes, fault_tolerance):
            lost_mask = sum(1 << node for node in lost)
            assert all(mask & ~lost_mask for mask in holders)


@pytest.mark.parametrize(("smallest", "fault_tolerance"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_losses_in_any_order_leave_a_plan_and_something_to_copy_from_P7_P8(smallest: int, fault_tolerance: int) -> None:
    templates = templates_with(smallest)
    num_nodes = (fault_tolerance + 1) * smallest + 1
    start = tuple(NodeId(node) for node in range(num_nodes))
    for order in itertools.islice(itertools.permutations(start, fault_tolerance), 0, None, 17):
        nodes, plan = start, plan_from(templates, nodes=start, fault_tolerance=fault_tolerance).plan
        for lost in order:
            holdings = {node: plan.layers_of(node) for node in nodes}
            nodes = tuple(node for node in nodes if node != lost)
            after = reconfigure(templates, nodes=nodes, holdings=holdings, fault_tolerance=fault_tolerance, old=plan)
            plan = after.planning.plan
            assert plan.nodes == nodes
            for node in nodes:
                got = {layer for copy in after.copies if copy.destination == node for layer in copy.layers}
                assert got == set(plan.layers_of(node)) - set(holdings[node])
            assert all(copy.source in nodes and copy.layers[0] in holdings[copy.source] for copy in after.copies)
