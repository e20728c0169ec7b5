import itertools

import pytest
from hypothesis import given, strategies as st

from oobleck_jax.errors import PlanError
from oobleck_jax.planning.schedule import (
    Action,
    Phase,
    Schedule,
    StageCost,
    check_schedule,
    merge_for_node,
    simulate,
    stage_ends,
)
from oobleck_jax.planning.schedule_kinds import one_f_one_b
from oobleck_jax.planning.schedule_text import parse, render
from tests.planning.schedule_forms import Form, forms


times = st.integers(0, 9).map(float)
costs_of = st.builds(StageCost, forward_s=times, backward_s=times, weight_s=times)


def parse_rows(*rows: str) -> Schedule:
    return tuple(parse(row) for row in rows)


def draw_costs(form: Form, data: st.DataObject) -> list[StageCost]:
    return data.draw(st.lists(costs_of, min_size=form.num_stages, max_size=form.num_stages))


@given(forms, st.data())
def test_no_action_begins_before_its_data_is_there_S1(form: Form, data: st.DataObject) -> None:
    costs, num_hops = draw_costs(form, data), form.num_stages - 1
    transfer_s = data.draw(st.lists(st.integers(0, 9), min_size=num_hops, max_size=num_hops))
    rows = simulate(form.schedule, costs, transfer_s)
    interval_of = {interval.action: interval for row in rows for interval in row}
    for action, interval in interval_of.items():
        neighbour = action.stage + (-1 if action.phase is Phase.FORWARD else 1)
        if action.phase is Phase.WEIGHT:
            backward = interval_of[Action(stage=action.stage, phase=Phase.BACKWARD, microbatch=action.microbatch)]
            assert interval.start_s >= backward.end_s
        elif 0 <= neighbour < form.num_stages:
            source = interval_of[Action(stage=neighbour, phase=action.phase, microbatch=action.microbatch)]
            assert interval.start_s >= source.end_s + transfer_s[min(action.stage, neighbour)]
        if action.phase is Phase.BACKWARD:
            forward = interval_of[Action(stage=action.stage, phase=Phase.FORWARD, microbatch=action.microbatch)]
            assert interval.start_s >= forward.end_s
        assert interval.end_s - interval.start_s == costs[action.stage].of(action.phase)
    for row in rows:
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(row))
    ends = stage_ends(form.schedule, costs, transfer_s)
    for stage, end_s in enumerate(ends):
        assert end_s == max(interval.end_s for action, interval in interval_of.items() if action.stage == stage)


@given(forms, st.data())
def test_nodes_that_follow_their_merged_order_end_S3(form: Form, data: st.DataObject) -> None:
    costs, schedule = draw_costs(form, data), form.schedule
    node_of = data.draw(st.lists(st.integers(0, 2), min_size=form.num_lanes, max_size=form.num_lanes))
    lanes_of = {node: [lane for lane in range(form.num_lanes) if node_of[lane] == node] for node in set(node_of)}
    orders = {node: list(merge_for_node(schedule, lanes, costs)) for node, lanes in lanes_of.items()}
    for node, lanes in lanes_of.items():
        for lane in lanes:  # a merged order keeps the order of each of its lanes
            assert tuple(item for item in orders[node] if item.stage % form.num_lanes == lane) == schedule[lane]
    done: set[Action] = set()
    while any(orders.values()):  # each node runs one action after the other, and waits for the data of the next
        runnable = [order for order in orders.values() if order and _data_is_there(order[0], done, form.num_stages)]
        assert runnable, "the nodes wait for each other"
        done.update(order.pop(0) for order in runnable)


def _data_is_there(action: Action, done: set[Action], num_stages: int) -> bool:
    if action.phase is Phase.WEIGHT:
        return Action(stage=action.stage, phase=Phase.BACKWARD, microbatch=action.microbatch) in done
    neighbour = action.stage + (-1 if action.phase is Phase.FORWARD else 1)
    needed = Action(stage=neighbour, phase=action.phase, microbatch=action.microbatch)
    return not 0 <= neighbour < num_stages or needed in done


def test_merged_order_follows_the_time_line() -> None:
    merged = merge_for_node(one_f_one_b(2, 3), (0, 1), [StageCost(forward_s=1.0, backward_s=2.0)] * 2)
    assert render(merged) == "0F0 0F1 1F0 1B0 1F1 0B0 1B1 0F2 0B1 1F2 1B2 0B2"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0",), "1 rows"),
        (("0F0 0B0 0F1", "1F0 1B0 1F1 1B1"), "3 actions"),
        (("0F0 0B0 0F1 0B1 0B1", "1F0 1B0 1F1 1B1"), "0B1 twice"),
        (("0F0 0B0 0F2 0B2", "1F0 1B0 1F1 1B1"), "cannot run 0F2"),
        (("0F0 0B0 1F1 1B1", "1F0 1B0 1F1 1B1"), "cannot run 1F1"),
        (("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0B0 before its forward"),
        (("0F0 0W0 0B0 0F1 0B1 0W1", "1F0 1B0 1F1 1B1"), "0W0 before its backward"),
        (("0F0 0B0 0W0 0F1 0B1", "1F0 1B0 1F1 1B1"), "5 actions; 2 microbatches need 6"),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "1F1 before 1B0, which must follow its forward"),
    ],
)
def test_incomplete_or_reversed_schedule_is_refused_S1(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(parse_rows(*rows), num_stages=2, num_microbatches=2, limits=(2, 2))


def test_too_many_microbatches_in_flight_are_refused_S2() -> None:
    rows = parse_rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    with pytest.raises(PlanError, match="stage 0 keeps 3 microbatches at 0F2; memory is planned for 2"):
        check_schedule(rows, num_stages=2, num_microbatches=3, limits=(2, 1))


def test_stages_of_a_lane_count_together_S2() -> None:
    rows = parse_rows("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    check_schedule(rows, num_stages=4, num_microbatches=1, limits=(2, 2))
    with pytest.raises(PlanError, match="the lane of stages 0, 2 keeps 2 microbatches at 2F0; memory is planned for 1"):
        check_schedule(rows, num_stages=4, num_microbatches=1, limits=(1, 2))


def test_what_never_ends_is_no_time_line() -> None:
    schedule = parse_rows("0B0 0F0", "1F0 1B0")
    costs = [StageCost(forward_s=1.0, backward_s=1.0, weight_s=0.0)] * 2
    for run in (
        lambda: simulate(schedule, costs),
        lambda: stage_ends(schedule, costs, [0.0]),
        lambda: merge_for_node(schedule, (0,), costs),
    ):
        with pytest.raises(PlanError, match=r"the schedule never ends: .* waits for ever; see check_schedule"):
            run()
    with pytest.raises(PlanError, match="has 2 rows of actions, the pipeline has 1 lanes"):
        check_schedule(schedule, num_stages=2, num_microbatches=1, limits=(1,))


def test_circular_wait_is_refused_S3() -> None:
    rows = parse_rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(
        PlanError, match="never ends: these wait for each other: stage 0 before 0B0, stage 1 before 1F1"
    ):
        check_schedule(rows, num_stages=2, num_microbatches=2, limits=(2, 1))
