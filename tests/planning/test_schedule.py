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
    one_f_one_b,
    parse,
    render,
    render_grid,
    simulate,
)


GOLDEN = {
    (1, 3): ["0F0 0B0 0F1 0B1 0F2 0B2"],
    (2, 1): ["0F0 0B0", "1F0 1B0"],
    (2, 4): ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    (3, 2): ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"],
    (3, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
}
costs_of = st.builds(StageCost, forward_s=st.integers(0, 9).map(float), backward_s=st.integers(0, 9).map(float))
shapes = st.tuples(st.integers(1, 7), st.integers(1, 20))


def parse_rows(*rows: str) -> Schedule:
    return tuple(parse(row) for row in rows)


@pytest.mark.parametrize("shape", GOLDEN)
def test_one_f_one_b_is_golden(shape: tuple[int, int]) -> None:
    assert [render(row) for row in one_f_one_b(*shape)] == GOLDEN[shape]


@given(shapes)
def test_one_f_one_b_passes_its_check_S1_S2_S3(shape: tuple[int, int]) -> None:
    check_schedule(one_f_one_b(*shape), num_stages=shape[0], num_microbatches=shape[1])


@given(shapes, st.data())
def test_no_action_begins_before_its_data_is_there_S1(shape: tuple[int, int], data: st.DataObject) -> None:
    num_stages = shape[0]
    costs = data.draw(st.lists(costs_of, min_size=num_stages, max_size=num_stages))
    transfer_s = data.draw(st.lists(st.integers(0, 9), min_size=num_stages - 1, max_size=num_stages - 1))
    rows = simulate(one_f_one_b(*shape), costs, transfer_s)
    interval_of = {interval.action: interval for row in rows for interval in row}
    for action, interval in interval_of.items():
        neighbour = action.stage + (-1 if action.phase is Phase.FORWARD else 1)
        if 0 <= neighbour < num_stages:
            source = interval_of[Action(stage=neighbour, phase=action.phase, microbatch=action.microbatch)]
            assert interval.start_s >= source.end_s + transfer_s[min(action.stage, neighbour)]
        if action.phase is Phase.BACKWARD:
            forward = interval_of[Action(stage=action.stage, phase=Phase.FORWARD, microbatch=action.microbatch)]
            assert interval.start_s >= forward.end_s
    for row in rows:
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(row))


@given(shapes)
def test_microbatches_in_flight_reach_and_keep_the_limit_S2(shape: tuple[int, int]) -> None:
    num_stages, num_microbatches = shape
    for stage, row in enumerate(one_f_one_b(*shape)):
        steps = [1 if action.phase is Phase.FORWARD else -1 for action in row]
        assert max(itertools.accumulate(steps)) == min(num_stages - stage, num_microbatches)


@given(shapes, st.data())
def test_nodes_that_follow_their_merged_order_end_S3(shape: tuple[int, int], data: st.DataObject) -> None:
    num_stages = shape[0]
    schedule = one_f_one_b(*shape)
    costs = data.draw(st.lists(costs_of, min_size=num_stages, max_size=num_stages))
    node_of = data.draw(st.lists(st.integers(0, 2), min_size=num_stages, max_size=num_stages))
    stages_of = {node: [stage for stage in range(num_stages) if node_of[stage] == node] for node in set(node_of)}
    orders = {node: list(merge_for_node(schedule, stages, costs)) for node, stages in stages_of.items()}
    for node, stages in stages_of.items():
        for stage in stages:  # a merged order keeps the order of each of its stages
            assert tuple(action for action in orders[node] if action.stage == stage) == schedule[stage]
    done: set[Action] = set()
    while any(orders.values()):  # each node runs one action after the other, and waits for the data of the next
        runnable = [order for order in orders.values() if order and _data_is_there(order[0], done, num_stages)]
        assert runnable, "the nodes wait for each other"
        done.update(order.pop(0) for order in runnable)


def _data_is_there(action: Action, done: set[Action], num_stages: int) -> bool:
    neighbour = action.stage + (-1 if action.phase is Phase.FORWARD else 1)
    needed = Action(stage=neighbour, phase=action.phase, microbatch=action.microbatch)
    return not 0 <= neighbour < num_stages or needed in done


def test_balanced_stages_take_the_time_of_the_closed_form() -> None:
    costs = [StageCost(forward_s=1.0, backward_s=2.0)] * 4
    rows = simulate(one_f_one_b(4, 10), costs)
    assert rows[0][-1].end_s == (10 + 4 - 1) * 3.0


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
    ],
)
def test_incomplete_or_reversed_schedule_is_refused_S1(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(parse_rows(*rows), num_stages=2, num_microbatches=2)


def test_too_many_microbatches_in_flight_are_refused_S2() -> None:
    rows = parse_rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    with pytest.raises(PlanError, match="stage 0 keeps 3 microbatches at 0F2; memory is planned for 2"):
        check_schedule(rows, num_stages=2, num_microbatches=3)


def test_last_stage_must_run_its_backward_at_once_S2() -> None:
    rows = parse_rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(PlanError, match="stage 1 keeps 2 microbatches at 1F1; memory is planned for 1"):
        check_schedule(rows, num_stages=2, num_microbatches=2)


def test_circular_wait_is_refused_S3() -> None:
    rows = parse_rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(
        PlanError, match="never ends: these wait for each other: stage 0 before 0B0, stage 1 before 1F1"
    ):
        check_schedule(rows, num_stages=2, num_microbatches=2)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0)])
def test_empty_pipeline_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="needs a stage and a microbatch"):
        one_f_one_b(*shape)


@given(shapes)
def test_parse_undoes_render(shape: tuple[int, int]) -> None:
    for row in one_f_one_b(*shape):
        assert parse(render(row)) == row


def test_text_that_is_no_action_is_refused() -> None:
    with pytest.raises(PlanError, match="'0X1' is not an action"):
        parse("0F0 0X1")


def test_grid_is_golden() -> None:
    grid = render_grid(one_f_one_b(3, 4), [StageCost(forward_s=1.0, backward_s=2.0)] * 3)
    assert grid == (
        "stage 0 F0 F1 F2             B0--- F3 B1---    B2---    B3---\n"
        "stage 1    F0 F1       B0--- F2 B1--- F3 B2---    B3---\n"
        "stage 2       F0 B0--- F1 B1--- F2 B2--- F3 B3---"
    )


def test_long_grid_continues_in_a_second_band() -> None:
    grid = render_grid(one_f_one_b(2, 30), [StageCost(forward_s=1.0, backward_s=1.0)] * 2, width=80)
    assert max(len(line) for line in grid.splitlines()) <= 80
    assert len(grid.split("\n\n")) == 4
