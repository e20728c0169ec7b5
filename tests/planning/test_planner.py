import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from oobleck_jax.config import Remat
from oobleck_jax.errors import NotEnoughNodes, PlanError
from oobleck_jax.planning.costs import tabulate
from oobleck_jax.planning.estimate import estimate_profile, gpt_sizes
from oobleck_jax.planning.plan import NodeId, Pipeline, check_plan
from oobleck_jax.planning.planner import Planning, best_plan
from oobleck_jax.planning.profile import Profile, Rate
from tests.planning.profiles import UNIT_S, make_layer, make_profile, profiles, uniform_profile


def plan_for(
    profile: Profile,
    num_nodes: int,
    *,
    fault_tolerance: int = 0,
    num_microbatches: int = 8,
    memory: int = 10**9,
    devices_per_node: int = 1,
) -> Planning:
    return best_plan(
        profile,
        nodes=tuple(NodeId(node) for node in range(num_nodes)),
        devices_per_node=devices_per_node,
        fault_tolerance=fault_tolerance,
        num_microbatches=num_microbatches,
        device_memory_bytes=memory,
    )


@given(
    profiles(max_layers=8, num_counts=3),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(0, 2),
    st.integers(3, 10),
    st.integers(20, 400),
)
@settings(max_examples=60)
def test_every_plan_is_valid_fits_memory_and_has_enough_pipelines_P1_P2_P3_P4_P5(
    profile: Profile, num_nodes: int, devices_per_node: int, fault_tolerance: int, num_microbatches: int, memory: int
) -> None:
    try:
        planning = plan_for(
            profile,
            num_nodes,
            devices_per_node=devices_per_node,
            fault_tolerance=fault_tolerance,
            num_microbatches=num_microbatches,
            memory=memory,
        )
    except PlanError:
        return
    plan = planning.plan
    check_plan(
        plan,
        num_layers=profile.num_layers,
        num_microbatches=num_microbatches,
        devices_per_node=devices_per_node,
    )
    assert plan.nodes == tuple(range(num_nodes))
    assert max(stage.memory_bytes for stages in planning.stages for stage in stages) <= memory
    assert planning.is_degraded == (planning.num_replicas < fault_tolerance + 1)
    for pipeline, stages in zip(plan.pipelines, planning.stages, strict=True):
        expected = [stage_memory(profile, pipeline, index) for index in range(len(stages))]
        assert [stage.memory_bytes for stage in stages] == expected


@pytest.mark.parametrize(("num_nodes", "there"), [(1, "there is 1"), (2, "there are 2")])
def test_a_degraded_plan_says_how_many_nodes_there_are(num_nodes: int, there: str) -> None:
    reason = plan_for(uniform_profile(4), num_nodes, fault_tolerance=2).reason
    assert reason.endswith(f"; degraded: 3 pipelines need 3 nodes (1 each), {there}")


