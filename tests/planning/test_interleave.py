import pytest
from hypothesis import given, strategies as st

from oobleck_jax.config import ScheduleKind
from oobleck_jax.planning.costs import Costs, tabulate
from oobleck_jax.planning.interleave import interleave
from oobleck_jax.planning.lane_memory import lanes_memory_bytes
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template, check_plan
from oobleck_jax.planning.profile import Profile
from tests.planning.profiles import make_layer, make_profile, profiles, uniform_profile


def costs_of(profile: Profile) -> Costs:
    return tabulate(profile, devices_per_node=1, num_microbatches=8, device_memory_bytes=10**9)


def even_template(num_layers: int, num_stages: int) -> Template:
    cuts = [index * num_layers // num_stages for index in range(num_stages + 1)]
    return Template(
        stages=tuple(
            Stage(first_layer=cuts[index], end_layer=cuts[index + 1], node_index=index) for index in range(num_stages)
        )
    )


def layers_of(template: Template) -> list[int]:
    return [len(stage.layers) for stage in template.stages]


@given(profiles(min_layers=4, with_memory=False), st.integers(2, 3), st.integers(2, 4))
def test_every_form_is_a_plan_of_the_same_nodes_P1_P3(profile: Profile, num_nodes: int, num_chunks: int) -> None:
    template = even_template(profile.num_layers, num_nodes)
    form = interleave(template, num_chunks, costs_of(profile))
    if form is None:
        assert num_nodes * num_chunks > profile.num_layers
        return
    assert len(form.stages) == num_nodes * num_chunks
    nodes = tuple(NodeId(node) for node in range(num_nodes))
    pipeline = Pipeline(template=form, nodes=nodes, num_microbatches=8, schedule=ScheduleKind.INTERLEAVED)
    check_plan(Plan(pipelines=(pipeline,)), num_layers=profile.num_layers, num_microbatches=8)


def test_equal_layers_are_shared_equally() -> None:
    form = interleave(even_template(12, 2), 3, costs_of(uniform_profile(12)))
    assert form is not None
    assert layers_of(form) == [2, 2, 2, 2, 2, 2]


def test_a_long_last_layer_takes_work_from_the_other_stages_of_its_devices() -> None:
    layers = [*[make_layer([(1, 2)], kind="block")] * 9, make_layer([(3, 6)], kind="head")]
    form = interleave(even_template(10, 2), 2, costs_of(make_profile(layers)))
    assert form is not None
    work = [sum(3 if layer < 9 else 9 for layer in stage.layers) for stage in form.stages]
    assert work[0] + work[2] == work[1] + work[3] == 18


def test_memory_is_that_of_all_stages_of_the_devices_P2() -> None:
    profile = uniform_profile(4, state_bytes=10, residual_bytes=100)
    form = interleave(even_template(4, 2), 2, costs_of(profile))
    assert form is not None
    # State of 40 bytes a layer. The first lane keeps 5 microbatches of a stage of one layer, the last one 3.
    peaks = lanes_memory_bytes(form, 8, costs_of(profile), ScheduleKind.INTERLEAVED)
    assert peaks == (2 * 40 + 5 * 100, 2 * 40 + 3 * 100)
    assert lanes_memory_bytes(form, 1, costs_of(profile), ScheduleKind.INTERLEAVED) == (80 + 200, 80 + 200)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_more_stages_than_layers_are_refused(num_chunks: int) -> None:
    assert interleave(even_template(3, 2), num_chunks, costs_of(uniform_profile(3))) is None
