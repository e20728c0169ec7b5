import itertools
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Pipeline, Stage, Template
from oobleck_jax.planning.schedule import Phase, StageCost, check_schedule, simulate
from oobleck_jax.planning.schedule_kinds import (
    bubble_of_equal_stages,
    interleaved,
    make_schedule,
    one_f_one_b,
    schedule_of,
    zb_h1,
)
from oobleck_jax.planning.schedule_text import render
from tests.planning.schedule_forms import Form, forms


GOLDEN = {
    (1, 3): ["0F0 0B0 0F1 0B1 0F2 0B2"],
    (2, 1): ["0F0 0B0", "1F0 1B0"],
    (2, 4): ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    (3, 2): ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"],
    (3, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
}
EQUAL = StageCost(forward_s=1.0, backward_s=2.0)


@pytest.mark.parametrize("shape", GOLDEN)
def test_one_f_one_b_is_golden(shape: tuple[int, int]) -> None:
    assert [render(row) for row in one_f_one_b(*shape)] == GOLDEN[shape]


def test_interleaved_is_golden() -> None:
    assert [render(row) for row in interleaved(2, 2, 4)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_is_golden() -> None:
    assert [render(row) for row in zb_h1(2, 3)] == [
        "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2",
        "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2",
    ]


@given(forms)
def test_every_schedule_passes_its_check_S1_S2_S3(form: Form) -> None:
    check_schedule(
        form.schedule, num_stages=form.num_stages, num_microbatches=form.num_microbatches, limits=form.limits
    )


@given(forms)
def test_microbatches_in_flight_reach_the_limit_S2(form: Form) -> None:
    if form.kind is ScheduleKind.INTERLEAVED:  # of an incomplete round some are not there
        form = replace(form, num_microbatches=form.num_microbatches * form.num_lanes)
    last = Phase.WEIGHT if form.kind is ScheduleKind.ZB_H1 else Phase.BACKWARD
    for row, limit in zip(form.schedule, form.limits, strict=True):
        steps = [{Phase.FORWARD: 1, last: -1}.get(action.phase, 0) for action in row]
        assert max(itertools.accumulate(steps)) == limit


@given(st.integers(1, 7), st.integers(1, 20))
def test_equal_stages_have_the_bubble_of_the_formula(num_stages: int, num_microbatches: int) -> None:
    rows = simulate(one_f_one_b(num_stages, num_microbatches), [EQUAL] * num_stages)
    assert rows[0][-1].end_s == (num_microbatches + num_stages - 1) * 3.0


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5))
def test_interleaved_equal_stages_have_the_bubble_of_the_formula(
    num_lanes: int, num_chunks: int, num_rounds: int
) -> None:
    num_microbatches = num_rounds * num_lanes
    rows = simulate(interleaved(num_lanes, num_chunks, num_microbatches), [EQUAL] * num_lanes * num_chunks)
    assert rows[0][-1].end_s == (num_chunks * num_microbatches + num_lanes - 1) * 3.0


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 24))
def test_interleaved_is_never_slower_than_one_f_one_b(num_lanes: int, num_chunks: int, num_microbatches: int) -> None:
    rows = simulate(interleaved(num_lanes, num_chunks, num_microbatches), [EQUAL] * num_lanes * num_chunks)
    assert rows[0][-1].end_s <= (num_microbatches + num_lanes - 1) * num_chunks * 3.0


@given(st.integers(1, 7), st.integers(0, 20))
def test_zb_h1_of_equal_parts_has_a_third_of_the_bubble(num_stages: int, num_more: int) -> None:
    num_microbatches = num_stages + num_more
    cost = StageCost(forward_s=1.0, backward_s=1.0, weight_s=1.0)
    rows = simulate(zb_h1(num_stages, num_microbatches), [cost] * num_stages)
    assert max(row[-1].end_s for row in rows) == 3 * num_microbatches + num_stages - 1


@given(forms)
def test_the_bubble_of_equal_stages_is_what_a_simulation_has(form: Form) -> None:
    num_microbatches = form.num_microbatches * form.num_lanes
    form = replace(form, num_microbatches=num_microbatches)
    stages = tuple(
        Stage(first_layer=index, end_layer=index + 1, node_index=index % form.num_lanes)
        for index in range(form.num_stages)
    )
    nodes = tuple(NodeId(node) for node in range(form.num_lanes))
    pipeline = Pipeline(
        template=Template(stages=stages), nodes=nodes, num_microbatches=num_microbatches, schedule=form.kind
    )
    assert schedule_of(pipeline) == form.schedule
    cost = StageCost(forward_s=1.0, backward_s=1.0, weight_s=1.0 if form.kind is ScheduleKind.ZB_H1 else 0.0)
    rows = simulate(form.schedule, [cost] * form.num_stages)
    time_s = max(row[-1].end_s for row in rows)
    busy_s = sum(interval.end_s - interval.start_s for row in rows for interval in row)
    assert bubble_of_equal_stages(pipeline) == pytest.approx(1 - busy_s / (time_s * form.num_lanes))


@given(st.integers(1, 7), st.integers(1, 20))
def test_zb_h1_is_never_slower_than_one_f_one_b(num_stages: int, num_microbatches: int) -> None:
    cost = StageCost(forward_s=1.0, backward_s=1.0, weight_s=1.0)
    rows = simulate(zb_h1(num_stages, num_microbatches), [cost] * num_stages)
    assert max(row[-1].end_s for row in rows) <= 3 * (num_microbatches + num_stages - 1)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0)])
def test_empty_pipeline_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="needs a stage and a microbatch"):
        make_schedule(ScheduleKind.ONE_F_ONE_B, num_lanes=shape[0], num_stages=shape[0], num_microbatches=shape[1])
