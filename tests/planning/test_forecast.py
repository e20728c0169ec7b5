from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oobleck_jax.planning.costs import tabulate
from oobleck_jax.planning.forecast import StageTimes, forecast_plan, stage_ends_ns
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template
from oobleck_jax.planning.profile import Profile, Rate
from oobleck_jax.planning.schedule import StageCost, simulate
from oobleck_jax.planning.schedule_kinds import one_f_one_b
from tests.planning.profiles import UNIT_S, uniform_profile


times = st.integers(0, 9)
pipelines = st.lists(
    st.tuples(st.lists(st.tuples(times, times, times), min_size=1, max_size=6), st.integers(1, 14)),
    min_size=1,
    max_size=4,
)


@given(pipelines)
def test_fast_times_equal_those_of_the_simulated_schedule(rows: list[tuple[list[tuple[int, int, int]], int]]) -> None:
    columns = [(np.array(stages, dtype=np.int64).T, count) for stages, count in rows]
    ends = stage_ends_ns(
        [
            (StageTimes(forward_ns=f, backward_ns=b, weight_ns=0 * b, transfer_ns=t), count)
            for (f, b, t), count in columns
        ]
    )
    for (stages, count), found in zip(rows, ends, strict=True):
        costs = [StageCost(forward_s=forward, backward_s=backward) for forward, backward, _ in stages]
        simulated = simulate(one_f_one_b(len(stages), count), costs, [hop for _, _, hop in stages[:-1]])
        assert found.tolist() == [row[-1].end_s for row in simulated]


def even_plan(profile: Profile, *sizes: int, num_microbatches: int) -> Plan:
    """Return pipelines of so many nodes, with equal stages of one device."""
    pipelines: list[Pipeline] = []
    first = 0
    for size in sizes:
        length = profile.num_layers // size
        stages = tuple(Stage(first_layer=i * length, end_layer=(i + 1) * length, node_index=i) for i in range(size))
        nodes = tuple(NodeId(node) for node in range(first, first + size))
        pipelines.append(Pipeline(template=Template(stages=stages), nodes=nodes, num_microbatches=num_microbatches))
        first += size
    return Plan(pipelines=tuple(pipelines))


def test_balanced_pipeline_takes_the_closed_form_and_its_bubble_is_known() -> None:
    profile = uniform_profile(8)
    costs = tabulate(profile, devices_per_node=1, num_microbatches=6, device_memory_bytes=1)
    forecast = forecast_plan(even_plan(profile, 4, num_microbatches=6), profile, costs)
    assert forecast.step_s == pytest.approx((6 + 4 - 1) * 6 * UNIT_S)
    assert forecast.exposed_sum_s == 0
    assert forecast.bubble_fraction == pytest.approx(3 / 9)


def test_first_stage_sums_last_and_the_others_hide_theirs() -> None:
    profile = uniform_profile(4, state_bytes=10, sum=Rate(bytes_per_s=10 / UNIT_S, latency_s=0.0))
    costs = tabulate(profile, devices_per_node=1, num_microbatches=2, device_memory_bytes=10**6)
    forecast = forecast_plan(even_plan(profile, 2, 2, num_microbatches=2), profile, costs)
    # Two holders of 20 bytes each send all of them once: 2 units. The second stage ended 4 units (a backward) earlier.
    assert forecast.compute_s == pytest.approx((2 + 2 - 1) * 6 * UNIT_S)
    assert forecast.exposed_sum_s == pytest.approx(2 * UNIT_S)


def test_every_node_updates_its_layers_after_the_sums() -> None:
    profile = replace(uniform_profile(4, state_bytes=10), update_s_per_byte=UNIT_S / 10)
    costs = tabulate(profile, devices_per_node=1, num_microbatches=2, device_memory_bytes=10**6)
    forecast = forecast_plan(even_plan(profile, 2, num_microbatches=2), profile, costs)
    assert forecast.update_s == pytest.approx(2 * UNIT_S)  # two layers of 10 bytes
    assert forecast.step_s == pytest.approx((2 + 2 - 1) * 6 * UNIT_S + 2 * UNIT_S)


def test_memory_counts_state_and_the_microbatches_in_flight() -> None:
    profile = uniform_profile(4, state_bytes=10, residual_bytes=100)
    costs = tabulate(profile, devices_per_node=1, num_microbatches=8, device_memory_bytes=10**6)
    stages = forecast_plan(even_plan(profile, 2, num_microbatches=8), profile, costs).stages[0]
    assert [stage.memory_bytes for stage in stages] == [2 * 40 + 2 * 200, 2 * 40 + 1 * 200]
    few = forecast_plan(even_plan(profile, 2, num_microbatches=1), profile, costs).stages[0]
    assert few[0].memory_bytes == 2 * 40 + 1 * 200