def stage_memory(profile: Profile, pipeline: Pipeline, index: int) -> int:
    """Add up what a stage keeps on each device, straight from the definition."""
    stages = pipeline.template.stages
    stage = stages[index]
    layers = [profile.layers[layer] for layer in stage.layers]
    groups = [group.state for group in profile.tied_groups if set(group.layers) & set(stage.layers)]
    state_bytes = sum(state.total_bytes for state in [*(layer.state for layer in layers), *groups])
    costs = [cost for layer in layers if (cost := layer.cost_on(stage.num_devices))]
    in_flight = min(len(stages) - index, pipeline.num_microbatches)
    residual_bytes = in_flight * sum(cost.residual_bytes for cost in costs)
    temporary_bytes = max(cost.temporary_bytes for cost in costs)
    outputs = [-(-layer.output_bytes // stage.num_devices) for layer in profile.layers]
    *within, after = outputs[stage.first_layer : stage.end_layer]
    first_cost = profile.layers[0].cost_on(stage.num_devices)
    assert first_cost is not None
    tokens = min(first_cost.residual_bytes, outputs[0])
    before = outputs[stage.first_layer - 1] if stage.first_layer else tokens
    after = after if stage.end_layer < profile.num_layers else tokens
    passing_bytes = 2 * (before + after) + max(before, after) + 2 * max(within, default=0)
    return -(-state_bytes // stage.num_devices) + residual_bytes + temporary_bytes + passing_bytes


PLAN = """
import sys
import msgspec
from oobleck_jax.config import Remat
from oobleck_jax.planning.estimate import estimate_profile, gpt_sizes
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.templates import make_templates
sizes = gpt_sizes(num_blocks=22, width=512, num_heads=8, vocab_size=5000, sequence_length=256, remat=Remat.DOTS)
profile = estimate_profile(sizes, microbatch_size=2, devices_per_node=2)
templates = make_templates(
    profile, max_nodes=16, devices_per_node=2, num_microbatches=32, device_memory_bytes=300 * 2**20
)
nodes = tuple(NodeId(node) for node in range(13))
result = plan_from(templates, nodes=nodes, fault_tolerance=1)
"""
RECONFIGURE = """
from oobleck_jax.planning.reconfigure import reconfigure
plan = result.plan
holdings = {node: plan.layers_of(node) for node in set(nodes)}
result = reconfigure(templates, nodes=nodes[2:], holdings=holdings, fault_tolerance=1, old=plan)
assert result.copies
"""
PRINT = """
assert "jax" not in sys.modules
print(msgspec.json.encode(result).decode())
"""


def outputs_of(script: str, seeds: range) -> set[str]:
    """Run a script in one process for each hash seed; return what they print."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert all(child.returncode == 0 for child in children)
    return outputs


def test_plans_are_the_same_to_the_byte_in_every_process_P6() -> None:
    outputs = [outputs_of(PLAN + PRINT, range(first, first + 4)) for first in range(0, 20, 4)]
    assert len(set[str]().union(*outputs)) == 1


def test_reconfigurations_are_the_same_to_the_byte_in_every_process_P6() -> None:
    assert len(outputs_of(PLAN + RECONFIGURE + PRINT, range(4))) == 1


def test_nodes_that_would_only_add_links_stay_spare() -> None:
    profile = make_profile([make_layer([(1, 2)], output_bytes=1)] * 12, link=Rate(bytes_per_s=1 / UNIT_S, latency_s=0))
    few = plan_for(profile, 4, num_microbatches=1)
    assert [len(pipeline.nodes) for pipeline in few.plan.pipelines] == [1]
    assert "3 nodes spare" in few.reason
    many = plan_for(profile, 4, num_microbatches=4)
    assert [len(pipeline.nodes) for pipeline in many.plan.pipelines] == [1, 1, 1, 1]


def test_slow_sums_favour_fewer_and_deeper_pipelines() -> None:
    fast = uniform_profile(12, state_bytes=10)
    slow = uniform_profile(12, state_bytes=10, sum=Rate(bytes_per_s=1 / UNIT_S, latency_s=0.0))
    assert len(plan_for(fast, 4, num_microbatches=16).plan.pipelines) == 4
    assert len(plan_for(slow, 4, num_microbatches=16).plan.pipelines) < 4


def test_tied_parameters_count_once_where_one_stage_has_both_owners() -> None:
    sizes = gpt_sizes(num_blocks=1, width=8, num_heads=1, vocab_size=1000, sequence_length=4, remat=Remat.LAYER)
    profile = estimate_profile(sizes, microbatch_size=1)
    tied_bytes = profile.tied_groups[0].state.total_bytes
    stage = plan_for(profile, 1).stages[0][0]
    assert tied_bytes < stage.memory_bytes < 2 * tied_bytes


def test_too_few_nodes_name_the_number_that_would_do() -> None:
    with pytest.raises(NotEnoughNodes, match=r"2 nodes .* smallest pipeline needs 3; add 1 node") as caught:
        plan_for(uniform_profile(12, state_bytes=1), 2, memory=16)
    assert (caught.value.num_nodes, caught.value.num_needed) == (2, 3)


def test_layer_that_fits_nowhere_is_named() -> None:
    layers = [make_layer([(1, 2)], kind="small"), make_layer([(1, 2)], kind="huge", state_bytes=100)]
    with pytest.raises(PlanError, match=r"layer 1 \(huge\) alone needs .* raise --devices-per-node"):
        plan_for(make_profile(layers), 2, memory=100)


def test_residuals_that_fit_nowhere_are_named() -> None:
    with pytest.raises(PlanError, match="residuals of the microbatches in flight"):
        plan_for(uniform_profile(2, residual_bytes=100, state_bytes=25), 2, memory=299)


def test_fewer_microbatches_than_pipelines_are_refused() -> None:
    with pytest.raises(PlanError, match="2 microbatches cannot feed 3 pipelines"):
        plan_for(uniform_profile(4), 4, fault_tolerance=2, num_microbatches=2)


def test_missing_device_count_is_refused() -> None:
    profile = make_profile([make_layer([(1, 1)]), make_layer([(1, 1)])])
    assert plan_for(profile, 2, devices_per_node=4).plan.pipelines[0].template.stages[0].num_devices == 1


def test_devices_that_cannot_share_a_microbatch_have_it_whole() -> None:
    def passing_bytes(profile: Profile, devices: int) -> int:
        costs = tabulate(profile, devices_per_node=2, device_memory_bytes=10**6, num_microbatches=4)
        return int(costs.passing_bytes[devices.bit_length() - 1, 1, 2])  # of the middle layer

    profile = make_profile([make_layer([(1, 2), (1, 1)], output_bytes=100)] * 3)
    whole = passing_bytes(profile, 1)
    assert passing_bytes(profile, 2) == whole // 2
    assert passing_bytes(replace(profile, microbatch_size=3), 2) == whole
    assert passing_bytes(replace(profile, tensor_parallel=True), 2) == whole
