import pytest

from oobleck_jax.errors import NotEnoughNodes
from tests.replay.workloads import layouts


def test_grids_take_what_1f1b_takes() -> None:
    """A pipeline of S stages does m microbatches in (m + S - 1) times 12 / S seconds."""
    steps = {(grid.num_pipelines, grid.depth): grid.step_s for grid in layouts(8).grids}
    assert steps[1, 1] == 12 * 12
    assert steps[1, 4] == 3 * (12 + 3)
    assert steps[2, 4] == 3 * (6 + 3)
    assert steps[8, 1] == 12 * 2  # twelve microbatches on eight: some do two
    assert steps[3, 2] == 6 * (4 + 1)


def test_the_fastest_grid_may_leave_nodes_idle() -> None:
    grid = layouts(8).grid_for(5)
    assert grid is not None
    assert (grid.num_pipelines, grid.depth, grid.step_s) == (4, 1, 36)
    assert layouts(8, memory_bytes=1000).grid_for(1) is None  # 1600 bytes of state


def test_nodes_of_a_stage_do_the_work_of_a_dead_one_in_bubbles_first() -> None:
    grid = next(grid for grid in layouts(8).grids if (grid.num_pipelines, grid.depth) == (2, 4))
    assert (grid.step_s, grid.busy_s, grid.bubble_s) == (27, 18, 9)
    assert grid.rerouted_step_s((2, 2, 2, 2), 12) == 27
    assert grid.rerouted_step_s((2, 2, 1, 2), 12) == 27 + (36 - 18 - 6)
    assert grid.spread(7) == (2, 2, 2, 1)
    assert grid.spread(5) == (2, 1, 1, 1)


def test_the_ideal_never_falls_with_more_nodes_and_no_layout_is_faster() -> None:
    found = layouts(12)
    rates = [found.ideal_rate(number, 1) for number in range(13)]
    assert rates[0] == 0
    assert rates == sorted(rates)
    for grid in found.grids:
        assert found.samples_per_step / grid.step_s <= rates[grid.num_nodes]
        for number in range(grid.depth, grid.num_nodes):
            assert found.samples_per_step / grid.rerouted_step_s(grid.spread(number), 12) <= rates[number]
    for tolerance in (0, 1):
        steps_s = [found.plan_step_s(number, tolerance) for number in range(1, 13)]
        assert all(step_s and 12 / step_s <= rate for step_s, rate in zip(steps_s, rates[1:], strict=True))


def test_timing_all_plans_at_once_changes_none() -> None:
    one, all_at_once = layouts(6), layouts(6)
    all_at_once.forecast_all(1)
    assert [one.plan_step_s(number, 1) for number in range(7)] == [
        all_at_once.plan_step_s(number, 1) for number in range(7)
    ]


def test_a_model_that_fits_on_none_of_the_nodes_is_refused() -> None:
    with pytest.raises(NotEnoughNodes, match="add 2 nodes"):
        layouts(2, memory_bytes=450)
